"""The two upper bounds of a configuration, on a training whose loader and step have prescribed durations."""

import pytest

from autotune.base.records import LaunchKind, MeasurePlan, Phase

from .alive import marked

PLAN = MeasurePlan(target_halfwidth=10.0, min_windows=4, min_window_s=0.1, max_measure_s=4.0)
#: Two workers make a batch of 8 in 80 ms: 200 samples/s. The step takes 10 ms: 800 samples/s.
SLOW_LOADER = {"sample_s": "0.01", "step_s": "0.01"}
WORKERS = {"num_workers": 2, "prefetch_factor": 3}


@pytest.fixture
def launch(launched):
    """``launch(kind, config, on_beat=…, arg=…)``: the result of a launch and what it printed."""

    def run(kind, config=None, *, on_beat=lambda beat: None, plan=PLAN, **args):
        args = {**SLOW_LOADER, **args}
        result, files = launched("steady.py", config, args, kind=kind, plan=plan, on_beat=on_beat)
        return result, files.stdout.read_text()

    return run


@pytest.mark.slow
@pytest.mark.parametrize("config", [WORKERS, {**WORKERS, "persistent_workers": True}, {}])
def test_the_device_alone_never_waits(launch, study_mark, config):
    alive = []

    def on_beat(beat):
        if beat.phase is Phase.MEASURE:
            alive.append(len(marked(study_mark)))

    result, printed = launch(LaunchKind.DEVICE_ONLY, config, on_beat=on_beat, sample_s="0.04")
    found = result.measurement
    # With its loader, the training would reach at most 50.
    assert 60 < found.steady_per_s <= 800
    assert found.steady_per_s == found.samples_per_s
    assert set(found.wait_s) == {0.0} and found.loader_wait_fraction == 0
    assert found.loader_capacity_per_s is None and found.epoch_turn_s is None
    assert len(found.losses) == len(found.step_s) == sum(w.steps for w in found.windows)
    assert len(found.first_losses) == found.warmup_steps
    assert "threads" in printed
    # The template and the leader; the workers are gone.
    assert set(alive) == {2}


def test_the_device_alone_gets_the_batches_as_the_training_would(launch):
    _, printed = launch(LaunchKind.DEVICE_ONLY, {"memory_format": "channels_last", "batch_size": 4})
    assert '"channels_last": true' in printed and '"shape": [4, ' in printed


def test_an_epoch_of_one_batch_is_enough_for_the_device_alone(launch):
    result, _ = launch(LaunchKind.DEVICE_ONLY, samples="8")
    assert result.measurement.epoch_samples == 8


def test_the_loader_alone_in_the_process_itself(launch):
    result, _ = launch(LaunchKind.LOADER_ONLY)
    assert 20 < result.measurement.steady_per_s <= 105


@pytest.mark.slow
def test_the_turns_of_a_loader_alone_weigh_in(launch):
    """An epoch is 5 batches of 20 ms; every turn starts a worker that takes 150 ms to come up."""
    args = {"samples": "40", "sample_s": "0.0025", "worker_start_s": "0.15"}
    result, _ = launch(LaunchKind.LOADER_ONLY, {"num_workers": 1, "prefetch_factor": 1}, **args)
    found = result.measurement
    assert found.epoch_turn_s >= 0.15
    assert found.samples_per_s < found.steady_per_s


class TestAlone:
    """These have the machine to themselves."""

    def test_the_loader_alone_builds_nothing(self, launch):
        result, printed = launch(LaunchKind.LOADER_ONLY, WORKERS)
        found = result.measurement
        # Sleeping sets the upper bound; the lower bound leaves room for a busy machine.
        assert 100 < found.steady_per_s <= 210
        assert 100 < found.loader_capacity_per_s <= 210
        assert set(found.device_s) == {0.0} and found.loader_wait_fraction == 1
        assert found.losses == found.first_losses == ()
        assert found.compile_s == 0 and found.compile_cache_warm is None
        # The first batch, and the queued ones.
        assert found.warmup_steps >= 1 + 6
        assert printed == ""
