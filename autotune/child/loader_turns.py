"""Turns of the loader: each opens one, waits for its workers, and counts the batches that follow. Nothing trains."""

from __future__ import annotations

from autotune.child.beats import Beats
from autotune.child.heat import race
from autotune.child.launch import Launch, order_seed
from autotune.child.surroundings import Watcher, reason_to_discard
from autotune.base.clock import Clock
from autotune.base.errors import UsageError
from autotune.training.feed import Feed
from autotune.stats.racing import PRIORS, Contender
from autotune.base.records import Heat, HeatPlan, Phase, TrialSpec, Turn
from autotune.space import delivery_part, is_loaders
from autotune.training.stopwatch import stopwatch
from autotune.training.step import data_of, open_loader, samples_in


def loader_heat(spec: TrialSpec, plan: HeatPlan, beats: Beats, clock: Clock, began: float) -> Heat:
    """Compare how fast the loader delivers under configurations that differ in its knobs alone.

    Args:
        began: `clock` reading at the start of the launch; start-up time is counted from it.

    Raises:
        UsageError: the entrants differ in other knobs.
        Disturbed: other processes kept the machine too busy to measure.

    Whatever an entrant raises is raised: PyTorch goes on raising for the workers of one that has died.
    """
    turns = _LoaderTurns(spec, plan, beats, clock)
    return race(spec, plan, turns, beats, clock, began)


class _LoaderTurns:
    def __init__(self, spec: TrialSpec, plan: HeatPlan, beats: Beats, clock: Clock) -> None:
        reference = plan.entrants[0]
        for other in plan.entrants[1:]:
            names = [n for n in reference.keys() | other.keys() if reference.get(n) != other.get(n)]
            if not all(is_loaders(n) for n in names):
                raise UsageError("these configurations differ in more than their loaders")
        # Other processes on the card and its temperature do not affect a loader.
        self.around = Watcher((), clock)
        self.launch = Launch(spec, beats)
        self.spec, self.plan, self.beats, self.clock = spec, plan, beats, clock
        # The host makes the batches, whatever they are for.
        self.prior = PRIORS["cpu"]
        self.data = data_of(self.launch.workload, self.launch.ctx)
        #: Seconds of opening and closing loaders, and of waiting for the first batch of each worker.
        self.switch_s = 0.0
        self._taken = 0

    def take(self, entrant: Contender) -> Turn | None:
        """Take a turn of at least `turn_s` seconds, in which each worker makes equally many batches.

        Each turn goes on with the samples after those of the last one. If all had the same, the files that one has read
        would be in the page cache for the next one.
        """
        self.beats.enter(Phase.WARMUP)
        opened = self.clock.now()
        self._taken += 1
        loader = open_loader(
            self.launch.workload,
            self.launch.ctx,
            delivery_part(entrant.config),
            data=self.data,
            worker_start_method=self.spec.worker_start_method,
            order=self.launch.order,
            seed=order_seed(self.spec) + self._taken,
            wrap=stopwatch,
        )
        feed = Feed(loader)
        # An error ends the launch, and with it the workers.
        # Batches are taken as soon as they are made, so that no queue builds up: once each worker has delivered,
        # the rate is that of all of them.
        for number in range(max(1, feed.workers)):
            feed.next()
            self.beats.step(number + 1)
        self.beats.enter(Phase.MEASURE)
        self.around.begin()
        began = now = self.clock.now()
        self.switch_s += began - opened
        count = samples = 0
        # Workers that run side by side finish side by side: a count that is no multiple of theirs is of luck.
        while count % max(1, feed.workers) or now - began < self.plan.turn_s:
            batch = feed.next().batch
            count += 1
            samples += samples_in(self.launch.workload, self.launch.ctx, batch)
            now = self.clock.now()
            # Early rates are those of the first burst.
            early = now - began < self.plan.turn_s / 2
            self.beats.step(count, rate_per_s=None if early else samples / (now - began))
        around, _ = self.around.read()
        feed.close()
        self.switch_s += self.clock.now() - now
        seconds = now - began
        entrant.step_s = seconds / count
        turn = Turn(steps=count, samples=samples, seconds=seconds, around=around)
        quiet = reason_to_discard(around, self.around.cores, self.spec.plan.busy_cores) is None
        return turn if quiet else None

    def leave(self, entrant: Contender) -> None:
        """Nothing is left of an entrant: its loader was closed at the end of its turn."""
