"""Launches of a small workload that fails on demand."""

import pytest

from autotune.catalog import find_workload
from autotune.records import MeasurePlan
from autotune.testing import make_spec

#: Enough to have gone through every phase.
SHORT = MeasurePlan(target_halfwidth=10.0, min_windows=2, min_window_s=0.02, max_measure_s=2.0)


@pytest.fixture
def faulty(workloads, tmp_path):
    """``faulty(fault, at, **spec)``: the spec of a launch of the faulty workload, on one thread."""

    def spec(fault="none", at="load", *, folder="launch", config=None, sample_bytes=64, samples=4096, **changes):
        args = {"fault": fault, "at": str(at), "sample_bytes": str(sample_bytes), "samples": str(samples)}
        return make_spec(
            tmp_path / folder,
            workload=find_workload(str(workloads / "faulty.py"), args),
            config={"batch_size": 8, "num_workers": 0, "intra_op_threads": 1, **(config or {})},
            batch_size=8,
            **{"plan": SHORT, **changes},
        )

    return spec
