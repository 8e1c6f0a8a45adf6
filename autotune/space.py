"""Knobs, what of them is legal here and why not, and the canonical key of a configuration. Knows no Optuna.

A `Space` is made once per study from facts (a probe of the device and the workload, the host's limits) and
a request (``--set``, ``--fix``, ``--baseline``). Every refused value carries its reason, in one sentence that names
what would have to change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.errors import UnknownNameError, UsageError
from autotune.records import Config, Host, Probe, Value


class Scope(StrEnum):
    """What a knob is applied to."""

    PROCESS = "process"
    MODEL = "model"
    LOADER = "loader"
    WORKLOAD = "workload"


@dataclass(frozen=True)
class Knob:
    """One thing that can be set.

    Attributes:
        changes_maths: whether a step computes something else (beyond rounding order) when it changes.
        memory: whether the device's peak memory depends on it; dominance after an OOM looks at these.
        values: every value of the contract, or ``None`` where any non-negative integer is one.
        minimum: smallest integer value, where values are integers.
    """

    name: str
    scope: Scope
    about: str
    changes_maths: bool = False
    memory: bool = False
    values: tuple[Value, ...] | None = None
    minimum: int = 1


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob("precision", Scope.MODEL, "number format of the step", True, True, ("fp32", "tf32", "bf16", "fp16")),
        Knob(
            "compile_mode",
            Scope.MODEL,
            "torch.compile",
            memory=True,
            values=("off", "default", "reduce-overhead", "max-autotune"),
        ),
        Knob("batch_size", Scope.WORKLOAD, "samples per step", True, True),
        Knob(
            "memory_format",
            Scope.MODEL,
            "layout of image tensors",
            memory=True,
            values=("contiguous", "channels_last"),
        ),
        Knob("num_workers", Scope.LOADER, "loader processes", minimum=0),
        Knob("prefetch_factor", Scope.LOADER, "batches each worker prepares ahead"),
        Knob("pin_memory", Scope.LOADER, "page-locked host memory", values=(False, True)),
        Knob("persistent_workers", Scope.LOADER, "workers outlive the epoch", values=(False, True)),
        Knob("cudnn_benchmark", Scope.PROCESS, "cuDNN tries its algorithms", memory=True, values=(False, True)),
        Knob(
            "optimizer_impl",
            Scope.MODEL,
            "how the optimizer visits parameters",
            memory=True,
            values=("for-loop", "foreach", "fused"),
        ),
        Knob("intra_op_threads", Scope.PROCESS, "threads inside one operation (CPU)"),
        Knob("alloc_conf", Scope.PROCESS, "CUDA allocator", memory=True, values=("default", "expandable_segments")),
    )
}

CUDAGRAPH_MODES = ("reduce-overhead", "max-autotune")
NEEDS_WORKERS = ("prefetch_factor", "persistent_workers")
#: A worker forked from a process with torch loaded dirties about this much of its own.
WORKER_BYTES = 200 * 2**20


@dataclass(frozen=True)
class Choice:
    """One value of a knob, and why it is refused (``None``: it is legal)."""

    value: Value
    refused: str | None = None


@dataclass(frozen=True)
class SpaceRequest:
    """What the user asked of the space; values already parsed."""

    narrowed: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Value] = field(default_factory=dict)
    baseline: Mapping[str, Value] = field(default_factory=dict)
    batch_size: int | None = None


def canonical(config: Config) -> dict[str, Value]:
    """The configuration without its inactive knobs, in the contract's order of names."""
    active = dict(config)
    if active.get("num_workers") == 0:
        for name in NEEDS_WORKERS:
            active.pop(name, None)
    order = {name: i for i, name in enumerate(KNOBS)}
    return dict(sorted(active.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def key(config: Config) -> str:
    """The canonical key: equal for configurations that run the same."""
    return json.dumps(canonical(config), sort_keys=True, separators=(",", ":"))


def parse_value(name: str, text: str, workload_knobs: Mapping[str, tuple[Value, ...]] | None = None) -> Value:
    """A knob's value from the command line's text.

    Raises:
        UnknownNameError: no such knob, or no such value of it.
        UsageError: not a number where one is needed, or below its minimum.
    """
    if name.startswith("workload."):
        return _parse_workload_value(name, text, workload_knobs)
    if name not in KNOBS:
        raise UnknownNameError("knob", name, KNOBS)
    knob = KNOBS[name]
    if knob.values is None:
        try:
            number = int(text)
        except ValueError:
            raise UsageError(f"{name} must be a whole number, not {text!r}") from None
        if number < knob.minimum:
            raise UsageError(f"{name} must be at least {knob.minimum}, not {number}")
        return number
    by_text = {_spell(value): value for value in knob.values}
    if text.lower() not in by_text:
        raise UnknownNameError(f"value of {name}", text, by_text, advice=f"choices: {', '.join(by_text)}.")
    return by_text[text.lower()]


def _parse_workload_value(name: str, text: str, declared: Mapping[str, tuple[Value, ...]] | None) -> Value:
    if declared is None:
        return text
    short = name.removeprefix("workload.")
    if short not in declared:
        raise UnknownNameError("knob of the workload", short, declared)
    by_text = {_spell(value): value for value in declared[short]}
    if text not in by_text:
        raise UnknownNameError(f"value of {name}", text, by_text)
    return by_text[text]


def _spell(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def spell(value: Value | None) -> str:
    """A value as the contract writes it; ``-`` for an inactive knob."""
    return "-" if value is None else _spell(value)


@dataclass(frozen=True)
class Space:
    """The knobs of one study, their choices, and which combinations are legal.

    Attributes:
        choices: every value considered, with its refusal if any, per active knob.
        inactive: knobs that mean nothing here, with the reason.
        baseline: the configuration of trial 0. Always launchable, even where ``--set`` leaves it outside.
    """

    choices: Mapping[str, tuple[Choice, ...]]
    inactive: Mapping[str, str]
    baseline: Mapping[str, Value]
    dataset_samples: int | None = None
    sample_bytes: int | None = None
    shm_bytes: int = 0
    memory_bytes: int = 0

    def legal(self, name: str) -> tuple[Value, ...]:
        """The legal values of a knob, in order."""
        return tuple(c.value for c in self.choices[name] if c.refused is None)

    def refusal(self, config: Config) -> str | None:
        """Why a configuration may not be launched here, or ``None`` if it may."""
        for name, value in canonical(config).items():
            if name not in self.choices:
                return f"{name}: {self.inactive.get(name, 'unknown knob')}"
            for choice in self.choices[name]:
                if choice.value == value and type(choice.value) is type(value):
                    if choice.refused is not None:
                        return f"{name}={spell(value)}: {choice.refused}"
                    break
            else:
                return f"{name}={spell(value)} is not among this study's choices"
        return self._combination_refusal(config)

    def _combination_refusal(self, config: Config) -> str | None:
        batch = int(config["batch_size"])
        if self.dataset_samples is not None and batch > self.dataset_samples:
            return f"batch_size={batch}: the data set holds only {self.dataset_samples} samples"
        workers = int(config.get("num_workers", 0))
        if workers and self.sample_bytes:
            # Each worker's queue holds prefetch_factor batches, and one more is being put together.
            queued = workers * (int(config.get("prefetch_factor", 2)) + 1) * batch * self.sample_bytes
            if queued > self.shm_bytes:
                return (
                    f"{workers} workers would queue {queued / 2**20:.0f} MiB, /dev/shm has "
                    f"{self.shm_bytes / 2**20:.0f} MiB (containers: raise --shm-size)"
                )
            if queued + workers * WORKER_BYTES > self.memory_bytes:
                return f"{workers} workers and their queues would not fit into host memory"
        return None

    def grid(self) -> Iterator[dict[str, Value]]:
        """Every legal configuration once, canonical. Lazy: a space can hold 10⁵ of them."""
        names = list(self.choices)
        seen: set[str] = set()

        def walk(index: int, config: dict[str, Value]) -> Iterator[dict[str, Value]]:
            if index == len(names):
                found = canonical(config)
                if self._combination_refusal(found) is None and (k := key(found)) not in seen:
                    seen.add(k)
                    yield found
                return
            name = names[index]
            if name in NEEDS_WORKERS and config.get("num_workers") == 0:
                yield from walk(index + 1, config)
                return
            for value in self.legal(name):
                yield from walk(index + 1, {**config, name: value})

        yield from walk(0, {})

    def same_maths(self, config: Config) -> bool:
        """Whether a configuration trains at the baseline's batch size and with its own workload knobs."""
        return config.get("batch_size") == self.baseline.get("batch_size") and all(
            config.get(name) == value for name, value in self.baseline.items() if name.startswith("workload.")
        )

    def dominated(self, config: Config, out_of_memory: list[Config]) -> bool:
        """Whether one of ``out_of_memory`` was the same, as far as device memory goes, with no larger batch."""

        def memory_part(c: Config) -> dict[str, Value]:
            return {
                n: v
                for n, v in canonical(c).items()
                if n != "batch_size" and (n.startswith("workload.") or KNOBS[n].memory)
            }

        mine = memory_part(config)
        return any(
            memory_part(failed) == mine and int(failed["batch_size"]) <= int(config["batch_size"])
            for failed in out_of_memory
        )


def build_space(probe: Probe, host: Host, request: SpaceRequest) -> Space:
    """The legal space of a workload on a machine.

    Raises:
        UsageError: the request names an illegal value, or leaves a knob without a legal one.
    """
    considered, inactive = _considered(probe, host, request)
    baseline = _baseline(probe, request, considered)
    for name in [*request.narrowed, *request.fixed, *request.baseline]:
        if name in inactive:
            raise UsageError(f"{name} cannot be set here: {inactive[name]}")
        if name not in considered:
            raise UnknownNameError("knob", name, [*KNOBS, *considered])
    choices: dict[str, tuple[Choice, ...]] = {}
    for name, offered in considered.items():
        wanted = request.narrowed.get(name)
        if name in request.fixed:
            wanted = (request.fixed[name],)
        choices[name] = _narrow(name, offered, wanted, probe)
        # The sentence about the value the user named is worth more than "no value left".
        if not any(c.refused is None for c in choices[name]):
            refused = choices[name][0]
            raise UsageError(f"{name}={spell(refused.value)} is not possible here: {refused.refused}")
    for name, value in baseline.items():
        refused_value = _refusal(name, value, probe)
        if refused_value is not None:
            raise UsageError(f"baseline {name}={spell(value)} is not possible here: {refused_value}")
    return Space(
        choices=choices,
        inactive=inactive,
        baseline=canonical(baseline),
        dataset_samples=probe.dataset_samples,
        sample_bytes=probe.sample_bytes,
        shm_bytes=host.shm_free_bytes,
        memory_bytes=host.available_bytes,
    )


def _narrow(
    name: str, offered: tuple[Value, ...], wanted: tuple[Value, ...] | None, probe: Probe
) -> tuple[Choice, ...]:
    return tuple(Choice(value, _refusal(name, value, probe)) for value in (wanted or offered))


def _geometric(start: int, limit: int) -> list[int]:
    values = []
    while start <= limit:
        values.append(start)
        start *= 2
    return values


def _considered(probe: Probe, host: Host, request: SpaceRequest) -> tuple[dict[str, tuple[Value, ...]], dict[str, str]]:
    """Every value to consider per active knob, and the inactive knobs with the reason."""
    cuda = probe.device != "cpu"
    batch = request.batch_size or int(request.baseline.get("batch_size", probe.default_batch_size))
    offered: dict[str, tuple[Value, ...]] = {
        name: knob.values for name, knob in KNOBS.items() if knob.values is not None
    }
    # Past 4x a CPU gains nothing and each step costs seconds; a GPU's memory is the limit there.
    largest = batch * (16 if cuda else 4)
    offered["batch_size"] = tuple(b for b in [batch // 2, *_geometric(batch, largest)] if b >= 1)
    # Past the cores too: on a slow store, workers that wait overlap.
    offered["num_workers"] = (0, *_geometric(1, max(8, 4 * host.cores)))
    offered["prefetch_factor"] = (2, 4, 8)
    threads = {*_geometric(1, probe.cores), probe.cores}
    offered["intra_op_threads"] = tuple(sorted(threads))
    inactive: dict[str, str] = {}
    if cuda:
        inactive["intra_op_threads"] = "the step runs on the GPU"
    else:
        for name in ("pin_memory", "cudnn_benchmark", "alloc_conf"):
            inactive[name] = "needs a CUDA device"
    considered = {name: offered[name] for name in KNOBS if name not in inactive}
    for name, values in probe.workload_knobs.items():
        considered[f"workload.{name}"] = values
    workers_pinned = request.fixed.get("num_workers", None) == 0 or request.narrowed.get("num_workers") == (0,)
    if workers_pinned:
        for name in NEEDS_WORKERS:
            inactive[name] = "needs num_workers above 0"
            considered.pop(name, None)
    return considered, inactive


def _baseline(probe: Probe, request: SpaceRequest, considered: Mapping[str, tuple[Value, ...]]) -> dict[str, Value]:
    """What the user runs today: PyTorch's own defaults, and on top what was stated."""
    cuda = probe.device != "cpu"
    defaults: dict[str, Value] = {
        "precision": "fp32",
        "compile_mode": "off",
        "batch_size": request.batch_size or probe.default_batch_size,
        "memory_format": "contiguous",
        "num_workers": 0,
        # torch.optim picks foreach by itself on CUDA only (_default_to_fused_or_foreach).
        "optimizer_impl": "foreach" if cuda and "foreach" in probe.optimizer_impls else "for-loop",
        "pin_memory": False,
        "cudnn_benchmark": False,
        "alloc_conf": "default",
        "intra_op_threads": probe.cores,
        # PyTorch's own defaults once there are workers.
        "prefetch_factor": 2,
        "persistent_workers": False,
    }
    for name, values in probe.workload_knobs.items():
        defaults[f"workload.{name}"] = values[0]
    stated = {**request.fixed, **request.baseline}
    return canonical({**{n: v for n, v in defaults.items() if n in considered}, **stated})


def _refusal(name: str, value: Value, probe: Probe) -> str | None:
    """Why one value of one knob is illegal for this device and workload, or ``None``."""
    cuda = probe.device != "cpu"
    if name == "precision":
        if value == "fp16" and not cuda:
            return "needs a CUDA device"
        if value == "tf32" and not probe.tf32:
            return "needs a CUDA device of compute capability 8.0 or above" if cuda else "needs a CUDA device"
        if value == "bf16" and not probe.native_bf16:
            return "this device only emulates bf16"
    if name == "compile_mode" and value != "off":
        if probe.compiler is None:
            return "no working compiler found (Triton on a GPU, a C++ compiler on a CPU)"
        if value in CUDAGRAPH_MODES:
            if not probe.cudagraphs:
                return "uses CUDA graphs, which need a CUDA device"
            if probe.varying_shapes:
                return "CUDA graphs need shapes that do not vary"
    if name == "cudnn_benchmark" and value is True and probe.varying_shapes:
        return "the search would run again for every new shape"
    if name == "memory_format" and value == "channels_last" and not probe.has_images:
        return "the model has no 4-dimensional weights"
    if name == "optimizer_impl" and value not in probe.optimizer_impls:
        return "this workload's optimizer does not offer it on this device"
    return None
