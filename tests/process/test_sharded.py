"""A model that is sharded among two ranks by `fully_shard`, in every kind of launch that trains it."""

import pytest

from autotune.base.records import CheckPlan, HoldPlan, LaunchKind, MeasurePlan

PLAN = MeasurePlan(target_halfwidth=10.0, min_windows=4, min_window_s=0.05, max_measure_s=4.0)


@pytest.fixture
def launch(launched):
    return lambda kind, config=None, **changes: launched(
        "sharded.py", config, folder=kind, kind=kind, ranks=2, plan=PLAN, **changes
    )


@pytest.mark.parametrize("reshard", [True, False])
def test_each_rank_holds_a_part(launch, reshard):
    result, files = launch(LaunchKind.MEASURE, {"workload.reshard": reshard})
    assert all(window.samples == 16 * window.steps for window in result.measurement.windows)
    held = [int((files.folder / f"rank-{rank}" / "stdout.log").read_text()) for rank in (0, 1)]
    assert held == [(16 * 32 + 32 + 32 * 4 + 4) / 2] * 2


def test_the_device_alone_without_exchange(launch):
    with_it, _ = launch(LaunchKind.DEVICE_ONLY)
    without, _ = launch(LaunchKind.DEVICE_ONLY, exchanges=False)
    assert with_it.measurement.ranks == without.measurement.ranks == 2


def test_it_is_checked_and_held(launch, tmp_path):
    plan = CheckPlan(store=str(tmp_path / "store"), steps=5, batches=2, reference=True, seed=0)
    first, _ = launch(LaunchKind.TRAIN_CHECK, check=plan)
    assert first.check.finite and first.check.changed == 1.0 and len(first.check.losses) == 5
    held, _ = launch(LaunchKind.HOLD, hold=HoldPlan(settled_steps=3, min_s=0.1, max_s=2.0))
    assert held.hold.evaluated is None and held.hold.steps > 3
