"""The measuring loop: warm-up, windows, and the upper bounds of a configuration."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autotune import stats
from autotune.base.records import Measurement, MeasurePlan, Phase, TrialSpec, Window
from autotune.child.failure import Diverged, Slow
from autotune.child.launch import Beats, Launch
from autotune.child.windows import Block, SurroundingsReader, Timed, Windows, reason_to_discard
from autotune.knobs.compile_mode import compiles
from autotune.machine.host import tree_memory_bytes
from autotune.training.exchange import largest
from autotune.training.feed import (
    Delivery,
    Drain,
    Feed,
    Resident,
    Source,
    epoch_turn_s,
    is_steady,
    length_of,
    longest_whole_s,
    stopwatch,
    workers_and_queue,
)
from autotune.training.step import Step, build, move, samples_in, step_plan

# The times of a window's steps: by the device's clock on CUDA, by the host's on a CPU.


def mark() -> torch.cuda.Event:
    """Record a CUDA event."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class Taken:
    """One step of an open window.

    Attributes:
        wait_s, made_s, handed_s: see `Delivery`. host_s: host time of the step without the wait.
        events: recorded before and after the step; ``None`` on a CPU.
    """

    loss: torch.Tensor | None
    wait_s: float
    made_s: float
    host_s: float
    samples: int
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    handed_s: float | None = None


def timed(taken: Sequence[Taken]) -> tuple[Timed, ...]:
    """Return the times of a window's steps. All events must have happened."""
    steps: list[Timed] = []
    previous: torch.cuda.Event | None = None
    for t in taken:
        device_s, wait_s = t.host_s, t.wait_s
        step_s = device_s + wait_s
        if t.events is not None:
            start, end = t.events
            device_s = start.elapsed_time(end) / 1e3
            step_s = device_s + wait_s
            if previous is not None:
                # The host runs ahead of a GPU, so a step lasts from the end of the previous step to its own end.
                step_s = previous.elapsed_time(end) / 1e3
                # A GPU that still has queued work while the host waits is not idle.
                wait_s = min(wait_s, max(0.0, previous.elapsed_time(start) / 1e3))
            previous = end
        loss = None if t.loss is None else checked(t.loss)
        handed_s = None if t.handed_s is None else min(t.handed_s, wait_s)
        steps.append(Timed(step_s, wait_s, device_s, t.made_s, loss, handed_s))
    return tuple(steps)


def after_the_first_s(taken: Sequence[Taken]) -> float | None:
    """Return the seconds from the end of a window's first step to the end of its last, by the device's clock.

    A window begins with nothing queued on the device, so its first step waits for the host, as no step of a plain loop
    does: counted, it would make the rate too low, by 0.2 to 1 % for windows of half a second. ``None`` on a CPU, and
    for a window of one step.
    """
    if len(taken) < 2 or taken[0].events is None or taken[-1].events is None:
        return None
    return float(taken[0].events[1].elapsed_time(taken[-1].events[1])) / 1e3


# The measuring loop: a plain training loop with a stopwatch beside it.
#
# Overhead: two clock readings and, on CUDA, two events per step; per window one reading of the card's clock while it
# works, one device synchronization, and a reading of the machine's state while nothing is timed. Nothing else happens
# between steps, so a plain loop with the same settings runs at the same rate.

#: A training step on one batch; returns the loss, shape ``()``, still on the device.
Work = Callable[[Any], torch.Tensor]
#: On CUDA the first step of a window does not count (see `after_the_first_s`).
FEWEST_STEPS = {"cpu": 1, "cuda": 2}


