"""Short real launches of a training of known speed."""

import json

import pytest

from autotune.base.records import DataRef, MeasurePlan, TrialStatus

PLAN = MeasurePlan(target_halfwidth=10.0, min_windows=4, min_window_s=0.1, max_measure_s=4.0)


@pytest.fixture
def measure(launched):
    """``measure(config, plan=…, arg=…)``: the measurement of a launch, and what the workload recorded."""

    def run(config=None, *, plan=PLAN, data=None, status=TrialStatus.COMPLETE, **args):
        data = data or DataRef(kind="none")
        result, files = launched("steady.py", config, args, plan=plan, data=data, status=status)
        return result.measurement, json.loads(files.stdout.read_text())

    return run


def steps_of(measurement):
    return sum(window.steps for window in measurement.windows)


def test_what_went_on_is_kept_with_every_window(measure):
    found, _ = measure(step_s=0.01)
    for window in found.windows:
        assert window.discarded is None
        assert window.around.foreign_cores >= 0 and window.around.idle_cores >= 0
        # Readings of a card are unknown, which is different from zero.
        assert window.around.foreign_processes is None and window.around.power_w is None


def test_too_few_steps_do_not_tell_whether_they_settled(measure):
    found, _ = measure(plan=PLAN.model_copy(update={"max_measure_s": 0.5}), step_s=0.2)
    assert not found.settled
    assert "too few to tell" in found.unsettled


def test_what_is_hopeless_gets_one_window(measure):
    plan = PLAN.model_copy(update={"prune_below_per_s": 4000, "min_window_s": 0.3})
    found, _ = measure(plan=plan, status=TrialStatus.PRUNED, step_s=0.01)
    assert found is None


def test_what_may_be_as_fast_is_measured_to_the_end(measure):
    found, _ = measure(plan=PLAN.model_copy(update={"prune_below_per_s": 100}), step_s=0.01)
    assert len(found.windows) >= PLAN.min_windows


def test_a_turn_is_forced_where_no_epoch_ended_and_it_could_matter(measure):
    found, _ = measure({"num_workers": 1, "prefetch_factor": 2}, samples=4000, worker_start_s=0.15, step_s=0.005)
    assert found.epoch_turn_s >= 0.14


def test_a_slow_loader_is_what_the_loop_waits_for(measure):
    found, _ = measure({"batch_size": 4}, sample_s=0.02)
    assert found.loader_wait_fraction > 0.5
    assert all(wait >= 0.08 for wait in found.wait_s)
    assert 10 < found.loader_capacity_per_s <= 52


def test_a_stated_epoch_length_is_dealt_from_few_samples(measure):
    found, _ = measure(data=DataRef(kind="none", epoch_samples=8000, page_cache="cold"), samples=40)
    assert found.epoch_samples == 8000
    assert found.page_cache == "cold"


def test_every_knob_reaches_the_training(measure):
    config = {
        "batch_size": 12,
        "intra_op_threads": 2,
        "memory_format": "channels_last",
        "precision": "bf16",
        "optimizer_impl": "fused",
        "cudnn_benchmark": True,
    }
    found, seen = measure(config)
    assert found.batch_size == 12
    assert seen == {
        "threads": 2,
        "shape": [12, 3, 8, 8],
        "channels_last": True,
        "weights_channels_last": True,
        "scores": "torch.bfloat16",
        "weights": "torch.float32",
        "fused": True,
        "foreach": False,
        "cudnn_benchmark": True,
        "matmul": "highest",
    }


def test_other_values_reach_it_too(measure):
    config = {"memory_format": "contiguous", "precision": "tf32", "optimizer_impl": "foreach", "cudnn_benchmark": False}
    _, seen = measure(config)
    assert seen == {
        "threads": 1,
        "shape": [8, 3, 8, 8],
        "channels_last": False,
        "weights_channels_last": False,
        "scores": "torch.float32",
        "weights": "torch.float32",
        "fused": False,
        "foreach": True,
        "cudnn_benchmark": False,
        "matmul": "high",
    }


