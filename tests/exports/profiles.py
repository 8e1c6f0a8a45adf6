"""Profiles to export, and child processes that read the result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune.base.records import Value
from autotune.profile import Profile
from tests.support import make_profile

CPU: dict[str, Value] = {
    "precision": "bf16",
    "compile_mode": "off",
    "batch_size": 64,
    "memory_format": "channels_last",
    "num_workers": 2,
    "prefetch_factor": 4,
    "persistent_workers": True,
    "optimizer_impl": "fused",
    "intra_op_threads": 2,
}
CUDA: dict[str, Value] = {
    "precision": "fp16",
    "compile_mode": "default",
    "batch_size": 96,
    "gradient_accumulation": 3,
    "memory_format": "channels_last",
    "num_workers": 8,
    "prefetch_factor": 2,
    "pin_memory": True,
    "non_blocking": True,
    "persistent_workers": True,
    "cudnn_benchmark": True,
    "deterministic": False,
    "optimizer_impl": "fused",
    "alloc_conf": "expandable_segments",
}
DEADLINE_S = 240.0


def profile_with(config: dict[str, Value], *, model: str = "resnet50", **workload: Any) -> Profile:
    """Return a profile of a configuration, measured on CUDA if the configuration has a knob of its."""
    conditions = {"device": "cuda:0" if "alloc_conf" in config else "cpu", "device_name": "Some device"}
    return make_profile(
        workload={"name": model, **workload},
        configuration=config,
        gives={"learning_rate": 0.1, "same_batch": config["batch_size"] == 32},
        baseline={"learning_rate": 0.1},
        conditions={**conditions, "image_size": None, "data": "none", "epoch_samples": None},
        provenance={"study": "net-3"},
    )


def answer_of(code: str, *arguments: str, folder: Path, options: tuple[str, ...] = ()) -> Any:
    """Return the JSON on the last line that a child process prints."""
    words = [sys.executable, "-W", "ignore", *options, "-c", code, *arguments]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
