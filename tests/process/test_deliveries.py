"""What the loader of a workload delivers, in real launches, compared as in a search."""

import pytest

from autotune import stats
from autotune.base.records import CheckPlan, DeliveryPlan, LaunchKind, TrialStatus
from autotune.workload.catalog import find_workload
from tests.support import make_spec


@pytest.fixture
def delivered(process_launcher, workloads, tmp_path):
    """``delivered(kind, plan, **config)``: what a loader of the workload ``loading`` has delivered."""

    def run(kind, plan, **config):
        args = {"kind": kind, "path": str(tmp_path / "numbers.bin")}
        spec = make_spec(
            tmp_path / "launch",
            kind=LaunchKind.TRAIN_CHECK,
            workload=find_workload(str(workloads / "loading.py"), args),
            config={"batch_size": 8, "num_workers": 0, "intra_op_threads": 1, **config},
            batch_size=8,
            check=CheckPlan(store=str(tmp_path), steps=1, deliveries=plan),
        )
        result = process_launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)
        assert result.status is TrialStatus.COMPLETE, result.cause
        assert not (tmp_path / "launch" / "deliveries.jsonl").exists()
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
