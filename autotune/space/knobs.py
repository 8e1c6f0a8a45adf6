"""The knobs: their values, how they are spelled, and the canonical key of a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from autotune.errors import UnknownNameError, UsageError
from autotune.records import Config, Value


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

_ALLOC_CONF = {"default": None, "expandable_segments": "expandable_segments:True"}
CUDAGRAPH_MODES = ("reduce-overhead", "max-autotune")
_ORDER = {name: i for i, name in enumerate(KNOBS)}
NEEDS_WORKERS = ("prefetch_factor", "persistent_workers")


def canonical(config: Config) -> dict[str, Value]:
    """The configuration without its inactive knobs, in the contract's order of names."""
    active = dict(config)
    if active.get("num_workers") == 0:
        for name in NEEDS_WORKERS:
            active.pop(name, None)
    return dict(sorted(active.items(), key=lambda item: (_ORDER.get(item[0], len(_ORDER)), item[0])))


def key(config: Config) -> str:
    """The canonical key: equal for configurations that run the same."""
    return json.dumps(canonical(config), sort_keys=True, separators=(",", ":"))


def device_part(config: Config) -> dict[str, Value]:
    """What the device's own rate, and what is compiled for it, depend on: everything but the loader's knobs."""
    return {n: v for n, v in config.items() if not _is_loaders(n)}


def loader_part(config: Config) -> dict[str, Value]:
    """What the loader's own rate depends on: its knobs, the batch, and the workload's own knobs."""
    return {n: v for n, v in config.items() if _is_loaders(n) or n == "batch_size" or n.startswith("workload.")}


def _is_loaders(name: str) -> bool:
    return name in KNOBS and KNOBS[name].scope is Scope.LOADER


def distance(one: Config, other: Config) -> int:
    """In how many knobs two configurations differ. Those that mean nothing without workers do not count where only one
    of the two has any."""
    switched = (one.get("num_workers") == 0) != (other.get("num_workers") == 0)
    names = (one.keys() | other.keys()) - set(NEEDS_WORKERS if switched else ())
    return sum(one.get(name) != other.get(name) for name in names)


def parse_value(name: str, text: str, workload_knobs: Mapping[str, tuple[Value, ...]] | None = None) -> Value:
    """A knob's value from the command line's text.

    Raises:
        UnknownNameError: no such knob, or no such value of it.
        UsageError: not a number where one is needed, or below its minimum.
    """
    if name.startswith("workload."):
        return _parse_workload_value(name, text, workload_knobs)
    if name not in KNOBS:
        unknown = UnknownNameError("knob", name, KNOBS)
        if not unknown.closest:
            # The workload has not been asked for its own yet.
            own = f"known: {', '.join(sorted(KNOBS))}; a workload's own begin with `workload.`, as in workload.{name}."
            raise UnknownNameError("knob", name, KNOBS, advice=own)
        raise unknown
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


def environment(config: Config) -> dict[str, str]:
    """The variables that must be in place before CUDA wakes, for a configuration.

    PyTorch 2.9 renamed the allocator's variable; both names are given so that each version finds its own.
    """
    setting = _ALLOC_CONF[str(config.get("alloc_conf", "default"))]
    return {} if setting is None else {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}
