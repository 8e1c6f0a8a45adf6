"""The measuring loop: a plain training loop with a stopwatch beside it.

Overhead: two clock readings and, on CUDA, two events per step; per window one reading of the card's clock while it
works, one device synchronization, and a reading of the machine's state while nothing is timed. Nothing else happens
between steps, so a plain loop with the same settings runs at the same rate.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from autotune import stats
from autotune.training.batches import move
from autotune.child.beats import Beats
from autotune.child.failure import Diverged
from autotune.child.surroundings import Watcher, reason_to_discard
from autotune.child.timing import Taken, after_the_first_s, timed
from autotune.child.windows import Block, Windows
from autotune.training.exchange import largest
from autotune.training.feed import Delivery, Drain, Source, is_steady, longest_whole_s
from autotune.base.records import MeasurePlan, Window

#: A training step on one batch; returns the loss, shape ``()``, still on the device.
Work = Callable[[Any], torch.Tensor]
#: On CUDA the first step of a window does not count (see `after_the_first_s`).
FEWEST_STEPS = {"cpu": 1, "cuda": 2}


class Loop:
    """Runs and times the steps of one launch, from the second on.

    Args:
        work: ``None`` takes batches and discards them.
        count: returns the number of samples in a batch.
        around: reads the machine's state after each window.

    Attributes:
        windows: what was measured.
        warmup_steps, warmup_s, warmup_losses: set by `warm_up`.
        drained: the loader's head start was used up when measuring began.
        too_long: the epochs have no steady part and last too long to be measured whole.
        waits_inside: CUDA: a step synchronizes with the device midway, so its host time is meaningless.
        made_s, idle_s: of all batches since measuring began; see `Made`.
    """

    def __init__(
        self,
        plan: MeasurePlan,
        work: Work | None,
        source: Source,
        beats: Beats,
        device: torch.device,
        count: Callable[[Any], int],
        around: Watcher,
    ) -> None:
        self.windows = Windows(plan, around.cores)
        self.warmup_losses: list[float] = []
        self.warmup_steps = 0
        self.warmup_s = 0.0
        self.drained = False
        self.too_long = False
        self.waits_inside = False
        self.made_s = self.idle_s = 0.0
        self._plan = plan
        self._work = work
        self._source = source
        self._beats = beats
        self._device = device
        self._cuda = device.type == "cuda" and work is not None
        self._count = count
        self._around = around
        self._number = 1

    @property
    def enqueue_s(self) -> float | None:
        """CUDA: median host time to enqueue a step when nothing blocks it; ``None`` if it cannot be determined."""
        return self.windows.enqueue_s if self._cuda and not self.waits_inside else None

    def warm_up(self) -> None:
        """Empty the queue; take steps until the head start is used up (see `Drain`), or warm-up takes too long.

        Where whole epochs are measured, it goes on to the end of the epoch.
        """
        plan, source = self._plan, self._source
        warmup_began = time.monotonic()
        drain = Drain(
            source, working=self._work is not None, emptied=self._work is not None and empty_queue(source, self._beats)
        )
        while True:
            began = time.monotonic()
            delivery = source.next()
            self.warmup_steps += 1
            # Near the end of the warm-up, when one-time waits of compilers and allocators are over.
            looking = self._cuda and self.warmup_steps == plan.warmup_steps
            loss = self._look_for_waits(delivery.batch) if looking else self._do(delivery.batch)
            if loss is not None:
                self.warmup_losses.append(checked(loss))  # synchronizes, like the end of a window
            seconds = time.monotonic() - began
            self._number += 1
            self._beats.step(self._number, loss=self.warmup_losses[-1] if self.warmup_losses else None)
            drained = drain.over(delivery, seconds)
            if self.warmup_steps < plan.warmup_steps:
                continue
            self.warmup_s = time.monotonic() - warmup_began
            if drained and not self.drained:
                self.drained = True
                epoch_s = (source.epoch_batches or math.inf) * drain.step_s
                affordable_s = plan.max_measure_s / stats.FEWEST_WINDOWS
                self.windows.whole_epochs = epoch_s <= longest_whole_s(source, affordable_s)
                self.too_long = not self.windows.whole_epochs and not is_steady(source)
            if self.drained:
                if source.epoch_over or not self.windows.whole_epochs:
                    return
            elif self.warmup_s > plan.max_warmup_s:
                return

    def measure(self) -> None:
        """Fill windows until there are enough.

        Raises:
            Disturbed: too many windows were disturbed for the rest to make a measurement.
            Diverged: a loss was not finite.
        """
        ended = time.monotonic()
        self._around.read()
        measure_began = began = time.monotonic()
        taken: list[Taken] = []
        late = False
        while True:
            # Windows never span an epoch boundary: one ends before it, the next begins after it.
            turning = self._source.epoch_over
            full = not self.windows.whole_epochs and time.monotonic() - began >= self._plan.min_window_s
            full = full and len(taken) >= FEWEST_STEPS["cuda" if self._cuda else "cpu"]
            if taken and (turning or full):
                ended = self._close_window(taken, began, late=late)
                late = False
                if self.windows.over(ended - measure_began):
                    return
                began = time.monotonic()
            delivery = self._source.next()
            if turning or delivery.turned:
                # A loader that does not know its length turns within a window, which is lost.
                taken, late = [], False
                self._around.begin()
                ended = began = time.monotonic()
                delivery = dataclasses.replace(delivery, wait_s=0.0)
            elif not taken and self._source.workers and delivery.made.finished_s > ended:
                # Booking the last window, or reading the machine's state before the first, took a moment that the
                # workers used. They had nothing ready when it began, so a plain loop would have waited for that long.
                delivery = dataclasses.replace(delivery, wait_s=delivery.wait_s + began - ended)
                began, late = ended, True
            taken.append(self._take(delivery))
            self.made_s += delivery.made.seconds
            self.idle_s += delivery.made.idle_s
            del delivery  # otherwise a window's worth of batches would pile up in memory

    def _do(self, batch: Any) -> torch.Tensor | None:
        return None if self._work is None else self._work(batch)

    def _take(self, delivery: Delivery) -> Taken:
        samples = self._count(delivery.batch)
        got = time.monotonic()
        start = self._mark() if self._cuda else None
        loss = self._do(delivery.batch)
        events = None if start is None else (start, self._mark())
        host_s = time.monotonic() - got if self._work is not None else 0.0
        self._number += 1
        self._beats.step(self._number, rate_per_s=self.windows.rate_per_s)
        return Taken(loss, delivery.wait_s, delivery.made.seconds, host_s, samples, events)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _close_window(self, taken: list[Taken], began: float, *, late: bool) -> float:
        """Synchronize, book the window, and return the time at which it ended.

        Args:
            late: the loader had nothing ready when the window began, so it began with the wait for the first batch.
        """
        at_work: dict[str, int] = {}
        if self._cuda:
            # As soon as the card is idle, its clocks are others, and what held them down is gone.
            at_work = self._around.at_work()
            torch.cuda.synchronize()
        ended = time.monotonic()
        around, energy_j = self._around.read()
        around = around.model_copy(update=at_work)
        counted, steps, seconds = taken, timed(taken, checked), ended - began
        # The wait for a late loader, and all of an epoch, can be told by the host's clock only.
        steady_s = None if late or self.windows.whole_epochs else after_the_first_s(taken)
        if steady_s is not None:
            energy_j = None if energy_j is None else energy_j * steady_s / seconds
            counted, steps, seconds = taken[1:], steps[1:], steady_s
        window = Window(
            steps=len(counted),
            samples=sum(t.samples for t in counted),
            seconds=seconds,
            around=around,
            discarded=reason_to_discard(around, self._around.cores, self._plan.busy_cores),
        )
        self._beats.disturbed = window.discarded
        self.windows.add(Block(window, steps, enqueue_s=taken[0].host_s, energy_j=energy_j))
        taken.clear()
        return ended

    def _look_for_waits(self, batch: Any) -> torch.Tensor | None:
        """Take a step and detect, with CUDA's sync debug mode, whether it synchronizes with the device midway."""
        # Copy the batch first: the copy may synchronize as well, which does not count.
        batch = move(batch, self._device, non_blocking=False, channels_last=0)
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loss = self._do(batch)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        others = [w for w in seen if "synchronizing CUDA operation" not in str(w.message)]
        self.waits_inside = len(others) < len(seen)
        for warning in others:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return loss


def empty_queue(source: Source, beats: Beats) -> bool:
    """Take what the workers have made by now, without training on it, until nothing is ready; return whether that
    makes sense.

    A queue that is trained on lasts the longer, the faster the workers are, and hides for as long that the device is
    faster. An epoch that hardly holds more than a queue is measured whole. Several ranks take the same number of
    batches, so that their epochs end together.
    """
    if not source.head_start or not is_steady(source):
        return False
    taken = 0
    for _ in range(source.head_start):
        taken += 1
        delivery = source.next()
        beats.step(1)
        if not delivery.ready:
            break
    for _ in range(largest(taken)[0] - taken):
        source.next()
        beats.step(1)
    return True


def checked(loss: torch.Tensor) -> float:
    """Return the loss as a number, which synchronizes with the device.

    Raises:
        Diverged: it is not finite.
    """
    value = float(loss)
    if not math.isfinite(value):
        raise Diverged(f"the loss became {value}")
    return value
