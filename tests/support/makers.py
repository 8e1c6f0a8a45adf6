"""Factories for valid, realistic records. Each keyword argument replaces one field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune import stats
from autotune.base.records import (
    Bottleneck,
    DataRef,
    Hold,
    HoldVerdict,
    Host,
    JobRequest,
    KnobPart,
    LaunchKind,
    LedgerRow,
    Limit,
    Measurement,
    Outcome,
    Probe,
    Standing,
    StudySpec,
    TrainVerdict,
    Trial,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Value,
    Window,
    WorkloadRef,
)
from autotune.profile import Profile

#: A configuration as a search's baseline has it.
PLAIN: dict[str, Value] = {
    "precision": "fp32",
    "compile_mode": "off",
    "batch_size": 32,
    "memory_format": "contiguous",
    "num_workers": 0,
}
_WINDOWS = 8
_WINDOW_S = 0.5


def make_measurement(
    rate_per_s: float = 100.0, *, batch_size: int = 32, spread: float = 0.01, **changes: Any
) -> Measurement:
    """Make a measurement at ``rate_per_s`` with consistent windows, step times and confidence interval.

    Args:
        rate_per_s: samples per second. Windows and whole epochs have the same rate, since the epoch turn takes no time.
        spread: windows are alternately longer and shorter by this fraction, which determines the interval's width.
        changes: other fields of the record.

    Raises:
        ValueError: the rate is not positive.
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
        "samples_per_step": batch_size,
        "step_s": kept,
        "wait_s": tuple(0.1 * s for s in kept),
        "device_s": tuple(0.9 * s for s in kept),
        "loader_capacity_per_s": 3 * rate_per_s,
        "device_per_s": rate_per_s / 0.9,
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
    """Make the probe of an image classifier with batch size 32, on a small machine without a GPU, of whose allocator
    nothing can be set."""
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
        "malloc": None,
        "parameters": 11_689_512,
        "dataset_samples": 1024,
        "sample_bytes": 3 * 96 * 96 * 4,
    }
    return Probe.model_validate({**fields, **changes})


def make_host(**changes: Any) -> Host:
    """Make a machine with four cores and 16 GiB of memory."""
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
    """Make the spec of a measure launch in ``folder``. The folder's name is the launch's name."""
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


def make_trial(number: int, config: dict[str, Value], rate_per_s: float = 100.0, **changes: Any) -> Trial:
    """Make a complete trial with ``rate_per_s`` as its score. ``changes`` are fields of its result."""
    batch_size = int(config.get("batch_size", 32))
    fields: dict[str, Any] = {
        "launch": f"{number:05d}",
        "status": TrialStatus.COMPLETE,
        "wall_s": 24.0,
        "measurement": make_measurement(rate_per_s, batch_size=batch_size),
    }
    result = TrialResult.model_validate({**fields, **changes})
    score = rate_per_s if result.status is TrialStatus.COMPLETE else None
    return Trial(number=number, config=config, result=result, score=score)


def make_standing(
    trial: int = 0,
    config: dict[str, Value] | None = None,
    rate_per_s: float = 100.0,
    speedup: float = 1.0,
    *,
    halfwidth: float = 0.03,
    **changes: Any,
) -> Standing:
    """Make the result of four verification launches, with confidence intervals of ± ``halfwidth`` (a fraction).

    A speedup of 1 is taken to be the baseline's, and has no interval.
    """
    around = 0.0 if speedup == 1.0 else halfwidth * speedup
    fields: dict[str, Any] = {
        "config": {"precision": "fp32", "batch_size": 32, "num_workers": 0} if config is None else config,
        "trial": trial,
        "launches": 4,
        "verified": True,
        "samples_per_second": rate_per_s,
        "ci95": (rate_per_s * (1 - halfwidth), rate_per_s * (1 + halfwidth)),
        "speedup": speedup,
        "speedup_ci95": (speedup - around, speedup + around),
        "score": rate_per_s,
        "peak_memory_bytes": 2**30 + trial * 2**26,
        "host_memory_bytes": 2**31,
        "compile_s": 0.4,
        "startup_s": 1.2,
        "epoch_turn_s": 0.1,
        "loader_wait_fraction": 0.04,
    }
    return Standing.model_validate({**fields, **changes})


