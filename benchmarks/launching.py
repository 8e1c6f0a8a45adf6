"""Makes launches as a search does."""

from __future__ import annotations

from pathlib import Path

from autotune.base.records import Measurement, TrialResult, TrialSpec, Value, WorkloadRef
from autotune.launcher import Launcher
from autotune.workload.catalog import find_workload

WORKLOADS = Path(__file__).with_name("workloads")


def workload(name: str, **args: str) -> WorkloadRef:
    """Return one of `benchmarks/workloads/`, with its ``--arg`` values."""
    return find_workload(str(WORKLOADS / f"{name}.py"), args)


def plain_config(batch_size: int, threads: int) -> dict[str, Value]:
    """Return PyTorch's defaults on a CPU: eager fp32, no loader workers."""
    return {
        "precision": "fp32",
        "compile_mode": "off",
        "batch_size": batch_size,
        "memory_format": "contiguous",
        "num_workers": 0,
        "optimizer_impl": "for-loop",
        "intra_op_threads": threads,
    }


def run(launcher: Launcher, spec: TrialSpec) -> TrialResult:
    """Run one launch to its end, without an observer."""
    return launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)


def measurement_of(result: TrialResult) -> Measurement:
    """Return what a launch measured.

    Raises:
        SystemExit: the launch measured nothing.
    """
    if result.measurement is None:
        raise SystemExit(f"launch {result.launch} ended as {result.status}: {result.cause}")
    return result.measurement