@dataclass
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

    plan: MeasurePlan
    work: Work | None
    source: Source
    beats: Beats
    device: torch.device
    count: Callable[[Any], int]
    around: SurroundingsReader
    warmup_losses: list[float] = field(default_factory=list, init=False)
    warmup_steps: int = field(default=0, init=False)
    warmup_s: float = field(default=0.0, init=False)
    drained: bool = field(default=False, init=False)
    too_long: bool = field(default=False, init=False)
    waits_inside: bool = field(default=False, init=False)
    made_s: float = field(default=0.0, init=False)
    idle_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.windows = Windows(self.plan, self.around.cores)
        self._cuda = self.device.type == "cuda" and self.work is not None
        self._number = 1

    @property
    def enqueue_s(self) -> float | None:
        """CUDA: median host time to enqueue a step when nothing blocks it; ``None`` if it cannot be determined."""
        return self.windows.enqueue_s if self._cuda and not self.waits_inside else None

    def warm_up(self) -> None:
        """Empty the queue; take steps until the head start is used up (see `Drain`), or warm-up takes too long.

        Where whole epochs are measured, it goes on to the end of the epoch.
        """
        plan, source = self.plan, self.source
        warmup_began = time.monotonic()
        drain = Drain(
            source, working=self.work is not None, emptied=self.work is not None and empty_queue(source, self.beats)
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
            self.beats.step(self._number, loss=self.warmup_losses[-1] if self.warmup_losses else None)
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
        """Fill windows until there are enough. Raises as `Windows.over` and `checked` do."""
        ended = time.monotonic()
        self.around.read()
        measure_began = began = time.monotonic()
        taken: list[Taken] = []
        late = False
        while True:
            # Windows never span an epoch boundary: one ends before it, the next begins after it.
            turning = self.source.epoch_over
            full = not self.windows.whole_epochs and time.monotonic() - began >= self.plan.min_window_s
            full = full and len(taken) >= FEWEST_STEPS["cuda" if self._cuda else "cpu"]
            if taken and (turning or full):
                ended = self._close_window(taken, began, late=late)
                late = False
                if self.windows.over(ended - measure_began):
                    return
                began = time.monotonic()
            delivery = self.source.next()
            if turning or delivery.turned:
                # A loader that does not know its length turns within a window, which is then lost.
                taken, late = [], False
                self.around.begin()
                ended = began = time.monotonic()
                delivery = dataclasses.replace(delivery, wait_s=0.0)
            elif not taken and self.source.workers and delivery.made.finished_s > ended:
                # Booking the last window, or reading the machine's state before the first, took a moment that the
                # workers made use of. They had nothing ready when it began, so a plain loop would have waited for that
                # long.
                delivery = dataclasses.replace(delivery, wait_s=delivery.wait_s + began - ended)
                began, late = ended, True
            taken.append(self._take(delivery))
            self.made_s += delivery.made.seconds
            self.idle_s += delivery.made.idle_s
            del delivery  # otherwise a window's worth of batches would pile up in memory

    def _do(self, batch: Any) -> torch.Tensor | None:
        return None if self.work is None else self.work(batch)

    def _take(self, delivery: Delivery) -> Taken:
        samples = self.count(delivery.batch)
        began = time.monotonic()
        start = mark() if self._cuda else None
        loss = self._do(delivery.batch)
        events = None if start is None else (start, mark())
        host_s = time.monotonic() - began if self.work is not None else 0.0
        self._number += 1
        self.beats.step(self._number, rate_per_s=self.windows.rate_per_s)
        return Taken(loss, delivery.wait_s, delivery.made.seconds, host_s, samples, events, delivery.handed_s)

    def _close_window(self, taken: list[Taken], began: float, *, late: bool) -> float:
        """Synchronize, book the window, and return the time at which it ended.

        Args:
            late: the loader had nothing ready when the window began, so it began with the wait for the first batch.
        """
        at_work: dict[str, int] = {}
        if self._cuda:
            # As soon as the card is idle, its clocks change, and what held them down is gone.
            at_work = self.around.at_work()
            torch.cuda.synchronize()
        ended = time.monotonic()
        around, energy_j = self.around.read()
        around = around.model_copy(update=at_work)
        counted, steps, seconds = taken, timed(taken), ended - began
        # Only the host's clock can measure the wait for a late loader, or a whole epoch.
        steady_s = None if late or self.windows.whole_epochs else after_the_first_s(taken)
        if steady_s is not None:
            energy_j = None if energy_j is None else energy_j * steady_s / seconds
            counted, steps, seconds = taken[1:], steps[1:], steady_s
        window = Window(
            steps=len(counted),
            samples=sum(t.samples for t in counted),
            seconds=seconds,
            around=around,
            discarded=reason_to_discard(around, self.around.cores, self.plan.busy_cores),
        )
        self.beats.disturbed = window.discarded
        self.windows.add(Block(window, steps, enqueue_s=taken[0].host_s, energy_j=energy_j))
        taken.clear()
        return ended

    def _look_for_waits(self, batch: Any) -> torch.Tensor | None:
        """Take a step and detect, with CUDA's sync debug mode, whether it synchronizes with the device midway."""
        # Copy the batch first: the copy may synchronize as well, which does not count.
        batch = move(batch, self.device, non_blocking=False, channels_last=0)
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loss = self._do(batch)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        others = [w for w in caught if "synchronizing CUDA operation" not in str(w.message)]
        self.waits_inside = len(others) < len(caught)
        for warning in others:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return loss


def empty_queue(source: Source, beats: Beats) -> bool:
    """Take what the workers have made by now, without training on it, until nothing is ready; return whether that
    makes sense.

    A queue that is trained on lasts longer the faster the workers are, and meanwhile hides that the device is faster.
    An epoch that holds hardly more than a queue is measured whole. Several ranks take the same number of batches, so
    that their epochs end together.
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
    """Return the loss as a number, which synchronizes with the device. Raises `Diverged` if it is not finite."""
    value = float(loss)
    if not math.isfinite(value):
        raise Diverged(f"the loss became {value}")
    return value


def measure(spec: TrialSpec, beats: Beats) -> Measurement:
    """Train under ``spec.config`` and measure.

    Raises:
        Slow: the rate is certainly below the plan's threshold.
        Disturbed: other processes kept the machine too busy to measure.
        Diverged: a loss was not finite.
    """
    launch = Measuring(spec, beats)
    # As in a plain loop, start the workers before initializing the device.
    feed = Feed(launch.loader)
    step = launch.build()
    launch.first_step(feed.next(), step)
    loop = launch.run(feed, step)
    windows = loop.windows
    if windows.slow:
        # A single window gives no estimate of its error.
        turn_s = median(feed.turns_s) if feed.turns_s else None
        measurement = launch.measurement(loop, turn_s) if len(windows.kept) > 1 else None
        raise Slow(windows.rate.per_s, measurement)
    waits_s = median(step.wait_s for block in windows.kept for step in block.steps)
    batches = feed.epoch_batches
    epoch_s = None if batches is None else batches * launch.samples / windows.rate.per_s
    if spec.ranks > 1 and not feed.turns_s:
        # If a turn were forced here, the other ranks would wait for it instead of starting workers as well.
        return launch.measurement(loop, None, feed.epoch_batches)
    return launch.measurement(loop, epoch_turn_s(feed, waits_s, epoch_s), feed.epoch_batches)


class Measuring(Launch):
    """A launch that measures, with the phases that all of these share.

    Args:
        cards: whether to watch the cards of all ranks, if there are any.

    Attributes:
        samples: in the first batch, of all ranks. startup_s, compile_s: see `Measurement`.
        cache_warm: inductor's cache held every graph of the first step; ``None`` if nothing was compiled.
        losses: of the first step, if there was one.
    """

    samples: int
    startup_s: float
    compile_s = 0.0
    cache_warm: bool | None = None
    losses: tuple[float, ...] = ()

    def __init__(self, spec: TrialSpec, beats: Beats, *, cards: bool = True) -> None:
        # Before CUDA is initialized, so that processes already on the card can be distinguished from this one. The
        # other ranks are children of the leader, too.
        self.root = os.getppid() if spec.ranks > 1 else os.getpid()
        self.around = SurroundingsReader.of(spec, beats.clock, cards=cards, root=self.root)
        super().__init__(spec, beats)
        self.learning_rate: float | None = None
        #: Graphs compiled by the end of the first step, and while the rate was measured.
        self.graphs = self.late_graphs = 0
        self.loader = self.open_loader(wrap=stopwatch)

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch of each rank, all ranks together."""
        return samples_in(self.workload, self.ctx, batch) * self.spec.ranks

    def build(self) -> Step:
        """Run the build phase."""
        self.wake()
        step = build(self.workload, self.ctx, self.spec.config)
        rate = step.optimizer.param_groups[0].get("lr")
        self.learning_rate = None if rate is None else float(rate)
        return step

    def first_step(self, delivery: Delivery, work: Work | None) -> None:
        """Run the compile phase: the first step, or only the first batch if `work` is ``None``."""
        self.samples, clock = self.count(delivery.batch), self.beats.clock
        self.startup_s = clock.now() - self.beats.began
        self.beats.enter(Phase.COMPILE)
        if work is None:
            return
        began = clock.now()
        self.losses = (checked(work(delivery.batch)),)
        self.compile_s = clock.now() - began
        self.memory.first_step_over()
        self.around.settle_in()
        self.beats.step(1, loss=self.losses[0])
        self.graphs = graphs_compiled(self.spec)
        self.cache_warm = _cache_was_warm(self.spec)

    def run(self, source: Source, work: Work | None) -> Loop:
        """Run the warm-up and measure phases."""
        loop = Loop(self.spec.plan, work, source, self.beats, self.device, self.count, self.around)
        self.beats.enter(Phase.WARMUP)
        loop.warm_up()
        self.beats.enter(Phase.MEASURE)
        before = graphs_compiled(self.spec)
        loop.measure()
        self.late_graphs = graphs_compiled(self.spec) - before
        return loop

    def measurement(self, loop: Loop, turn_s: float | None, epoch_batches: int | None = None) -> Measurement:
        """Put the results of the launch together.

        Args:
            turn_s: extra seconds of an epoch turn; ``None`` if unknown.
            epoch_batches: the observed length of an epoch, if the loader does not know it.
        """
        windows = loop.windows
        steps = [step for block in windows.kept for step in block.steps]
        cut = [step for block in windows.cut for step in block.steps]
        workers, _ = workers_and_queue(self.loader)
        made_s = fmean(step.made_s for step in steps)
        return windows.measured(
            samples=self.samples,
            # 0 stands for an epoch of unknown length.
            epoch_samples=(length_of(self.loader) or epoch_batches or 0) * self.samples,
            turn_s=turn_s,
            has_turns=False,
            warmup_steps=loop.warmup_steps,
            warmup_s=loop.warmup_s,
            drained=loop.drained,
            unsettled=_unsettled(loop, len(cut) + len(steps), self.late_graphs),
            batch_size=self.ctx.batch_size,
            ranks=self.spec.ranks,
            loader_capacity_per_s=max(1, workers) * self.samples / made_s if made_s else None,
            loader_idle_fraction=max(0.0, loop.idle_s / loop.made_s) if loop.made_s else None,
            learning_rate=self.learning_rate,
            losses=_losses(steps),
            first_losses=(*self.losses, *loop.warmup_losses, *_losses(cut)),
            page_cache=self.spec.data.page_cache,
            alloc_retries=self.memory.alloc_retries,
            enqueue_s=loop.enqueue_s,
            startup_s=self.startup_s,
            compile_s=self.compile_s,
            compile_cache_warm=self.cache_warm,
            recompiles=graphs_compiled(self.spec) - self.graphs if compiles(self.spec.config) else None,
            peak_allocated_bytes=self.memory.peak_bytes,
            peak_reserved_bytes=self.memory.peak_reserved_bytes,
            # Read once, after timing has ended, because it walks the page tables of the whole process tree.
            host_memory_bytes=tree_memory_bytes(self.root),
        )


def _losses(steps: Iterable[Timed]) -> tuple[float, ...]:
    return tuple(step.loss for step in steps if step.loss is not None)


def _unsettled(loop: Loop, steps: int, late_graphs: int) -> str | None:
    if late_graphs:
        times = "once" if late_graphs == 1 else f"{late_graphs} times"
        return f"the model was compiled again {times} while it was measured: its inputs go on changing"
    if not loop.drained:
        return "the loader's queue was still draining when warm-up ran out of time"
    if loop.too_long:
        return "the loader queues half an epoch or more, and an epoch takes too long to be measured whole"
    if loop.windows.settled:
        return None
    epochs = len(loop.windows.cut) + len(loop.windows.kept)
    if loop.windows.whole_epochs and epochs < stats.LEAST_STEPS:
        return f"{epochs} epochs are too few to tell whether their times had settled"
    if steps < stats.LEAST_STEPS:
        return f"{steps} steps are too few to tell whether their times had settled"
    return "the step times went on changing"


def graphs_compiled(spec: TrialSpec) -> int:
    """Return how many graphs torch.compile has made in this process so far."""
    if not compiles(spec.config):
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _cache_was_warm(spec: TrialSpec) -> bool | None:
    """Return whether inductor found all graphs of the first step in its cache; ``None`` if nothing was compiled.

    A cache that holds only other configurations' graphs is cold for this one, because its keys include the shapes.
    """
    if not compiles(spec.config):
        return None
    from torch._dynamo.utils import counters

    lookups = counters["inductor"]
    return bool(lookups["fxgraph_cache_hit"]) and not lookups["fxgraph_cache_miss"]


# The upper bounds of a configuration, measured separately: the device without a loader, and the loader alone.

#: Number of batches kept on the device, as long as they fit in this fraction of its memory.
RESIDENT = 4
RESIDENT_FRACTION = 0.05


def device_only(spec: TrialSpec, beats: Beats) -> Measurement:
    """Train under ``spec.config`` on batches that are already on the device. The loader is closed before measuring.

    Raises: as `measure`, except `Slow`.
    """
    launch = Measuring(spec, beats)
    feed = Feed(launch.loader)
    step = launch.build()
    step.exchanges = spec.exchanges
    resident = resident_of(launch, feed)
    launch.first_step(resident.next(), step)
    return launch.measurement(launch.run(resident, step), turn_s=None)


def loader_only(spec: TrialSpec, beats: Beats) -> Measurement:
    """Run the loader under ``spec.config`` as fast as it goes and discard its batches. No model is built.

    Raises: `Disturbed`, as `measure`.
    """
    # Other processes on the card and its temperature do not affect a loader.
    launch = Measuring(spec, beats, cards=False)
    feed = Feed(launch.loader)
    launch.wake()
    launch.first_step(feed.next(), None)
    loop = launch.run(feed, None)
    turn_s = median(feed.turns_s) if feed.turns_s else None
    return launch.measurement(loop, turn_s, feed.epoch_batches)


def resident_of(launch: Measuring, feed: Feed) -> Resident:
    """Copy a few batches, at least one, to the device, and close the loader."""
    channels_last = step_plan(launch.spec.config).channels_last
    room = RESIDENT_FRACTION * launch.memory.capacity_bytes
    batches: list[Any] = []
    for _ in range(min(RESIDENT, feed.epoch_batches or RESIDENT)):
        batch = feed.next().batch
        batches.append(move(batch, launch.device, non_blocking=False, channels_last=channels_last))
        room -= _bytes_of(batch)
        if room < _bytes_of(batch):
            break
    feed.close()
    return Resident(batches)


def _bytes_of(batch: Any) -> int:
    """Return the size of all tensors in a batch, including those nested in tuples, lists and dicts."""
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