def make_outcome(**changes: Any) -> Outcome:
    """Make the outcome of a search on a small machine without a GPU, whose winner passed every check.

    Trial 0 is the baseline (fp32, batch 32), trial 4 the winner (bf16, channels_last, batch 64), trial 7 the best at
    the baseline's batch size. Trial 9 is the fastest but fails the training check.
    """
    base: dict[str, Value] = {"precision": "fp32", "memory_format": "contiguous", "batch_size": 32, "num_workers": 0}
    fast: dict[str, Value] = {**base, "precision": "bf16", "memory_format": "channels_last"}
    large: dict[str, Value] = {**fast, "batch_size": 64}
    wrong: dict[str, Value] = {**fast, "num_workers": 2, "prefetch_factor": 2, "compile_mode": "default"}
    curve = tuple(2.3 * 0.96**i for i in range(24))
    ended = "the loss was not finite at step 3"
    fields: dict[str, Any] = {
        "study": "resnet50-1",
        "state": "done",
        "model": "resnet50",
        "profile": "/home/me/studies/resnet50-1/profile.yaml",
        "objective": "throughput",
        "device": "cpu",
        "device_name": "a plain CPU",
        "image_size": 96,
        "memory_is": "host",
        "baseline": make_standing(0, base, 30.2),
        "best": make_standing(4, large, 63.4, 2.1),
        "best_same_batch": make_standing(7, fast, 58.9, 1.95),
        "trials": {"complete": 9, "pruned": 4, "oom": 3},
        "elapsed_s": 598.0,
        "measured_s": 311.0,
        "stopped": "40 % of the budget are spent; the rest is for proving what was found",
        "page_cache": "warm",
        "finalists": tuple(
            make_standing(number, config, rate, rate / 30.2)
            for number, config, rate in ((0, base, 30.2), (4, large, 63.4), (7, fast, 58.9), (9, wrong, 71.0))
        ),
        "tie": None,
        "dropped": {9: f"fast but wrong: {ended}"},
        "bottlenecks": (
            Bottleneck(
                trial=0,
                limit=Limit.DEVICE,
                samples_per_s=30.2,
                device_only_per_s=(33.1, 32.4, 33.8),
                loader_only_per_s=(344.0, 339.0, 349.0),
                sentence="device-bound: with a device that costs nothing it would run at 344 samples/s (11.39×).",
            ),
            Bottleneck(
                trial=4,
                limit=Limit.BALANCED,
                samples_per_s=63.4,
                device_only_per_s=(69.7, 68.0, 71.4),
                sentence="balanced: 24 % of a step is waiting for the loader.",
            ),
        ),
        "checks": (
            TrainVerdict(
                trials=(4, 7),
                config=fast,
                passed=True,
                losses=tuple(x * 1.004 for x in curve),
                reference=curve,
                tolerance=0.06,
                distance=0.0052,
            ),
            TrainVerdict(
                trials=(9,),
                config={**fast, "compile_mode": "default"},
                passed=False,
                reason=ended,
                losses=curve[:2],
                reference=curve,
                tolerance=0.06,
            ),
        ),
        "hold": HoldVerdict(
            trial=4,
            passed=True,
            hold=Hold(
                steps=212,
                seconds=14.6,
                settled=True,
                peak_bytes=3 * 2**30,
                capacity_bytes=24 * 2**30,
                evaluated="eval",
            ),
            headroom_wanted=0.08,
        ),
        "ablation": (
            KnobPart(knob="precision", value="bf16", baseline_value="fp32", gain=(1.62, 1.57, 1.67)),
            KnobPart(knob="batch_size", value=64, baseline_value=32, gain=(1.01, 0.98, 1.05)),
            KnobPart(
                knob="memory_format",
                value="channels_last",
                baseline_value="contiguous",
                why_not="there was no time for it",
            ),
        ),
        "ledger": (
            LedgerRow(purpose="probing", launches=2, seconds=8.0, rest_s=8.0),
            LedgerRow(
                purpose="searching",
                launches=16,
                seconds=330.0,
                start_s=40.0,
                compile_s=52.0,
                warmup_s=48.0,
                kept_s=170.0,
                rest_s=20.0,
            ),
            LedgerRow(
                purpose="verifying",
                launches=12,
                seconds=240.0,
                start_s=30.0,
                compile_s=20.0,
                warmup_s=36.0,
                kept_s=141.0,
                rest_s=13.0,
            ),
            LedgerRow(purpose="between launches", launches=0, seconds=20.0, rest_s=20.0),
        ),
    }
    return Outcome.model_validate({**fields, **changes})


