"""Launches whose data are iterated, and whose loaders are the workload's own."""

import pytest

from autotune.base.records import CheckPlan, DataRef, HeatPlan, HoldPlan, LaunchKind, MeasurePlan, TrialStatus

PLAN = MeasurePlan(target_halfwidth=10.0, min_windows=3, min_window_s=0.02, max_measure_s=2.0)
WORKERS = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": False}


@pytest.fixture
def launch(launched):
    """``launch(kind, config, **args)``: the result of a launch of the workload ``streams``."""
    count = 0

    def run(kind, config=None, *, of=LaunchKind.MEASURE, spec=None, **args):
        nonlocal count
        count += 1
        spec = {"plan": PLAN, "kind": of, "folder": str(count), **(spec or {})}
        return launched("streams.py", config, {"kind": kind, **args}, status=None, **spec)[0]

    return run


@pytest.mark.parametrize("config", [{}, WORKERS], ids=["no workers", "workers"])
def test_a_stream_that_ends_is_measured_and_its_length_is_learnt(launch, config):
    result = launch("stream", config, sample_s=0.001)
    assert result.status is TrialStatus.COMPLETE, result.cause
    found = result.measurement
    assert found.epoch_samples == 96
    assert found.epoch_turn_s is not None and found.epoch_turn_s > 0
    assert all(window.samples == 8 * window.steps for window in found.windows)
    # A sample takes a millisecond at least, whoever makes it.
    assert found.samples_per_s < 1000 * max(1, config.get("num_workers", 0))
    assert 0 < found.loader_capacity_per_s < 1000 * max(1, config.get("num_workers", 0))


def test_a_stream_without_an_end_is_measured(launch):
    result = launch("endless", WORKERS)
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert (result.measurement.epoch_samples, result.measurement.epoch_turn_s) == (0, None)


def test_a_loader_of_ones_own_groups_samples(launch):
    result = launch("grouped", WORKERS, samples=200)
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert result.measurement.epoch_samples == 200
    assert result.measurement.loader_capacity_per_s > 0


def test_a_loader_that_is_not_pytorchs_is_measured_from_outside(launch):
    result = launch("foreign")
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert result.measurement.epoch_samples == 96
    assert result.measurement.loader_capacity_per_s is None


def test_a_loader_with_workers_that_does_not_call_the_collate_function(launch):
    result = launch("stubborn", WORKERS, samples=200)
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert result.measurement.loader_capacity_per_s is None


def test_persistent_workers_do_not_count_the_time_between_epochs_as_making_batches(launch):
    """An epoch of 24 samples is over at once for a worker, which then waits for the training."""
    config = {**WORKERS, "persistent_workers": True}
    found = launch("stream", config, samples=48, sample_s=0.001).measurement
    # Batches of 8 take 8 ms at least, and hardly longer.
    assert found.loader_capacity_per_s > 2 * 8 / 0.05


def test_a_loader_may_be_what_looks_at_the_data(launch, tmp_path):
    data = DataRef(kind="folder", path=str(tmp_path), identity="x")
    result = launch("reads the folder", of=LaunchKind.PROBE, spec={"data": data})
    assert result.status is TrialStatus.COMPLETE, result.cause
    result = launch("grouped", of=LaunchKind.PROBE, spec={"data": data})
    assert "does not ask for ctx.data.path" in result.cause


@pytest.mark.parametrize("kind", ["stream", "grouped", "foreign", "weighted"])
def test_all_kinds_of_launches_take_them(launch, tmp_path, kind):
    check = CheckPlan(store=str(tmp_path / "store"), steps=2, reference=True)
    two = ({"batch_size": 8, "precision": "fp32"}, {"batch_size": 8, "precision": "bf16"})
    turns = {"entrants": tuple({**c, "num_workers": 0, "intra_op_threads": 1} for c in two), "turn_s": 0.02}
    for of, spec in (
        (LaunchKind.PROBE, {}),
        (LaunchKind.DEVICE_ONLY, {}),
        (LaunchKind.LOADER_ONLY, {}),
        (LaunchKind.HOLD, {"hold": HoldPlan(min_s=0.0, settled_steps=2)}),
        (LaunchKind.TRAIN_CHECK, {"check": check}),
        (LaunchKind.HEAT, {"heat": HeatPlan(**turns, max_rounds=3, max_s=5.0)}),
        (LaunchKind.HEAT, {"heat": HeatPlan(**turns, side="loader", max_rounds=3, max_s=5.0).model_copy(
            update={"entrants": tuple({**two[0], "num_workers": n, "intra_op_threads": 1} for n in (0, 1))})}),
    ):  # fmt: skip
        result = launch(kind, of=of, spec=spec)
        assert result.status is TrialStatus.COMPLETE, (of, result.cause)


@pytest.mark.parametrize("kind", ["stream", "grouped", "foreign"])
def test_a_set_smaller_than_a_batch_is_one_sentence(launch, kind):
    result = launch(kind, samples=3)
    assert result.status is TrialStatus.USER_ERROR
    assert "does not fill one batch of 8" in result.cause or "an epoch of the loader has no batch" in result.cause


def test_an_empty_stream_is_one_sentence(launch):
    for of in (LaunchKind.PROBE, LaunchKind.MEASURE):
        result = launch("stream", of=of, samples=0)
        assert (result.status, result.phase is not None) == (TrialStatus.USER_ERROR, True)
        assert "no batch" in result.cause


@pytest.mark.parametrize("config", [{}, WORKERS], ids=["no workers", "workers"])
def test_a_collate_function_that_fails_on_its_third_batch_is_named(launch, config):
    result = launch("grouped", config, samples=200, fails_at=3)
    assert result.status is TrialStatus.USER_ERROR
    assert "a sample of another shape" in result.cause


def test_a_loader_that_returns_nothing_is_refused(launch):
    result = launch("nothing")
    assert result.status is TrialStatus.USER_ERROR
    assert "loader(ctx, options) must return batches to iterate over, not NoneType" in result.cause
