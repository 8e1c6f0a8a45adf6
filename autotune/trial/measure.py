"""The measuring loop: a plain training loop with a stopwatch beside it.

What it may cost the training: two clock readings and, on CUDA, two events per step; one wait for the device per
window. Nothing else happens between steps, so a plain loop at the same settings runs at the same rate.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from autotune import stats
from autotune import workload as contract
from autotune.clock import Clock
from autotune.errors import WorkloadError
from autotune.host import tree_memory_bytes
from autotune.records import Measurement, MeasurePlan, Phase, TrialSpec, Window
from autotune.training import Step, build, open_loader, process, samples_in
from autotune.trial import system
from autotune.trial.beats import Beats
from autotune.trial.failure import Diverged, Slow
from autotune.trial.feed import Delivery, Feed, stopwatch
from autotune.trial.probe import context, torch_device

#: With fewer windows than this an interval says nothing, so slow steps get more time than planned.
LEAST_WINDOWS = 3
#: An epoch's turn that takes longer than this is timed by force only where it could move the rate by more than
#: this fraction; else it stays unknown.
TURN_AFFORDABLE_S = 2.0
TURN_MATTERS = 1e-3
#: A step "waited" when the loader took more than this fraction of it.
WAITED = 0.05


def measure(spec: TrialSpec, beats: Beats, clock: Clock, began: float) -> Measurement:
    """Train under ``spec.config`` and measure, phase by phase.

    Args:
        began: `clock` reading at the launch's begin; start-up is counted from it.

    Raises:
        Slow: the first measured steps were below the plan's threshold.
        Diverged: a loss was not finite.
    """
    process(spec.config)
    beats.enter(Phase.LOAD)
    device = torch_device(spec)
    workload = contract.load(spec.workload)
    ctx = context(spec, workload, device)
    loader = open_loader(workload, ctx, spec.config, worker_start_method=spec.worker_start_method, wrap=stopwatch)
    if len(loader) == 0:
        raise WorkloadError(f"the data set does not fill one batch of {ctx.batch_size}")
    start_rss = system.status_bytes("VmRSS")
    # As in a plain loop, the workers are started before the device wakes.
    feed = Feed(loader)
    beats.enter(Phase.BUILD)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit_memory(spec, device)
    step = build(workload, ctx, spec.config)
    beats.memory_bytes = lambda: memory_now(device, start_rss)

    delivery = feed.next()
    samples = samples_in(workload, ctx, delivery.batch)
    startup_s = clock.now() - began
    beats.enter(Phase.COMPILE)
    compile_began = clock.now()
    first_loss = _checked(step(delivery.batch))
    compile_s = clock.now() - compile_began
    cache_warm = _cache_was_warm(spec)
    beats.step(1, loss=first_loss)

    run = _Run(spec.plan, step, feed, beats, device, lambda batch: samples_in(workload, ctx, batch))
    beats.enter(Phase.WARMUP)
    warmup_began = clock.now()
    settled = run.warm_up()
    warmup_s = clock.now() - warmup_began
    beats.enter(Phase.MEASURE)
    run.measure()

    steady = stats.rate_of(run.windows)
    epoch = len(loader) * samples
    turn = _epoch_turn(feed, median(run.wait_s), epoch / steady.per_s)
    rate = stats.with_epoch_turn(steady, turn, epoch)
    capacity = max(1, loader.num_workers) * samples / mean(run.made_s) if run.made_s else None
    cuda = device.type == "cuda"
    return Measurement(
        batch_size=ctx.batch_size,
        samples_per_s=rate.per_s,
        ci95_per_s=(rate.low_per_s, rate.high_per_s),
        steady_per_s=steady.per_s,
        windows=tuple(run.windows),
        step_s=tuple(run.step_s),
        wait_s=tuple(run.wait_s),
        device_s=tuple(run.device_s),
        loader_capacity_per_s=capacity,
        losses=tuple(run.losses),
        first_losses=(first_loss, *run.warmup_losses),
        settled=settled,
        startup_s=startup_s,
        compile_s=compile_s,
        compile_cache_warm=cache_warm,
        warmup_s=warmup_s,
        measured_s=sum(w.seconds for w in run.windows),
        loader_wait_fraction=sum(run.wait_s) / sum(run.step_s),
        epoch_turn_s=turn,
        epoch_samples=epoch,
        peak_allocated_bytes=(
            torch.cuda.max_memory_allocated(device) if cuda else max(0, system.status_bytes("VmHWM") - start_rss)
        ),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device) if cuda else None,
        # One reading, now that nothing is timed any more: it walks the whole tree's page tables.
        host_memory_bytes=tree_memory_bytes(os.getpid()),
    )


def limit_memory(spec: TrialSpec, device: torch.device) -> None:
    """Make the spec's memory limit real on this device."""
    if spec.memory_limit_bytes is None:
        return
    if device.type == "cpu":
        system.limit_data(spec.memory_limit_bytes)
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, spec.memory_limit_bytes / total), device)