class TestAlone:
    """These have the machine to themselves."""

    def test_the_numbers_agree_with_each_other(self, measure):
        found, _ = measure(step_s=0.01)
        assert len(found.windows) >= 4
        assert all(w.samples == 8 * w.steps and w.seconds >= 0.1 for w in found.windows)
        assert len(found.step_s) == len(found.wait_s) == len(found.device_s) == len(found.losses) == steps_of(found)
        assert found.measured_s == pytest.approx(sum(w.seconds for w in found.windows))
        assert found.steady_per_s == pytest.approx(8 * steps_of(found) / found.measured_s, rel=0.01)
        # The loop's overhead is small: the steps fill the windows.
        assert found.measured_s * 0.9 < sum(found.step_s) <= found.measured_s
        assert all(
            s == pytest.approx(w + d) for s, w, d in zip(found.step_s, found.wait_s, found.device_s, strict=True)
        )
        assert found.ci95_per_s[0] <= found.samples_per_s <= found.ci95_per_s[1]
        # A step sleeps 10 ms, so none can be faster.
        assert min(found.step_s) >= 0.01
        assert found.steady_per_s < 800
        assert (found.batch_size, found.epoch_samples) == (8, 4096)
        assert found.settled == (found.unsettled is None)
        assert found.relative_se > 0 and found.degrees >= 1
        assert (found.page_cache, found.energy_j, found.alloc_retries, found.enqueue_s) == (None, None, None, None)
        assert found.discarded == ()
        assert len(found.first_losses) == found.warmup_steps >= 1 + PLAN.warmup_steps
        assert found.startup_s > 0 and found.compile_s > 0 and found.warmup_s >= 0.02
        assert found.host_memory_bytes > 0 and found.peak_allocated_bytes > 0

    def test_measuring_ends_with_the_plan(self, measure):
        wide, _ = measure(plan=PLAN.model_copy(update={"min_windows": 2, "max_measure_s": 20.0}), step_s=0.01)
        # Two windows, unless the step times seemed to change.
        assert len(wide.windows) >= 2 and wide.measured_s < 10
        never_narrow = {"target_halfwidth": 1e-9, "min_windows": 2, "max_measure_s": 0.5}
        capped, _ = measure(plan=PLAN.model_copy(update=never_narrow), step_s=0.002)
        # Of at least five windows, at most two may have been cut as warm-up.
        assert 0.3 <= capped.measured_s < 1.5

    def test_steps_that_still_get_faster_are_warm_up(self, measure):
        """The first step takes 160 ms, the sixteenth 10 ms."""
        plan = PLAN.model_copy(update={"min_window_s": 0.05, "max_measure_s": 20.0})
        found, _ = measure(plan=plan, step_s=0.01, early_s=0.15)
        assert found.settled
        assert found.warmup_steps >= 10
        assert len(found.first_losses) == found.warmup_steps
        assert found.warmup_s > 0.5
        assert len(found.step_s) == len(found.losses) == steps_of(found)
        # The steps cut as warm-up ran at less than 100 samples/s.
        assert found.steady_per_s > 150

    @pytest.mark.slow
    def test_steps_that_go_on_getting_slower_never_settle(self, measure):
        # No interval is narrow enough, so all steps are looked at: the first ten may look alike by chance.
        plan = PLAN.model_copy(update={"target_halfwidth": 1e-9, "min_window_s": 0.05, "max_measure_s": 3.0})
        found, _ = measure(plan=plan, growth_s=0.002)
        assert not found.settled
        assert found.unsettled == "the step times went on changing"
        assert len(found.windows) >= 3

    def test_what_is_surely_slower_is_ended_early_with_what_was_measured(self, measure):
        plan = PLAN.model_copy(update={"target_halfwidth": 1e-9, "prune_below_per_s": 1000, "max_measure_s": 20})
        found, _ = measure(plan=plan, status=TrialStatus.PRUNED, samples=4000, step_s=0.01)
        assert found.steady_per_s < 800
        assert found.ci95_per_s[1] < 1000
        assert len(found.windows) >= 3 and found.measured_s < 10
        # The epoch turn of a rejected configuration is not measured.
        assert found.epoch_turn_s is None

    @pytest.mark.slow
    def test_windows_never_span_the_turn_of_an_epoch(self, measure):
        """An epoch has 5 batches, and each epoch turn starts workers that take 150 ms to come up."""
        found, _ = measure({"num_workers": 2, "prefetch_factor": 2}, samples=40, worker_start_s=0.15, step_s=0.005)
        assert all(window.steps <= 5 for window in found.windows)
        assert max(found.step_s) < 0.15 and max(w.seconds for w in found.windows) < 0.15
        assert found.epoch_turn_s >= 0.14
        assert found.epoch_samples == 40
        turned = 40 / (40 / found.steady_per_s + found.epoch_turn_s)
        assert found.samples_per_s == pytest.approx(turned)

    def test_persistent_workers_turn_without_starting_again(self, measure):
        config = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
        found, _ = measure(config, samples=40, worker_start_s=0.15, step_s=0.005)
        assert found.epoch_turn_s < 0.1

    def test_a_fast_loader_is_not_waited_for(self, measure):
        found, _ = measure(step_s=0.02)
        assert found.loader_wait_fraction < 0.2
        assert all(device >= 0.02 for device in found.device_s)

    def test_the_loaders_head_start_is_not_measured(self, measure):
        """Two workers need 10 ms per sample: 200 samples/s. The step alone runs at thousands, as it does for the 8
        batches that were queued during the first step."""
        found, _ = measure({"num_workers": 2, "prefetch_factor": 4}, sample_s=0.01, first_step_s=0.6)
        assert found.settled
        assert 100 < found.steady_per_s <= 210
        assert 100 < found.loader_capacity_per_s <= 210
