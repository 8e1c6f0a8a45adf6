"""What counts as the rate of a whole training: seconds, samples and joules of steps, and nothing else."""

from __future__ import annotations

import pytest

from autotune.base.clock import VirtualClock
from autotune.training.whole_training.checkpoints import EpochTally
from autotune.training.whole_training.course import Meter, Pace


@pytest.mark.parametrize("watts", [50.0, None])
def test_a_checkpoint_or_an_evaluation_is_not_counted(watts: float | None) -> None:
    clock, tally = VirtualClock(), EpochTally()
    meter = Meter(clock.now, lambda: None if watts is None else watts * clock.now(), lambda: None)
    meter.add(8)
    meter.stop(tally)
    assert tally == EpochTally()
    for _ in range(2):
        meter.start()
        for _ in range(3):
            clock.advance(2.0)
            meter.add(8)
            meter.note(tally)
        meter.stop(tally)
        clock.advance(100.0)
        meter.note(tally)
    row = tally.row(1, 6, 0.1)
    assert (row.counted_samples, row.counted_s) == (48, 12.0)
    assert row.samples_per_s == 4.0
    assert row.energy_j == (None if watts is None else 600.0)


def test_an_epoch_in_which_the_counter_failed_has_no_energy() -> None:
    """What it used then would be missing, while its samples and seconds count."""
    clock, tally, counter = VirtualClock(), EpochTally(), iter((0.0, 100.0, None, 300.0, 400.0))
    meter = Meter(clock.now, lambda: next(counter), lambda: None)
    meter.start()
    for _ in range(4):
        clock.advance(2.0)
        meter.add(8)
        meter.note(tally)
    assert tally.row(1, 4, 0.1).energy_j is None and tally.row(1, 4, 0.1).counted_samples == 32


def test_the_time_left_has_the_evaluations_in_it() -> None:
    clock = VirtualClock()
    pace = Pace(clock.now, evaluation_s=30.0)
    pace.start(10)
    assert pace.left_s(10, 100, 2) is None
    clock.advance(5.0)
    pace.samples += 40
    assert pace.left_s(20, 90, 2) == pytest.approx(45.0 + 60.0)
    assert pace.per_s() == 8.0 and pace.per_s() is None
    assert pace.left_s(20, None, 2) is None
