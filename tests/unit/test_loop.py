"""The measuring loop on simulated batches, in this process and in virtual time."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator

import pytest
import torch

from autotune.base.clock import SystemClock
from autotune.base.records import MeasurePlan, Phase, Surroundings
from autotune.child.launch import Beats
from autotune.child.loop import Loop
from autotune.training import short_training
from autotune.training.feed import Delivery, Drain, Feed, Made, Resident
from tests.support import FakeClock

from .fake_card import FakeCard

PLAN = MeasurePlan(target_halfwidth=10.0, min_windows=4, min_window_s=0.1, max_measure_s=2.0, warmup_steps=3)
MAKING_S = 0.02
#: Duration of inspecting the machine in these tests, which is much longer than in reality.
LOOK_S = 0.05
TURN_S = 0.3


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

    def at_work(self) -> dict[str, int]:
        return {"sm_clock_mhz": 1410}

    def read(self) -> tuple[Surroundings, None]:
        time.sleep(LOOK_S)
        return Surroundings(), None


class OneWorker:
    """A worker that needs `MAKING_S` for a batch and pauses when four are ready."""

    workers = 1
    head_start = 4
    epoch_batches = None
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
        return Delivery(
            None, self.taken[-1] - asked, Made(MAKING_S, 0.0, self.finished[-1]), self.finished[-1] <= asked
        )


class ShortEpochs:
    """Workers whose queue holds a whole epoch. They slow the training down as long as they make batches."""

    workers = 8

    def __init__(self, batches: int, queues: float, slow_s: float) -> None:
        self.epoch_batches = batches
        self.head_start = round(batches / queues)
        self.slow_s = slow_s
        self.turns_s: list[float] = []
        self.dealt = 1  # the first step is taken before the loop begins

    @property
    def epoch_over(self) -> bool:
        return self.dealt % self.epoch_batches == 0

    def next(self) -> Delivery:
        asked = time.monotonic()
        epoch, place = divmod(self.dealt, self.epoch_batches)
        if place == 0:
            time.sleep(TURN_S)
            self.turns_s.append(TURN_S)
        elif place < self.epoch_batches / 4:
            time.sleep(self.slow_s * (1 + 0.01 * (7 * epoch % 5 - 2)))
        self.dealt += 1
        return Delivery(None, time.monotonic() - asked, Made(0.01, 0.0, asked), ready=place > 0)


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


def loop_on(source, beats, work, plan=PLAN):  # type: ignore[no-untyped-def]
    loop = Loop(plan, work, source, beats, torch.device("cpu"), lambda batch: 1, SlowToLook())  # type: ignore[arg-type]
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


class ManyWorkers(OneWorker):
    """One that makes batches as fast as eight would, with a queue of 64 that was full when the first step began."""

    workers = 8
    head_start = 64

    def __init__(self) -> None:
        super().__init__()
        self.finished = [time.monotonic()] * self.head_start
        self.taken = []
        self.next_made = time.monotonic()

    def next(self) -> Delivery:
        asked = time.monotonic()
        number = len(self.taken)
        if number >= len(self.finished):
            self.finished.append(max(self.finished[-1] + MAKING_S, self.taken[number - self.head_start]))
        # The workers have gone on meanwhile, as long as there was room.
        while len(self.finished) - number < self.head_start and self.finished[-1] + MAKING_S <= asked:
            self.finished.append(self.finished[-1] + MAKING_S)
        time.sleep(max(0.0, self.finished[number] - time.monotonic()))
        self.taken.append(time.monotonic())
        # Each of eight took eight times as long.
        made = Made(8 * MAKING_S, 0.0, self.finished[number])
        return Delivery(None, self.taken[-1] - asked, made, self.finished[number] <= asked)


@pytest.mark.parametrize("slower", [1.1, 1.5, 4.0])
def test_a_long_queue_does_not_hide_that_the_device_is_faster(
    beats: Beats, monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    """Of a queue of 64 batches, a device that is faster by a tenth would live for 700 steps."""
    # While the machine is looked at, workers would catch up.
    monkeypatch.setattr(f"{__name__}.LOOK_S", 0.0)
    loop = loop_on(ManyWorkers(), beats, work_for(MAKING_S / slower))
    assert loop.drained
    assert loop.windows.rate_per_s == pytest.approx(1 / MAKING_S, rel=0.02)


def test_a_loader_that_is_faster_leaves_the_devices_rate(beats: Beats) -> None:
    loop = loop_on(ManyWorkers(), beats, work_for(1.2 * MAKING_S))
    assert loop.windows.rate_per_s == pytest.approx(1 / (1.2 * MAKING_S), rel=0.02)


def test_a_training_of_the_users_own_waits_until_its_queue_is_used_up() -> None:
    """`autotune train` throws no batch away, so it trains through the queue."""
    source, drain = ManyWorkers(), None
    drain = Drain(source, working=True)
    steps = 0
    while True:
        delivery = source.next()
        time.sleep(MAKING_S / 1.5)
        steps += 1
        if drain.over(delivery, delivery.wait_s + MAKING_S / 1.5):
            break
    # n / (1 - r) = 64 / (1 - 2 / 3)
    assert steps == pytest.approx(64 * 3, abs=4)


@pytest.mark.parametrize("window_s", [0.001, 0.1])
def test_the_empty_queue_at_the_start_of_a_window_does_not_count(
    beats: Beats, monkeypatch: pytest.MonkeyPatch, window_s: float
) -> None:
    card = FakeCard(monkeypatch)
    monkeypatch.setattr(Loop, "_look_for_waits", lambda loop, batch: card.work(batch))
    plan = PLAN.model_copy(update={"min_window_s": window_s})
    loop = Loop(plan, card.work, Resident([None]), beats, torch.device("cuda"), lambda batch: 1, SlowToLook())  # type: ignore[arg-type]
    # The loop reads each loss at once while it warms up, so the device never runs ahead there.
    loop.warm_up()
    loop.measure()
    assert loop.windows.rate_per_s == pytest.approx(50)
    for block in loop.windows.kept:
        assert sum(step.step_s for step in block.steps) == pytest.approx(block.window.seconds)
        assert block.window.around == Surroundings(sm_clock_mhz=1410)


def test_a_card_that_waits_for_its_loader_is_timed_with_the_waits(
    beats: Beats, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = FakeCard(monkeypatch)
    monkeypatch.setattr(Loop, "_look_for_waits", lambda loop, batch: card.work(batch))
    monkeypatch.setattr(f"{__name__}.MAKING_S", 0.03)
    monkeypatch.setattr(f"{__name__}.LOOK_S", 0.005)
    loop = Loop(PLAN, card.work, OneWorker(), beats, torch.device("cuda"), lambda batch: 1, SlowToLook())  # type: ignore[arg-type]
    loop.warm_up()
    loop.measure()
    assert loop.windows.rate_per_s == pytest.approx(1 / 0.03, rel=0.01)


@pytest.mark.parametrize("queues", [0.5, 1, 2, 10])
def test_epochs_that_begin_slowly_and_end_fast_are_measured_whole(beats: Beats, queues: float) -> None:
    """A quarter of the batches takes most of the time, and most windows within an epoch would not contain it."""
    plan = PLAN.model_copy(update={"max_measure_s": 6.0})
    loop = loop_on(ShortEpochs(40, queues, slow_s=0.02), beats, work_for(0.01), plan)
    inside_s = 40 * 0.01 + 9 * 0.02
    assert loop.windows.rate_per_s == loop.windows.rate.per_s == pytest.approx(40 / inside_s, rel=0.01)
    assert {block.window.steps for block in loop.windows.kept} == {40}
    assert not loop.too_long


def test_epochs_that_are_steady_for_most_of_their_length_are_not_waited_for(beats: Beats) -> None:
    loop = loop_on(ShortEpochs(40, 40, slow_s=0.0), beats, work_for(0.01))
    assert max(block.window.steps for block in loop.windows.kept) <= 10


def test_whole_epochs_tell_from_epoch_to_epoch_whether_they_settled(beats: Beats) -> None:
    plan = PLAN.model_copy(update={"target_halfwidth": 1e-9, "max_measure_s": 12.0})
    loop = loop_on(ShortEpochs(40, 1, slow_s=0.02), beats, work_for(0.01), plan)
    assert loop.windows.settled and len(loop.windows.kept) >= 10
    assert not loop_on(ShortEpochs(40, 1, slow_s=0.02), beats, work_for(0.01)).windows.settled


def test_epochs_that_take_too_long_to_be_measured_whole_are_named(beats: Beats) -> None:
    loop = loop_on(ShortEpochs(1000, 1, slow_s=0.2), beats, work_for(0.1))
    assert loop.drained and loop.too_long


def test_a_short_training_measures_whole_epochs_too() -> None:
    source = ShortEpochs(40, 1, slow_s=0.02)
    source.loader = range(40)  # type: ignore[attr-defined]
    step = work_for(0.01)
    step.device = torch.device("cpu")  # type: ignore[attr-defined]
    rate = short_training._Course(source, step, lambda batch: 1).run(1, lambda *_: None)  # type: ignore[arg-type]
    assert rate.unsettled is None
    assert rate.samples_per_s == pytest.approx(40 / (40 * 0.01 + 9 * 0.02 + TURN_S), rel=0.01)


def test_a_queue_of_batches_that_nobody_has_timed_is_used_up_first() -> None:
    source = ShortEpochs(40, 4, slow_s=0.0)
    drain = Drain(source, working=True)
    delivery = dataclasses.replace(source.next(), made=Made(0.0, 0.0, time.monotonic()), ready=True, wait_s=0.0)
    assert [drain.over(delivery, 0.01) for _ in range(source.head_start)][-2:] == [False, True]


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_batch_is_told_from_how_it_was_made_whatever_pinning_makes_of_the_pair(kind: type) -> None:
    """PyTorch's thread that pins batches makes lists of tuples in some versions."""
    made = Made(0.5, 0.1, time.monotonic())
    feed = Feed([kind(("batch", made))])
    delivery = feed.next()
    assert (delivery.batch, delivery.made) == ("batch", made)
