"""The measured part of `autotune train`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any, NoReturn

import torch
from torch.utils.data import Dataset

from autotune import stats
from autotune.base.errors import UsageError
from autotune.base.ranks import own_rank
from autotune.base.records import Config, DataRef, MeasurePlan, Window, WorkloadRef
from autotune.training import step as training
from autotune.training.applied import Applied
from autotune.training.feed import Collate, Delivery, Drain, Feed, SampleOrder, epoch_turn_s, longest_whole_s, stopwatch
from autotune.training.step import Step, Wrap
from autotune.workload import contract
from autotune.workload.contract import Context

# A workload's own training under a profile, in this process: its context, its loader, and its step. Imports torch.


class WorkloadTraining:
    """Loads a workload and applies the profile to this process; loader and step are made on request.

    Get the loader's first batch, or its iterator, before `build`: its workers start then, and the model should not be
    on the device yet.

    Attributes:
        workload, ctx: as `autotune.workload.contract` says. config: the profile's configuration.

    Raises:
        WorkloadError: the workload cannot be loaded.
    """

    def __init__(self, applied: Applied, ref: WorkloadRef, data: DataRef) -> None:
        applied.process()
        conditions, rank = applied.profile.conditions, own_rank()
        if rank.count > 1 and torch.device(applied.device).type == "cuda":
            # The thread that pins memory starts with the loader's workers, on the card that is current then.
            torch.cuda.set_device(applied.device)
        self.config: Config = applied.config
        self.worker_start_method: str = conditions.worker_start_method
        self.workload = contract.load(ref)
        self.ctx = Context(
            device=applied.device,
            batch_size=applied.batch_size,
            image_size=conditions.image_size,
            seed=conditions.seed,
            data=data,
            args=contract.args_of(self.workload, ref),
            knobs=training.workload_knobs(self.workload, applied.config),
            rank=rank.number,
            ranks=rank.count,
        )

    def open_loader(
        self,
        *,
        data: tuple[Dataset[Any], Collate] | None = None,
        order: SampleOrder | None = None,
        wrap: Wrap | None = None,
    ) -> Iterable[Any]:
        """Open the loader as `autotune.training.step.open_loader` does."""
        return training.open_loader(
            self.workload,
            self.ctx,
            self.config,
            worker_start_method=self.worker_start_method,
            data=data,
            order=order,
            wrap=wrap,
        )

    def build(self) -> Step:
        """Build model and optimizer on the device, as `autotune.training.step.build` does."""
        return training.build(self.workload, self.ctx, self.config)

    def samples_in(self, batch: Any) -> int:
        """Return the number of samples in a batch, over all ranks together."""
        return training.samples_in(self.workload, self.ctx, batch) * self.ctx.ranks


# A short training under a profile, whose rate can be compared with the promised one. Imports torch.
#
# It is the user's own training: a plain loop, in this process, over what `autotune.training.applied` sets up. Only the
# rules for what counts are those of a trial (the loader's queue is drained, the steps have settled, epoch turns are
# timed apart). Of several ranks, the first one watches the rate, and the others train until they are ended with it.

#: How many seconds a training goes on after the requested steps if its rate has not settled by then.
LONGER_S = 40.0
#: Steps are averaged over windows of at least this many seconds, at whose ends the device is synchronized.
WINDOW_S = 0.2
REPORT_S = 1.0
#: The requirements of the measurement, which are those of a trial.
PLAN = MeasurePlan()
#: A rate with a wider interval, as a fraction of the rate, is not compared.
WIDEST = 0.1


@dataclass(frozen=True)
class TrainingRate:
    """The rate of a short training.

    Attributes:
        samples_per_s: rate after warm-up by the wall clock, including loader waits and a share of the epoch turn;
            ``None`` if the loader's queue was still draining at the end.
        ci95_per_s: its 95 % interval ``(low, high)``, within this training only.
        steps: number of steps taken. counted_steps: number of those on which the rate is based.
        first_step_s: duration of the first step in seconds, with the wait for its batch.
        last_loss: loss of the last step.
        unsettled: why the rate cannot be compared with a promise, as a clause; ``None`` if it can.
    """

    samples_per_s: float | None
    ci95_per_s: tuple[float, float] | None
    steps: int
    counted_steps: int
    first_step_s: float
    last_loss: float
    unsettled: str | None = None


def train(
    applied: Applied,
    ref: WorkloadRef,
    data: DataRef,
    *,
    steps: int,
    on_step: Callable[[int, float | None], None],
) -> TrainingRate:
    """Train a workload under a profile until its rate has settled, for at most `LONGER_S` after the requested steps.

    Args:
        steps: take at least this many.
        on_step: called with the number of the step and the rate so far, about once a second.

    Raises:
        WorkloadError: the workload cannot be loaded, or its data set does not fill a batch.
        UsageError: fewer than three steps.
    """
    if steps < 3:
        raise UsageError("--steps must be at least 3: the first steps are not counted")
    training = WorkloadTraining(applied, ref, data)
    ctx = training.ctx
    # Not in the order of the search, whose launches have just read its beginning.
    order = SampleOrder(ctx.seed + 1, rank=ctx.rank, ranks=ctx.ranks)
    # The worker processes start here, before the model is on the device.
    feed = Feed(training.open_loader(order=order, wrap=stopwatch))
    course = _Course(feed, training.build(), training.samples_in, alone=ctx.ranks == 1)
    if ctx.rank:
        course.follow()
    return course.run(steps, on_step)


class _Course:
    """The steps of one training, from the first on.

    Args:
        alone: whether there are no other ranks.
    """

    def __init__(self, feed: Feed, step: Step, count: Callable[[Any], int], *, alone: bool = True) -> None:
        self._alone = alone
        self._feed = feed
        self._step = step
        self._count = count
        self._drain = Drain(feed, working=True)
        self._drained = False
        self._whole_epochs = False
        self._windows: list[Window] = []
        self._waits_s: list[float] = []
        self._samples = 0
        self._steps = 0
        self._loss = torch.zeros(())

    def run(self, steps: int, on_step: Callable[[int, float | None], None]) -> TrainingRate:
        """Train for at least ``steps`` steps, and then until the rate has settled or `LONGER_S` have passed."""
        reported = start = time.monotonic()
        self._samples = self._take(self._feed.next())
        self._synchronize()
        first_step_s = time.monotonic() - start
        ends: float | None = None
        while True:
            if self._drained:
                self._take_window()
            else:
                self._warm_up()
            now = time.monotonic()
            if now - reported >= REPORT_S:
                reported = now
                on_step(self._steps, stats.rate_of(self._kept).per_s if self._windows else None)
            if self._steps >= steps:
                ends = now + LONGER_S if ends is None else ends
                if now >= ends or (self._drained and self._is_known()):
                    return self._rate(first_step_s)

    def follow(self) -> NoReturn:
        """Train until this process is ended."""
        synchronized = time.monotonic()
        while True:
            self._take(self._feed.next())
            if time.monotonic() - synchronized >= WINDOW_S:
                # The queue of steps on the device must not grow without bound.
                self._synchronize()
                synchronized = time.monotonic()

    def _take(self, delivery: Delivery) -> int:
        self._loss = self._step(delivery.batch)
        self._steps += 1
        return self._count(delivery.batch)

    def _warm_up(self) -> None:
        start = time.monotonic()
        delivery = self._feed.next()
        self._take(delivery)
        self._synchronize()
        drained = self._drain.over(delivery, time.monotonic() - start)
        epoch_s = (self._feed.epoch_batches or math.inf) * self._drain.step_s
        affordable_s = PLAN.max_measure_s / stats.FEWEST_WINDOWS
        self._whole_epochs = self._whole_epochs or (drained and epoch_s <= longest_whole_s(self._feed, affordable_s))
        ready = self._feed.epoch_over if self._whole_epochs else drained
        self._drained = ready and self._drain.steps >= PLAN.warmup_steps

    def _take_window(self) -> None:
        """Take whole steps for `WINDOW_S`, or until the epoch ends: windows leave out the wait for a new epoch.

        If the beginning and end of an epoch matter, the window is a whole epoch.
        """
        turned = self._feed.epoch_over
        start = time.monotonic()
        steps = samples = 0
        while not steps or (not self._feed.epoch_over and (self._whole_epochs or time.monotonic() - start < WINDOW_S)):
            delivery = self._feed.next()
            if delivery.turned or (turned and not steps):
                # A loader that does not know its length turns in the middle of a window.
                start, steps, samples = time.monotonic(), 0, 0
            else:
                self._waits_s.append(delivery.wait_s)
            samples += self._take(delivery)
            steps += 1
        self._synchronize()
        self._windows.append(Window(steps=steps, samples=samples, seconds=time.monotonic() - start))

    @property
    def _settling(self) -> stats.Settling:
        return stats.settled_at([window.seconds / window.steps for window in self._windows])

    @property
    def _kept(self) -> list[Window]:
        return self._windows[min(self._settling.steps, max(0, len(self._windows) - stats.FEWEST_WINDOWS)) :]

    def _is_known(self) -> bool:
        """Return whether the rate has settled and is as precise as it gets within the time of a trial's measurement."""
        kept = self._kept
        if not self._settling.settled or len(kept) < PLAN.min_windows:
            return False
        out_of_time = sum(window.seconds for window in self._windows) >= PLAN.max_measure_s
        return out_of_time or stats.rate_of(kept).halfwidth <= PLAN.target_halfwidth

    def _unsettled(self, rate: stats.Rate) -> str | None:
        if not self._settling.settled:
            return f"the time of a step had not settled after {self._steps} steps"
        if rate.halfwidth > WIDEST:
            return f"the steps varied so much that the rate is known to ± {100 * rate.halfwidth:.0f} % only"
        return None

    def _rate(self, first_step_s: float) -> TrainingRate:
        loss = float(self._loss)
        if not self._windows:
            unsettled = f"the loader's queue was still draining after {self._steps} steps"
            return TrainingRate(None, None, self._steps, 0, first_step_s, loss, unsettled)
        kept = self._kept
        steady = stats.rate_of(kept)
        epoch = (self._feed.epoch_batches or 0) * self._samples
        turn_s = self._turn_s(epoch / steady.per_s if epoch else None)
        rate = stats.with_epoch_turn(steady, turn_s if epoch else None, epoch)
        return TrainingRate(
            rate.per_s,
            (rate.low_per_s, rate.high_per_s),
            self._steps,
            sum(window.steps for window in kept),
            first_step_s,
            loss,
            self._unsettled(steady),
        )

    def _turn_s(self, epoch_s: float | None) -> float | None:
        if not self._alone and not self._feed.turns_s:
            # The other ranks would wait for a turn that is forced here, instead of starting workers as well.
            return None
        return epoch_turn_s(self._feed, median(self._waits_s or [0.0]), epoch_s)

    def _synchronize(self) -> None:
        if self._step.device.type == "cuda":
            torch.cuda.synchronize(self._step.device)
