"""A measure launch, phase by phase: train under a configuration and measure it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

from autotune import stats
from autotune.child.beats import Beats
from autotune.child.failure import Slow
from autotune.child.launch import Launch
from autotune.child.loop import Loop, Work, checked
from autotune.child.surroundings import Watcher, cards_of, processors_of
from autotune.child.windows import Timed
from autotune.base.clock import Clock
from autotune.training.feed import Delivery, Feed, Source, epoch_turn_s, length_of, workers_and_queue
from autotune.knobs.compile_mode import compiles
from autotune.machine.host import tree_memory_bytes
from autotune.base.records import Measurement, Phase, TrialSpec
from autotune.training.stopwatch import stopwatch
from autotune.training.step import Step, build, samples_in


def measure(spec: TrialSpec, beats: Beats, clock: Clock, began: float) -> Measurement:
    """Train under ``spec.config`` and measure.

    Args:
        began: `clock` reading at the start of the launch; start-up time is counted from it.

    Raises:
        Slow: the rate is certainly below the plan's threshold.
        Disturbed: other processes kept the machine too busy to measure.
        Diverged: a loss was not finite.
    """
    launch = Measuring(spec, beats, clock, began)
    # As in a plain loop, start the workers before initializing the device.
    feed = Feed(launch.loader)
    step = launch.build()
    started = launch.first_step(feed.next(), step)
    loop = launch.run(feed, step)
    windows = loop.windows
    if windows.slow:
        # A single window gives no estimate of its error.
        turn_s = median(feed.turns_s) if feed.turns_s else None
        found = launch.measurement(loop, started, turn_s) if len(windows.kept) > 1 else None
        raise Slow(windows.rate.per_s, found)
    waits_s = median(step.wait_s for block in windows.kept for step in block.steps)
    batches = feed.epoch_batches
    epoch_s = None if batches is None else batches * started.samples / windows.rate.per_s
    if spec.ranks > 1 and not feed.turns_s:
        # A turn that is forced here the other ranks would wait for, instead of starting workers, too.
        return launch.measurement(loop, started, None, feed.epoch_batches)
    return launch.measurement(loop, started, epoch_turn_s(feed, waits_s, epoch_s), feed.epoch_batches)


@dataclass(frozen=True)
class Started:
    """A launch up to and including its first step.

    Attributes:
        samples: in the first batch. startup_s, compile_s: see `Measurement`.
        cache_warm: inductor's cache held every graph; ``None`` if nothing was compiled.
        losses: of the first step, if there was one.
    """

    samples: int
    startup_s: float
    compile_s: float
    cache_warm: bool | None
    losses: tuple[float, ...]


class Measuring(Launch):
    """A launch that measures, with the phases that all of these share.

    Args:
        began: `clock` reading at the start of the launch; start-up time is counted from it.
        cards: whether to watch the cards of all ranks, if there are any.

    Raises:
        WorkloadError: the data set does not fill one batch.
    """

    def __init__(self, spec: TrialSpec, beats: Beats, clock: Clock, began: float, *, cards: bool = True) -> None:
        # Before CUDA is initialized, so that processes already on the card can be told from this one.
        # The other ranks are children of the leader, too.
        self.root = os.getppid() if spec.ranks > 1 else os.getpid()
        self.around = Watcher(cards_of(spec) if cards else (), clock, processors_of(spec), root=self.root)
        super().__init__(spec, beats)
        self.clock = clock
        self.began = began
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
        self.learning_rate = learning_rate_of(step.optimizer)
        return step

    def first_step(self, delivery: Delivery, work: Work | None) -> Started:
        """Run the compile phase: the first step, or only the first batch if `work` is ``None``."""
        samples = self.count(delivery.batch)
        startup_s = self.clock.now() - self.began
        self.beats.enter(Phase.COMPILE)
        if work is None:
            return Started(samples, startup_s, 0.0, None, ())
        began = self.clock.now()
        loss = checked(work(delivery.batch))
        compile_s = self.clock.now() - began
        self.memory.first_step_over()
        self.around.settle_in()
        self.beats.step(1, loss=loss)
        self.graphs = graphs_compiled(self.spec)
        return Started(samples, startup_s, compile_s, _cache_was_warm(self.spec), (loss,))

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

    def measurement(
        self, loop: Loop, started: Started, turn_s: float | None, epoch_batches: int | None = None
    ) -> Measurement:
        """Put the results of the launch together.

        Args:
            turn_s: extra seconds of an epoch turn; ``None`` if unknown.
            epoch_batches: what was seen of an epoch's length, if the loader does not know it.
        """
        windows = loop.windows
        kept = windows.kept
        steps = [step for block in kept for step in block.steps]
        steady = windows.rate
        # 0 stands for an epoch of unknown length.
        epoch = (length_of(self.loader) or epoch_batches or 0) * started.samples
        rate = stats.with_epoch_turn(steady, turn_s if epoch else None, epoch)
        workers, _ = workers_and_queue(self.loader)
        made_s = fmean(step.made_s for step in steps)
        device_s = fmean(step.device_s for step in steps)
        cut = [step for block in windows.cut for step in block.steps]
        return Measurement(
            batch_size=self.ctx.batch_size,
            ranks=self.spec.ranks,
            samples_per_s=rate.per_s,
            ci95_per_s=(rate.low_per_s, rate.high_per_s),
            steady_per_s=steady.per_s,
            windows=tuple(block.window for block in kept),
            step_s=tuple(step.step_s for step in steps),
            wait_s=tuple(step.wait_s for step in steps),
            device_s=tuple(step.device_s for step in steps),
            loader_capacity_per_s=max(1, workers) * started.samples / made_s if made_s else None,
            loader_idle_fraction=max(0.0, loop.idle_s / loop.made_s) if loop.made_s else None,
            device_per_s=started.samples / device_s if device_s else None,
            learning_rate=self.learning_rate,
            losses=_losses(steps),
            first_losses=(*started.losses, *loop.warmup_losses, *_losses(cut)),
            settled=loop.drained and not loop.too_long and windows.settled and not self.late_graphs,
            unsettled=_recompiling(self.late_graphs) or _unsettled(loop, len(cut) + len(steps)),
            warmup_steps=1 + loop.warmup_steps + len(cut),
            relative_se=rate.relative_se,
            degrees=rate.degrees,
            autocorrelation=stats.autocorrelation([block.window for block in kept]),
            discarded=tuple(windows.discarded),
            page_cache=self.spec.data.page_cache,
            energy_j=windows.energy_j,
            sm_clock_mhz=windows.clock_mhz,
            alloc_retries=self.memory.alloc_retries,
            enqueue_s=loop.enqueue_s,
            startup_s=started.startup_s,
            compile_s=started.compile_s,
            compile_cache_warm=started.cache_warm,
            recompiles=graphs_compiled(self.spec) - self.graphs if compiles(self.spec.config) else None,
            warmup_s=loop.warmup_s + sum(block.window.seconds for block in windows.cut),
            measured_s=sum(block.window.seconds for block in kept),
            loader_wait_fraction=sum(step.wait_s for step in steps) / sum(step.step_s for step in steps),
            epoch_turn_s=turn_s,
            epoch_samples=epoch,
            peak_allocated_bytes=self.memory.peak_bytes,
            peak_reserved_bytes=self.memory.peak_reserved_bytes,
            # Read once, after timing has ended, because it walks the page tables of the whole process tree.
            host_memory_bytes=tree_memory_bytes(self.root),
        )


def learning_rate_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the learning rate of an optimizer's first group; ``None`` if it has none."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def _losses(steps: Iterable[Timed]) -> tuple[float, ...]:
    return tuple(step.loss for step in steps if step.loss is not None)


def _recompiling(graphs: int) -> str | None:
    if not graphs:
        return None
    times = "once" if graphs == 1 else f"{graphs} times"
    return f"the model was compiled again {times} while it was measured: its inputs go on changing"


def _unsettled(loop: Loop, steps: int) -> str | None:
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

    seen = counters["inductor"]
    return bool(seen["fxgraph_cache_hit"]) and not seen["fxgraph_cache_miss"]