def make_study_spec(name: str = "net-1", **changes: Any) -> StudySpec:
    """Make a study spec. Its mark is derived from its name."""
    fields = {"name": name, "mark": f"mark-of-{name}", "created": "2026-11-22T03:00:00+00:00", "model": "resnet18"}
    return StudySpec.model_validate({**fields, **changes})


def make_job_request(study: str = "net-1", *, spec: StudySpec | None = None, **changes: Any) -> JobRequest:
    """Make a request for a job with the study ``study``."""
    fields = {
        "spec": spec or make_study_spec(study, mark=f"mark-of-{changes.get('studies_dir', '')}-{study}"),
        "label": "resnet18",
        "studies_dir": "/nowhere/studies",
        "folder": "/nowhere",
        "python": "/nowhere/bin/python",
    }
    return JobRequest.model_validate({**fields, **changes})


_BASELINE = {"precision": "fp32", "compile_mode": "off", "batch_size": 32, "num_workers": 0}
_BEST = {
    "precision": "bf16",
    "compile_mode": "off",
    "batch_size": 64,
    "memory_format": "channels_last",
    "num_workers": 2,
    "prefetch_factor": 4,
    "persistent_workers": True,
}
#: A profile as data: a training in bf16 with batch 64, on a CPU, compared with fp32 and batch 32.
PROFILE_DATA: dict[str, Any] = {
    "workload": {"name": "resnet50", "sha256": "9f" * 32},
    "configuration": _BEST,
    "gives": {
        "samples_per_second": 62.31249999,
        "ci95": [61.8, 62.9],
        "speedup": 2.0771,
        "speedup_ci95": [2.01, 2.14],
        "peak_memory_bytes": 3891232768,
        "peak_memory_is": "host",
        "compile_seconds": 1.84,
        "startup_seconds": 3.21,
        "loader_wait_fraction": 0.0312,
        "epoch_turn_seconds": None,
        "launches": 3,
        "same_batch": False,
    },
    "baseline": {"configuration": _BASELINE, "samples_per_second": 30, "ci95": [29.5, 30.6]},
    "best_same_batch": {
        "configuration": {**_BEST, "batch_size": 32},
        "samples_per_second": 59.1,
        "ci95": [58.4, 59.9],
        "speedup": 1.97,
        "speedup_ci95": [1.91, 2.02],
    },
    "conditions": {
        "device": "cpu",
        "device_name": "Some CPU",
        "image_size": 96,
        "data": "generated",
        "epoch_samples": 1281167,
        "worker_start_method": "fork",
        "seed": 0,
    },
    "fingerprint": {"values": {"cores": 2, "torch": "2.15.0", "power_limit_w": None}, "device_uuid": None},
    "versions": {"autotune": "0.1.0", "torch": "2.15.0"},
    "provenance": {
        "study": "resnet50-3",
        "trial": 17,
        "objective": "throughput",
        "score": 62.3,
        "trials": {"complete": 18, "oom": 2},
        "measured_seconds": 143.2,
        "elapsed_seconds": 598.4,
        "created": "2026-05-02T10:11:12+00:00",
    },
}


def make_profile(**sections: Any) -> Profile:
    """Make a profile of `PROFILE_DATA`, with changes to the keys of its sections. A configuration is replaced."""
    changed = {
        name: {**PROFILE_DATA[name], **keys} if isinstance(keys, dict) and name != "configuration" else keys
        for name, keys in sections.items()
    }
    return Profile.model_validate({**PROFILE_DATA, **changed})
