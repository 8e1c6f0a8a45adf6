"""The measuring loop on simulated batches, in this process and in virtual time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from autotune.child.beats import Beats
from autotune.child.loop import Loop
from autotune.clock import SystemClock
from autotune.feed import Delivery, Resident
from autotune.records import MeasurePlan, Phase, Surroundings
from autotune.testing import FakeClock

PLAN = MeasurePlan(target_halfwidth=10.0, min_windows=4, min_window_s=0.1, max_measure_s=2.0, warmup_steps=3)
MAKING_S = 0.02
#: Duration of inspecting the machine in these tests, which is much longer than in reality.
LOOK_S = 0.05


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop reads the clock itself; here, only sleeping takes time."""
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)


class SlowToLook:
    """Surroundings about which nothing is known, and which take time to read."""

    cores = 2

    def begin(self) -> None:
        pass

    def read(self) -> tuple[Surroundings, None]:
        time.sleep(LOOK_S)
        return Surroundings(), None


class OneWorker:
    """A worker that needs `MAKING_S` for a batch and pauses when four are ready."""

    workers = 1
    head_start = 4
    epoch_over = False

    def __init__(self) -> None:
        self.turns_s: list[float] = []
        self.finished: list[float] = []
        self.taken: list[float] = []

    def next(self) -> Delivery:
        asked = time.monotonic()
        number = len(self.finished)
        # It begins a batch when the last one is finished and there is room in the queue.
        began = self.finished[-1] if self.finished else asked
        if number >= self.head_start:
            began = max(began, self.taken[number - self.head_start])
        self.finished.append(began + MAKING_S)
        time.sleep(max(0.0, self.finished[-1] - time.monotonic()))
        self.taken.append(time.monotonic())
        return Delivery(None, self.taken[-1] - asked, MAKING_S, self.finished[-1], self.finished[-1] <= asked)


@pytest.fixture
def beats() -> Iterator[Beats]:
    read, write = os.pipe()
    made = Beats(write, SystemClock())
    made.enter(Phase.WARMUP)
    yield made
    os.close(read)
    os.close(write)


def work_for(seconds: float):  # type: ignore[no-untyped-def]
    def work(batch: object) -> torch.Tensor:
        time.sleep(seconds)
        return torch.zeros(())

    return work


def loop_on(source, beats, work):  # type: ignore[no-untyped-def]
    loop = Loop(PLAN, work, source, beats, torch.device("cpu"), lambda batch: 1, SlowToLook())  # type: ignore[arg-type]
    loop.warm_up()
    loop.measure()
    return loop


@pytest.mark.parametrize("work", [None, work_for(0.005)])
def test_batches_made_while_nothing_is_timed_do_not_count(beats: Beats, work: object) -> None:
    """In every pause, the worker makes at least two batches, for which a plain loop would have waited."""
    windows = loop_on(OneWorker(), beats, work).windows
    assert windows.rate_per_s == pytest.approx(1 / MAKING_S, rel=1e-3)
    for block in windows.kept:
        assert sum(step.step_s for step in block.steps) == pytest.approx(block.window.seconds)


def test_a_pause_does_not_count_in_a_loop_that_never_waits(beats: Beats) -> None:
    windows = loop_on(Resident([None]), beats, work_for(0.02)).windows
    assert windows.rate_per_s == pytest.approx(50)


def test_a_full_queue_is_emptied_before_measuring(beats: Beats) -> None:
    source = OneWorker()
    loop = loop_on(source, beats, None)
    assert loop.drained and loop.warmup_steps >= source.head_start
    assert loop.warmup_losses == []
    assert loop.enqueue_s is None
