"""Launches of a small workload that fails on demand, and whole trainings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import profile as profiles
from autotune.base.layout import LaunchFiles
from autotune.base.records import MeasurePlan, TrialSpec, TrialStatus
from autotune.workload.catalog import find_workload
from tests.support import make_profile, make_spec

#: Just long enough to go through every phase.
SHORT = MeasurePlan(target_halfwidth=10.0, min_windows=2, min_window_s=0.02, max_measure_s=2.0)
NO_DATA = {"image_size": None, "data": "none", "epoch_samples": None}


@pytest.fixture
def fault(workloads, tmp_path):
    """``fault(name, at, **spec)``: the spec of a single-threaded launch that calls a function of the ``fault_*``
    workloads."""

    def spec(name="", at="load", *, folder="launch", config=None, args=None, **changes) -> TrialSpec:
        given = {"fault": f"fault_{name}" if name else "", "at": str(at), "folder": str(tmp_path / folder)}
        return make_spec(
            tmp_path / folder,
            workload=find_workload(str(workloads / "faults.py"), {**given, **(args or {})}),
            config={"batch_size": 8, "num_workers": 0, "intra_op_threads": 1, **(config or {})},
            batch_size=8,
            **{"plan": SHORT, **changes},
        )

    return spec


@pytest.fixture
def launched(process_launcher, workloads, tmp_path):
    """``launched(file, config, args, **spec)``: the result of a single-threaded launch of a workload, and its files."""

    def run(
        file,
        config=None,
        args=None,
        *,
        folder="launch",
        batch_size=8,
        status=TrialStatus.COMPLETE,
        on_beat=lambda beat: None,
        **changes,
    ):
        spec = make_spec(
            tmp_path / folder,
            workload=find_workload(str(workloads / file), {name: str(value) for name, value in (args or {}).items()}),
            config={"batch_size": batch_size, "num_workers": 0, "intra_op_threads": 1, **(config or {})},
            batch_size=batch_size,
            **changes,
        )
        result = process_launcher.run(spec, on_beat=on_beat, stop=lambda: False)
        assert status in (None, result.status), f"{result.cause}\n{result.evidence}"
        return result, LaunchFiles(tmp_path / folder)

    return run


@pytest.fixture
def whole_profile(workloads, tmp_path):
    """``whole_profile(config)``: the file of a profile of the workload ``whole``, for a single thread."""

    def write(config, name="whole", ranks=1):
        ref = find_workload(str(workloads / f"{name}.py"), {})
        profile = make_profile(
            workload={"name": ref.name, "path": ref.path, "sha256": ref.sha256},
            configuration={"batch_size": 8, "intra_op_threads": 1, **config},
            conditions={**NO_DATA, "ranks": ranks},
        )
        profiles.write(profile, tmp_path / "profile.yaml")
        return tmp_path / "profile.yaml"

    return write


@pytest.fixture
def training(whole_profile):
    """``training(config, args, epochs)``: the words of a command, but for the checkpoints' folder."""

    def words(config, args=None, epochs=6, name="whole", ranks=1):
        given = [word for name, value in (args or {}).items() for word in ("--arg", f"{name}={value}")]
        often = ["--checkpoint-every", "0.02s"]
        return [
            "train",
            "--profile",
            str(whole_profile(config, name, ranks)),
            "--epochs",
            str(epochs),
            *often,
            *given,
            "--json",
        ]

    return words


@pytest.fixture(scope="module")
def run():
    """``run(*runs)``: run commands one after the other; return ``{"code", "stdout", "stderr"}`` of each."""
    command = [sys.executable, Path(__file__).parent / "whole_runs.py"]
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **one_thread}, **pipes) as process:

        def one(given):
            print(json.dumps(given), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield lambda *runs: [one(given) for given in runs]
        process.stdin.close()
