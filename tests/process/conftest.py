"""Launches of a small workload that fails on demand."""

import pytest

from autotune.catalog import find_workload
from autotune.records import MeasurePlan, TrialSpec
from autotune.testing import make_spec

#: Just long enough to go through every phase.
SHORT = MeasurePlan(target_halfwidth=10.0, min_windows=2, min_window_s=0.02, max_measure_s=2.0)


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
