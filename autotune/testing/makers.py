"""Plausible values, valid as they are; every keyword replaces one field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune import stats
from autotune.records import DataRef, Host, LaunchKind, Measurement, Probe, TrialSpec, Window, WorkloadRef

_WINDOWS = 8
_WINDOW_S = 0.5


def make_measurement(
    rate_per_s: float = 100.0, *, batch_size: int = 32, spread: float = 0.01, **changes: Any
) -> Measurement:
    """A measurement at ``rate_per_s`` whose windows, steps and interval agree with each other.

    Args:
        rate_per_s: samples per second, of the windows and of whole epochs alike (the epoch's turn is free).
        spread: windows last longer and shorter in turns by this fraction, which gives the interval a width.
        changes: other fields of the record.

    Raises:
        ValueError: a rate that is not positive.
    """
    if rate_per_s <= 0:
        raise ValueError(f"a rate of {rate_per_s} samples/s cannot have been measured")
    step_s = batch_size / rate_per_s
    steps = max(1, round(_WINDOW_S / step_s))
    stretch = [1 + spread if i % 2 else 1 - spread for i in range(_WINDOWS)]
    windows = tuple(Window(steps=steps, samples=steps * batch_size, seconds=steps * step_s * f) for f in stretch)
    rate = stats.rate_of(windows)
    kept = tuple(step_s * f for f in stretch for _ in range(steps))
    fields: dict[str, Any] = {
        "batch_size": batch_size,
        "samples_per_s": rate.per_s,
        "ci95_per_s": (rate.low_per_s, rate.high_per_s),
        "steady_per_s": rate.per_s,
        "windows": windows,
        "step_s": kept,
        "wait_s": tuple(0.1 * s for s in kept),
        "device_s": tuple(0.9 * s for s in kept),
        "loader_capacity_per_s": 3 * rate_per_s,
        "losses": tuple(2.0 / (1 + 0.01 * i) for i in range(len(kept))),
        "first_losses": (2.3, 2.2, 2.1),
        "startup_s": 1.0,
        "compile_s": step_s,
        "warmup_s": 2 * step_s,
        "measured_s": sum(w.seconds for w in windows),
        "loader_wait_fraction": 0.1,
        "epoch_turn_s": 0.0,
        "epoch_samples": 1000 * batch_size,
        "peak_allocated_bytes": 2**28 + batch_size * 2**22,
        "host_memory_bytes": 2**30,
    }
    return Measurement.model_validate({**fields, **changes})


def make_probe(**changes: Any) -> Probe:
    """What a probe finds on a small machine without a GPU, for an image classifier of batch 32."""
    fields: dict[str, Any] = {
        "torch_version": "2.9.0",
        "torchvision_version": "0.24.0",
        "python_version": "3.11.9",
        "cuda_version": None,
        "cudnn_version": None,
        "device": "cpu",
        "device_name": "cpu",
        "device_memory_bytes": None,
        "native_bf16": True,
        "tf32": False,
        "cudagraphs": False,
        "compiler": "g++",
        "worker_start_method": "fork",
        "cores": 4,
        "workload_sha256": "0" * 64,
        "workload_name": "scripted",
        "default_batch_size": 32,
        "default_image_size": 224,
        "cpu_image_size": 96,
        "wants_data": None,
        "varying_shapes": False,
        "has_images": True,
        "optimizer_impls": ("for-loop", "foreach", "fused"),
        "own_optimizer_impl": "for-loop",
        "parameters": 11_689_512,
        "dataset_samples": 1024,
        "sample_bytes": 3 * 96 * 96 * 4,
    }
    return Probe.model_validate({**fields, **changes})


def make_host(**changes: Any) -> Host:
    """A machine of four cores and 16 GiB."""
    fields: dict[str, Any] = {
        "cpu_model": "a plain CPU",
        "cores": 4,
        "memory_bytes": 16 * 2**30,
        "available_bytes": 12 * 2**30,
        "shm_bytes": 8 * 2**30,
        "shm_free_bytes": 8 * 2**30,
        "open_files": 1024,
    }
    return Host.model_validate({**fields, **changes})


def make_spec(folder: Path, **changes: Any) -> TrialSpec:
    """The spec of a measure launch in ``folder``, whose name is the launch's."""
    fields: dict[str, Any] = {
        "kind": LaunchKind.MEASURE,
        "launch": folder.name,
        "folder": str(folder),
        "workload": WorkloadRef(name="scripted", module="scripted"),
        "data": DataRef(kind="none"),
        "config": {"batch_size": 32, "num_workers": 0},
        "batch_size": 32,
    }
    return TrialSpec.model_validate({**fields, **changes})
