"""Launches of the parts, made as a search makes them, and what of them goes into the figures."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from autotune.base.clock import SystemClock
from autotune.base.records import (
    Beat,
    DataRef,
    LaunchKind,
    Measurement,
    MeasurePlan,
    PhaseLimits,
    TrialResult,
    TrialSpec,
    Value,
    WorkloadRef,
)
from autotune.knobs import KNOBS
from autotune.launcher import Launcher, ProcessLauncher
from autotune.machine.host import read_host
from autotune.space import canonical
from autotune.workload.catalog import find_workload
from autotune.workload.data.sets import synthetic
from benchmarks.card.stage import Stage

IMAGE_SIZE, SMALL_IMAGE = 224, 32
BATCH_SIZE, SMALL_BATCH = 128, 4
#: Long enough for an interval of some 0.2 % on a card.
PLAN = MeasurePlan(max_measure_s=5.0, max_warmup_s=8.0, target_halfwidth=0.005)
SHORT = MeasurePlan(min_windows=3, min_window_s=0.3, max_measure_s=1.5, max_warmup_s=2.0)
#: Knobs that a CPU does not have, and the nearest values that it has.
_NEAREST: dict[str, dict[Value, Value]] = {
    "precision": {"tf32": "fp32", "fp16": "bf16"},
    "compile_mode": {"reduce-overhead": "default", "max-autotune": "default"},
}
_CARDS_ONLY = ("pin_memory", "cudnn_benchmark", "alloc_conf")
_SMALL_MODEL = Path(__file__).resolve().parent.parent / "workloads" / "small_conv.py"


def base_config(stage: Stage) -> dict[str, Value]:
    """Return what trials are variations of: PyTorch's defaults on a card, with four workers."""
    return {
        "precision": "fp32",
        "compile_mode": "off",
        "batch_size": stage.pick(BATCH_SIZE, SMALL_BATCH),
        "memory_format": "contiguous",
        "num_workers": stage.pick(4, 1),
        "prefetch_factor": 2,
        "pin_memory": False,
        "persistent_workers": True,
        "cudnn_benchmark": False,
        "optimizer_impl": "foreach",
        "alloc_conf": "default",
    }


def possible(stage: Stage, config: dict[str, Value]) -> dict[str, Value]:
    """Return a configuration as the device can run it: a rehearsal replaces what a CPU does not have, and notes it."""
    if stage.uuid is not None:
        return canonical(config)
    found: dict[str, Value] = {}
    for name, value in config.items():
        nearest = _NEAREST.get(name, {}).get(value, value)
        gone = name in _CARDS_ONLY
        if nearest != value or (gone and value != KNOBS[name].default):
            stage.replaced(f"{name} {value}: {'left out' if gone else nearest}")
        if not gone:
            found[name] = nearest
    return canonical({**found, "intra_op_threads": read_host().cores})


def resnet(stage: Stage) -> WorkloadRef:
    """Return ResNet-50; in a rehearsal a small convolutional network."""
    stage_model = stage.pick("resnet50", str(_SMALL_MODEL))
    return find_workload(stage_model, {})


@contextlib.contextmanager
def launcher(on_wait: Callable[[str], None] = lambda sentence: None) -> Iterator[ProcessLauncher]:
    """Yield a launcher, which is closed in the end."""
    made = ProcessLauncher(uuid.uuid4().hex, SystemClock(), on_wait=on_wait)
    try:
        yield made
    finally:
        made.close()


def spec_for(stage: Stage, name: str, config: dict[str, Value], **changes: Any) -> TrialSpec:
    """Return the spec of a launch of ResNet-50 on data in memory. ``changes`` replace fields."""
    config = possible(stage, config)
    workload = changes.pop("workload", None) or resnet(stage)
    data: DataRef = changes.pop("data", None) or synthetic()
    fields: dict[str, Any] = {
        "kind": LaunchKind.MEASURE,
        "launch": name,
        "folder": str(stage.folder / name),
        "workload": workload,
        "data": data,
        "config": config,
        "devices": (stage.device,),
        "env": dict(stage.env),
        "image_size": stage.pick(IMAGE_SIZE, SMALL_IMAGE),
        "batch_size": int(config["batch_size"]),
        "cache_folder": str(stage.folder / "compile-cache"),
        "limits": PhaseLimits(total_s=max(30.0, stage.left_s - 15.0)),
        "plan": stage.pick(PLAN, SHORT),
    }
    return TrialSpec(**{**fields, **changes})


def run(
    made: Launcher,
    spec: TrialSpec,
    *,
    on_beat: Callable[[Beat], None] = lambda beat: None,
    limit_s: float | None = None,
) -> TrialResult:
    """Run one launch, for at most ``limit_s`` seconds with its waiting."""
    began = time.monotonic()
    return made.run(spec, on_beat=on_beat, stop=lambda: limit_s is not None and time.monotonic() - began > limit_s)


def figures_of(result: TrialResult) -> dict[str, Any]:
    """Return what a launch tells, for people: units are in the names."""
    told: dict[str, Any] = {
        "status": result.status.value,
        "phase": None if result.phase is None else result.phase.value,
        "cause": result.cause,
        "wall_s": round(result.wall_s, 2),
        "waited_s": round(result.waited_s, 2),
        "peak_bytes": result.peak_bytes,
    }
    return told if result.measurement is None else {**told, **_measured(result.measurement)}


def _measured(m: Measurement) -> dict[str, Any]:
    clocks = [w.around.sm_clock_mhz for w in m.windows if w.around and w.around.sm_clock_mhz]
    powers = [w.around.power_w for w in m.windows if w.around and w.around.power_w]
    reasons = [w.around.clocks_event_reasons for w in m.windows if w.around and w.around.clocks_event_reasons]
    return {
        "samples_per_s": round(m.samples_per_s, 2),
        "halfwidth": round((m.ci95_per_s[1] - m.ci95_per_s[0]) / 2 / m.samples_per_s, 5),
        "device_per_s": m.device_per_s and round(m.device_per_s, 2),
        "waiting": m.loader_wait_fraction and round(m.loader_wait_fraction, 4),
        # What the events of the steps add up to, over what the clock on the wall says of the same windows.
        "events_over_wall": round(sum(m.step_s) / m.measured_s, 5) if m.measured_s else None,
        "enqueue_s": m.enqueue_s,
        "settled": m.settled,
        "unsettled": m.unsettled,
        "windows": len(m.windows),
        "discarded": dict(Counter(w.discarded for w in m.discarded)),
        "startup_s": round(m.startup_s, 2),
        "first_step_s": round(m.compile_s, 2),
        "warmup_s": round(m.warmup_s, 2),
        "cache_warm": m.compile_cache_warm,
        "reserved_bytes": m.peak_reserved_bytes,
        "peak_bytes": m.peak_allocated_bytes,
        "alloc_retries": m.alloc_retries,
        "host_bytes": m.host_memory_bytes,
        "energy_j": m.energy_j,
        "sm_clock_mhz": [min(clocks), max(clocks)] if clocks else None,
        "power_w": round(median(powers), 1) if powers else None,
        "reasons": sorted({hex(reason) for reason in reasons}),
        "last_loss": m.losses[-1] if m.losses else None,
    }
