"""A /dev/shm of 4 MiB, in its own mount namespace."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from autotune.base.records import Phase

from .conftest import marked

RUN_SPECS = Path(__file__).parent.parent / "run_specs.py"
MOUNT = "mount -t tmpfs -o size=4m tmpfs /dev/shm"
ELSEWHERE = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
FAULTS = {
    "samples_of_2_mib": "load",  # refused when a worker shares its first batch
    "batches_shared_when_sent": "load",  # refused in the thread that sends, which PyTorch does not notice
    "touch_shared_memory_that_is_not_there": "worker",  # a bus error, as older versions of PyTorch had it
}


@pytest.fixture
def in_small_shm(tmp_path):
    """Run specs one after the other with a small /dev/shm; return ``(result, files left in /dev/shm)`` of each."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*ELSEWHERE, MOUNT], capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a small /dev/shm in a namespace of its own is not permitted here")

    def run(specs):
        files = [tmp_path / f"{i}.json" for i in range(len(specs))]
        for file, spec in zip(files, specs, strict=True):
            file.write_text(spec.model_dump_json())
        mark = f"test-{uuid4().hex}"
        command = [*ELSEWHERE, f'{MOUNT} && exec "$@"', "sh", sys.executable, str(RUN_SPECS), mark, *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert marked(mark) == {}
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return [(line["result"], line["shm"]) for line in lines if "result" in line]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.stress)])
def test_a_small_shm(in_small_shm, fault, times):
    """All on one launcher, because a template takes seconds to start: each fault, followed by a healthy launch."""
    workers = {"config": {"num_workers": 2}}
    specs = []
    for number in range(times):
        for name, at in FAULTS.items():
            specs.append(fault(f"errors.{name}", at, folder=f"{number}-{name}", **workers))
            specs.append(fault(folder=f"{number}-after-{name}", **workers))
    ends = in_small_shm(specs)
    for result, left in ends[0::2]:
        assert (result["status"], result["phase"], result["exit_code"]) == ("shm_exhausted", Phase.BUILD, 1)
        assert "/dev/shm" in result["cause"] and "--shm-size" in result["advice"]
        assert left == [], result["launch"]
    for result, left in ends[1::2]:
        assert result["status"] == "complete", result["cause"]
        assert left == []
