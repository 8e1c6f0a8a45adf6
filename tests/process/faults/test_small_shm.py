"""A /dev/shm of 4 MiB, in its own mount namespace."""

import sys
from pathlib import Path
from uuid import uuid4

import pytest

from autotune.base.records import Phase

from ..alive import marked, on_small_disk  # noqa: TID252

RUN_SPECS = Path(__file__).parent.parent / "run_specs.py"
FAULTS = {
    "samples_of_2_mib": "load",  # refused when a worker shares its first batch
    "batches_shared_when_sent": "load",  # refused in the thread that sends, which PyTorch does not notice
    "touch_shared_memory_that_is_not_there": "worker",  # a bus error, as older versions of PyTorch had it
}


@pytest.fixture
def in_small_shm(tmp_path):
    """Run specs one after the other with a small /dev/shm; return ``(result, files left in /dev/shm)`` of each."""

    def run(specs):
        files = [tmp_path / f"{i}.json" for i in range(len(specs))]
        for file, spec in zip(files, specs, strict=True):
            file.write_text(spec.model_dump_json())
        mark = f"test-{uuid4().hex}"
        lines = on_small_disk("/dev/shm", "4m", sys.executable, RUN_SPECS, mark, *files)
        assert marked(mark) == {}
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