def memory_now(device: torch.device, start_rss: int) -> int:
    """Peak device memory so far."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return max(0, system.status_bytes("VmHWM") - start_rss)


def _checked(loss: torch.Tensor) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise Diverged(f"the loss became {value}")
    return value


def _cache_was_warm(spec: TrialSpec) -> bool | None:
    """Whether inductor found all graphs of the first step in its cache; ``None`` where nothing was compiled.

    A cache with other configurations' graphs in it is cold for this one: keys include the shapes.
    """
    if spec.config.get("compile_mode", "off") == "off":
        return None
    from torch._dynamo.utils import counters

    seen = counters["inductor"]
    return bool(seen["fxgraph_cache_hit"]) and not seen["fxgraph_cache_miss"]


def _epoch_turn(feed: Feed, usual_wait_s: float, epoch_s: float) -> float | None:
    """The extra seconds of an epoch's turn, seen or forced; ``None`` where they are not worth knowing."""
    if feed.turns_s:
        # The windows left the wait for an epoch's first batch out, so all of it is the turn's.
        return median(feed.turns_s)
    # The very first batch took a whole start of the workers and a whole batch's making: a turn takes no longer
    # than that. Where so much would not show in an epoch's time, it is not worth a long wait to know it better.
    bound = feed.first_batch_s or 0.0
    if bound > TURN_AFFORDABLE_S and bound < TURN_MATTERS * epoch_s:
        return None
    feed.force_turn()
    return max(0.0, median(feed.turns_s) - usual_wait_s)


@dataclass(frozen=True)
class _Taken:
    """One step taken inside the window that is open. ``start`` and ``end`` are CUDA events."""

    loss: torch.Tensor
    wait_s: float
    made_s: float
    host_s: float
    samples: int
    start: Any
    end: Any


