"""From facts and a request to a space: what is considered, what is refused, and what the baseline is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.errors import UnknownNameError, UsageError
from autotune.records import Host, Probe, Value
from autotune.space.knobs import CUDAGRAPH_MODES, KNOBS, NEEDS_WORKERS, canonical, spell
from autotune.space.legal import Choice, Space


@dataclass(frozen=True)
class SpaceRequest:
    """What the user asked of the space; values already parsed."""

    narrowed: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Value] = field(default_factory=dict)
    baseline: Mapping[str, Value] = field(default_factory=dict)
    batch_size: int | None = None


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
    space = Space(
        choices=choices,
        inactive=inactive,
        baseline=canonical(baseline),
        dataset_samples=probe.dataset_samples,
        sample_bytes=probe.sample_bytes,
        shm_bytes=host.shm_free_bytes,
        memory_bytes=host.available_bytes,
        # Samples whose shapes vary cannot be stacked: a batch of them is a list of tensors.
        batch_tensors=0 if probe.varying_shapes else probe.sample_tensors,
        sample_tensors=probe.sample_tensors if probe.varying_shapes else 0,
        open_files=host.open_files,
    )
    refused_baseline = space.combination_refusal(space.baseline)
    if refused_baseline is not None:
        raise UsageError(
            f"the baseline is not possible here: {refused_baseline}",
            advice="--batch-size or --baseline states another one.",
        )
    if next(space.grid(), None) is None:
        raise UsageError(
            "no combination of the values left is possible here", advice="allow more with --set, or fix less."
        )
    return space


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
    defaults: dict[str, Value] = {
        "precision": "fp32",
        "compile_mode": "off",
        "batch_size": request.batch_size or probe.default_batch_size,
        "memory_format": "contiguous",
        "num_workers": 0,
        "optimizer_impl": probe.own_optimizer_impl,
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
    own_batch: dict[str, Value] = {} if request.batch_size is None else {"batch_size": request.batch_size}
    stated = {**request.fixed, **own_batch, **request.baseline}
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
