"""What the loader of a workload delivers, in real launches, compared as in a search."""

import pytest

from autotune import stats
from autotune.base.records import CheckPlan, DeliveryPlan, LaunchKind


@pytest.fixture
def delivered(launched, tmp_path):
    """``delivered(kind, plan, **config)``: what a loader of the workload ``loading`` has delivered."""

    def run(kind, plan, **config):
        args = {"kind": kind, "path": str(tmp_path / "numbers.bin")}
        check = CheckPlan(store=str(tmp_path), steps=1, deliveries=plan)
        result, files = launched("loading.py", config, args, kind=LaunchKind.TRAIN_CHECK, check=check)
        assert not files.deliveries.exists()
        return result.check.deliveries

    return run


@pytest.mark.parametrize(("kind", "passed"), [("plain", True), ("random", True), ("file", False)])
def test_a_workloads_data_are_compared(delivered, kind, passed):
    own = delivered(kind, DeliveryPlan())
    assert own.done and own.lost is None
    other = delivered(kind, stats.plan_beside(own), num_workers=3, prefetch_factor=2, persistent_workers=True)
    found = stats.compare_data(own, other)
    assert found.passed is passed, found
    if passed:
        assert found.epochs == 2 and found.batches >= 10
    else:
        assert "numbers.bin" in found.reason
