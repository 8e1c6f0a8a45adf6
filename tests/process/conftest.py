"""Launches of small workloads, and what is alive of them."""

import os
from pathlib import Path

import pytest

from autotune.catalog import find_workload
from autotune.clock import SystemClock
from autotune.launcher import STUDY_MARK
from autotune.records import MeasurePlan
from autotune.testing import make_spec

#: Enough to have gone through every phase.
SHORT = MeasurePlan(target_halfwidth=10.0, min_windows=2, min_window_s=0.02, max_measure_s=2.0)


def marked(mark):
    """The processes that carry a study's mark, as ``{pid: parent's pid}``. Zombies have no environment."""
    found = {}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and f"{STUDY_MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


def wait_until(condition, deadline_s=30.0):
    clock = SystemClock()
    end = clock.now() + deadline_s
    while not condition():
        assert clock.now() < end, f"not within {deadline_s} s"
        clock.sleep(0.02)


@pytest.fixture
def faulty(workloads, tmp_path):
    """``faulty(fault, at, **spec)``: the spec of a launch of the faulty workload, on one thread."""

    def spec(fault="none", at="load", *, folder="launch", config=None, sample_bytes=64, **changes):
        args = {"fault": fault, "at": str(at), "sample_bytes": str(sample_bytes)}
        return make_spec(
            tmp_path / folder,
            workload=find_workload(str(workloads / "faulty.py"), args),
            config={"batch_size": 8, "num_workers": 0, "intra_op_threads": 1, **(config or {})},
            batch_size=8,
            **{"plan": SHORT, **changes},
        )

    return spec