class _Run:
    """The steps of one launch, from the second on, and what was noted beside them."""

    def __init__(
        self, plan: MeasurePlan, step: Step, feed: Feed, beats: Beats, device: torch.device, count: Callable[[Any], int]
    ) -> None:
        self.plan = plan
        self.step = step
        self.feed = feed
        self.beats = beats
        self.cuda = device.type == "cuda"
        self.count = count
        self.windows: list[Window] = []
        self.step_s: list[float] = []
        self.wait_s: list[float] = []
        self.device_s: list[float] = []
        self.made_s: list[float] = []
        self.losses: list[float] = []
        self.warmup_losses: list[float] = []
        self._number = 1

    def warm_up(self) -> bool:
        """Take steps until the loader's head start no longer shows; returns whether that was reached.

        While compiling and starting up, the workers fill their queue. Steps that draw on it run at the device's rate
        even where the loader is slower. The head start is over when the loop has to wait for a batch, or all
        batches of a full queue are used up; and it does not matter where the workers are faster than the device.
        """
        plan, loader = self.plan, self.feed.loader
        queue = loader.num_workers * (loader.prefetch_factor or 0)
        deadline = time.monotonic() + plan.max_warmup_s
        recent: deque[bool] = deque(maxlen=3)
        made: deque[float] = deque(maxlen=8)
        taken = 0
        while True:
            began = time.monotonic()
            delivery = self.feed.next()
            loss = self.step(delivery.batch)
            self.warmup_losses.append(_checked(loss))  # waits for the device, as a window's end does
            seconds = time.monotonic() - began
            taken += 1
            self._number += 1
            self.beats.step(self._number, loss=self.warmup_losses[-1])
            # Taking a ready batch out of the queue can be most of a fast step: that is no sign of a slow loader.
            recent.append(not delivery.ready and delivery.wait_s > WAITED * seconds)
            made.append(delivery.made_s)
            if taken < plan.warmup_steps:
                continue
            drained = taken >= queue or sum(recent) >= 2
            # Batches made while nothing was consumed were made with less competition for the cores, so a
            # loader only just faster than the device is not trusted.
            keeps_up = loader.num_workers / mean(made) > 1.5 / seconds if loader.num_workers else True
            if drained or keeps_up:
                return True
            if time.monotonic() > deadline:
                return False

    def measure(self) -> None:
        """Fill windows until the interval is narrow enough or the time is up."""
        plan = self.plan
        judged = plan.prune_below_per_s <= 0
        measure_began = window_began = time.monotonic()
        taken: list[_Taken] = []
        while True:
            # Windows never span an epoch's end: this one ends before it, the next begins behind it.
            turning = self.feed.epoch_over
            enough_to_judge = not judged and len(self.step_s) + len(taken) >= plan.prune_after_steps
            full = time.monotonic() - window_began >= plan.min_window_s
            if taken and (turning or full or enough_to_judge):
                window_began = self._close_window(taken, window_began)
                if enough_to_judge:
                    judged = True
                    rate = self._rate_so_far()
                    if rate is not None and rate < plan.prune_below_per_s:
                        raise Slow(rate)
                if self._enough(window_began - measure_began):
                    return
            delivery = self.feed.next()
            if turning:
                window_began = time.monotonic()
                delivery = dataclasses.replace(delivery, wait_s=0.0)
            taken.append(self._take(delivery))
            del delivery  # a window's worth of batches would pile up in memory

    def _take(self, delivery: Delivery) -> _Taken:
        samples = self.count(delivery.batch)
        got = time.monotonic()
        start = self._mark()
        loss = self.step(delivery.batch)
        end = self._mark()
        done = time.monotonic()
        self._number += 1
        self.beats.step(self._number, rate_per_s=self._rate_so_far())
        return _Taken(loss, delivery.wait_s, delivery.made_s, done - got, samples, start, end)

    def _mark(self) -> Any:
        """A moment on the device's own clock, or ``None`` on a CPU."""
        if not self.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _close_window(self, taken: list[_Taken], began: float) -> float:
        """Wait for the device, book the window's steps, and return when it ended."""
        if self.cuda:
            torch.cuda.synchronize()
        ended = time.monotonic()
        if not taken:
            return ended
        previous: Any = None
        for t in taken:
            device_s = t.start.elapsed_time(t.end) / 1e3 if self.cuda else t.host_s
            # The host runs ahead of a GPU: a step lasts from one end to the next on the device's clock.
            ahead = self.cuda and previous is not None
            self.step_s.append(previous.elapsed_time(t.end) / 1e3 if ahead else device_s + t.wait_s)
            self.device_s.append(device_s)
            # A GPU that still has work while the host waits is not kept waiting.
            idle_s = max(0.0, previous.elapsed_time(t.start) / 1e3) if ahead else t.wait_s
            self.wait_s.append(min(t.wait_s, idle_s))
            self.made_s.append(t.made_s)
            self.losses.append(_checked(t.loss))
            previous = t.end
        self.windows.append(Window(steps=len(taken), samples=sum(t.samples for t in taken), seconds=ended - began))
        taken.clear()
        return time.monotonic()

    def _rate_so_far(self) -> float | None:
        seconds = sum(w.seconds for w in self.windows)
        return sum(w.samples for w in self.windows) / seconds if seconds else None

    def _enough(self, elapsed_s: float) -> bool:
        plan = self.plan
        if elapsed_s >= plan.max_measure_s and len(self.windows) >= LEAST_WINDOWS:
            return True
        if len(self.windows) < plan.min_windows or elapsed_s < plan.min_measure_s:
            return False
        return stats.rate_of(self.windows).halfwidth <= plan.target_halfwidth
