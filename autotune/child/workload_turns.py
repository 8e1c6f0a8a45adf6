"""The turns of a heat: configurations of a workload in one process. Those of a script: `script_turns`."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import random
from typing import Any

import torch

from autotune.base.errors import UsageError
from autotune.base.records import Heat, HeatPlan, Phase, TrialSpec, TrialStatus, Turn
from autotune.child.failure import Disturbed, classify
from autotune.child.launch import Beats, Launch, order_seed
from autotune.child.loop import checked, mark
from autotune.child.windows import SurroundingsReader, reason_to_discard
from autotune.knobs import shares
from autotune.knobs.compile_mode import eager
from autotune.space import delivery_part, is_loaders, why_apart
from autotune.stats import LaunchNoise
from autotune.stats.racing import PRIORS, Contender, Rounds, Turns, is_contained
from autotune.training.feed import Feed, stopwatch
from autotune.training.step import (
    Step,
    Switch,
    as_found,
    build,
    data_of,
    first_batch,
    fixed,
    move,
    open_loader,
    samples_in,
    step_of,
)

# A heat in this process: an entrant that harms only itself is taken out; one that harms the process ends the heat.
#
# `autotune.stats.racing` defines how entrants race; `_DeviceTurns` and `_LoaderTurns` define what a turn is.


def unless_disturbed(turn: Turn, cores: int, busy_cores: float | None) -> Turn | None:
    """Return a turn, or ``None`` if other processes kept the machine too busy (see `reason_to_discard`)."""
    return turn if turn.around is None or reason_to_discard(turn.around, cores, busy_cores) is None else None


def workload_heat(spec: TrialSpec, plan: HeatPlan, beats: Beats) -> Heat:
    """Compare configurations that one training can be switched between, without a loader, or how fast the loader
    delivers under configurations that differ in its knobs alone.

    Raises: as `race`; and
        UsageError: a training cannot be switched between the entrants, or they differ in other knobs.
    """
    turns = (_DeviceTurns if plan.side == "device" else _LoaderTurns)(spec, plan, beats)
    return race(spec, plan, turns, beats)


def race(spec: TrialSpec, plan: HeatPlan, turns: Turns, beats: Beats) -> Heat:
    """Compare the entrants of a heat in rounds.

    Raises:
        Disturbed: other processes kept the machine too busy to measure.

    Whatever the reference raises is raised; what another entrant raises takes that one out of the heat if the others
    are unharmed (`is_contained`).
    """
    order = random.Random(order_seed(spec))
    heat = Rounds(plan, _Guarded(spec, plan, turns, beats), beats.clock, order).run(beats.began)
    if heat is None:
        raise Disturbed("other processes kept the machine too busy to compare anything")
    return heat


class _Guarded:
    """Takes turns, and charges errors to the entrant whose turn it is."""

    def __init__(self, spec: TrialSpec, plan: HeatPlan, turns: Turns, beats: Beats) -> None:
        self._spec, self._plan, self._turns, self._beats = spec, plan, turns, beats
        #: Entrants in which something has refused a knob's value.
        self._refused: list[Contender] = []

    @property
    def prior(self) -> LaunchNoise:
        return self._turns.prior

    @property
    def switch_s(self) -> float:
        return self._turns.switch_s

    def take(self, entrant: Contender) -> Turn | None:
        leader = os.getpid()
        refused = next((other for other in self._refused if shares(other.refuses, other.config, entrant.config)), None)
        if refused is not None:
            # A value that is refused is refused whatever the other knobs are.
            entrant.phase, entrant.status, entrant.cause = refused.phase, refused.status, refused.cause
            entrant.refuses = refused.refuses
            return None
        self._beats.turn(entrant.number)
        try:
            return self._turns.take(entrant)
        except BaseException as error:
            if os.getpid() != leader or entrant.number == 0:
                raise
            spec = self._spec.model_copy(update={"config": dict(entrant.config)})
            verdict = classify(error, spec)
            # A script that has ended cannot go on with another entrant.
            if spec.command is not None or not is_contained(self._plan.side, spec.devices[0], verdict.status):
                raise
            entrant.phase = self._beats.phase
            entrant.status, entrant.cause, entrant.advice = verdict.status, verdict.cause, verdict.advice
            entrant.cannot_compile, entrant.refuses = verdict.cannot_compile, verdict.refuses
            if verdict.refuses is not None and not shares(verdict.refuses, entrant.config, self._plan.entrants[0]):
                self._refused.append(entrant)
            return None

    def leave(self, entrant: Contender) -> None:
        self._turns.leave(entrant)


# Turns on the device: entrants train on resident batches, with one set of weights.

#: Counted steps of a turn. On shared CPU cores the noise lasts for seconds, so a second step adds little to the first,
#: and short turns cancel more of the noise.
LEAST_STEPS = 1
#: On a CPU, the first step of a turn counts if steps take this long.
SETTLED_S = 0.2


class _DeviceTurns:
    def __init__(self, spec: TrialSpec, plan: HeatPlan, beats: Beats) -> None:
        for other in plan.entrants[1:]:
            why = why_apart(plan.entrants[0], other)
            if why is not None:
                raise UsageError(f"these configurations cannot be compared in one process: {why}")
        self.around = SurroundingsReader.of(spec, beats.clock)
        self.launch = launch = Launch(spec, beats, fixed(spec.config))
        self.spec, self.plan, self.beats, self.clock = spec, plan, beats, beats.clock
        self.contexts = [dataclasses.replace(launch.ctx, batch_size=int(c["batch_size"])) for c in plan.entrants]
        self.device = launch.device
        self.cuda = launch.device.type == "cuda"
        self.prior = PRIORS[self.device.type]
        self.switch_s = 0.0
        self._steps: dict[int, Step] = {}
        self._settled = False
        batches = self._batches()
        launch.wake()
        self.batches = {b: move(x, self.device, non_blocking=False, channels_last=0) for b, x in batches.items()}
        # The workload decides how its model is built; each entrant's own settings are switched on when its turn comes.
        self.built = build(launch.workload, launch.ctx, eager(plan.entrants[0]))
        # The workload's own code may have allowed TF32, for example, which then holds in each entrant's trial as well.
        self.switch = Switch(self.built.model, self.built.optimizer, as_found())
        # Steps are to leave the weights as they are. The kernels are the same.
        for group in self.built.optimizer.param_groups:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].zero_()
            elif "lr" in group:
                group["lr"] = 0.0

    def _batches(self) -> dict[int, Any]:
        """Return one batch of each size, made in this process in the way that the workload's loader makes them."""
        batches = {}
        for ctx in self.contexts:
            size = ctx.batch_size
            if size not in batches:
                loader = open_loader(
                    self.launch.workload,
                    ctx,
                    {"batch_size": size},
                    worker_start_method=self.spec.worker_start_method,
                    order=self.launch.order,
                    seed=order_seed(self.spec),
                )
                batches[size] = first_batch(loader)
        return batches

    def leave(self, entrant: Contender) -> None:
        """Remove everything of an entrant, so that nothing is left to the others."""
        self._steps.pop(entrant.number, None)
        if entrant.status is TrialStatus.PRUNED:
            return
        if self.cuda:
            # With a corrupted CUDA context this raises, and no entrant can go on.
            torch.cuda.synchronize()
        self.built.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        if entrant.status is TrialStatus.DIVERGED:
            # Even a step of length 0 spoils the weights if the gradients are not finite.
            torch.manual_seed(self.launch.ctx.seed)
            fresh = self.launch.workload.model(self.launch.ctx).state_dict()
            self.built.model.load_state_dict(fresh)
            self.built.optimizer.state.clear()

    def _dressed(self, entrant: Contender) -> Step:
        """Switch to an entrant, and return its step."""
        began = self.clock.now()
        self.switch.to(entrant.config)
        self.switch_s += self.clock.now() - began
        self.launch.memory.begin_turn()
        if entrant.number not in self._steps:
            workload, ctx = self.launch.workload, self.contexts[entrant.number]
            step = step_of(workload, ctx, self.built.model, self.built.optimizer, entrant.config)
            self._steps[entrant.number] = step
        return self._steps[entrant.number]

    def take(self, entrant: Contender) -> Turn | None:
        """Take a turn of as many steps as fill `turn_s`, and at least one.

        An entrant's very first step is not counted, nor is the first step of a later turn, when the caches hold data of
        the last entrant. On a CPU a step of half a second takes 1.5 % longer then (ResNet-18, 96 px), and counting it
        is worth more than it costs; one of 50 ms takes three times as long (MobileNetV3). On CUDA the allocator's cache
        is empty, and no first step of a turn counts.
        """
        first = entrant.first_step_s is None
        self.beats.enter(Phase.COMPILE if first else Phase.MEASURE)
        step, ctx = self._dressed(entrant), self.contexts[entrant.number]
        batch = self.batches[ctx.batch_size]
        if first:
            entrant.first_step_s = self._seconds_of(step, batch)
            self.beats.enter(Phase.MEASURE)
            if not self._settled:
                self._settled = True
                self.around.settle_in()
            if self.cuda:
                # This makes the first turn as long as the others: `PRIORS` would expect too much of shorter ones.
                entrant.step_s = self._seconds_of(step, batch)
                # Kernels were tried in the first step, with workspaces that no later step needs.
                self.launch.memory.begin_turn()
        elif not self.cuda and entrant.step_s < SETTLED_S:
            checked(step(batch))
        wanted = math.ceil(self.plan.turn_s / entrant.step_s) if entrant.step_s > 0 else LEAST_STEPS
        count = max(LEAST_STEPS, wanted)
        self.around.begin()
        if self.cuda:
            # This step fills the allocator, and is not waited for: the device is at work when timing begins.
            step(batch)
        start = self._mark()
        for _ in range(count):
            loss = step(batch)
        end = self._mark()
        # Read before waiting for anything: nothing holds down the clocks of an idle card.
        at_work = self.around.at_work()
        checked(loss)
        seconds = start.elapsed_time(end) / 1e3 if self.cuda else end - start
        around = self.around.read()[0].model_copy(update=at_work)
        entrant.step_s = seconds / count
        memory = self.launch.memory
        entrant.peak_bytes = max(entrant.peak_bytes or 0, memory.peak_reserved_bytes or memory.peak_bytes)
        samples = count * samples_in(self.launch.workload, ctx, batch)
        self.beats.step(len(entrant.turns) + 2, rate_per_s=samples / seconds)
        turn = Turn(steps=count, samples=samples, seconds=seconds, around=around)
        return unless_disturbed(turn, self.around.cores, self.spec.plan.busy_cores)

    def _seconds_of(self, step: Step, batch: Any) -> float:
        """Take a step, wait for it, and return how long that took."""
        began = self.clock.now()
        checked(step(batch))
        return self.clock.now() - began

    def _mark(self) -> Any:
        return mark() if self.cuda else self.clock.now()


# Turns of the loader: each opens a loader, waits for its workers, and counts the batches that follow. Nothing trains.


class _LoaderTurns:
    def __init__(self, spec: TrialSpec, plan: HeatPlan, beats: Beats) -> None:
        reference = plan.entrants[0]
        for other in plan.entrants[1:]:
            names = [n for n in reference.keys() | other.keys() if reference.get(n) != other.get(n)]
            if not all(is_loaders(n) for n in names):
                raise UsageError("these configurations differ in more than their loaders")
        # Other processes on the card and its temperature do not affect a loader.
        self.around = SurroundingsReader((), beats.clock)
        self.launch = Launch(spec, beats)
        self.spec, self.plan, self.beats, self.clock = spec, plan, beats, beats.clock
        # The host makes the batches, whatever device they are for.
        self.prior = PRIORS["cpu"]
        self.data = data_of(self.launch.workload, self.launch.ctx)
        #: Seconds spent on opening and closing loaders, and on waiting for the first batch of each worker.
        self.switch_s = 0.0
        self._taken = 0

    def take(self, entrant: Contender) -> Turn | None:
        """Take a turn of at least `turn_s` seconds, in which each worker makes the same number of batches.

        Each turn continues with the samples after those of the last one. If all turns had the same samples, the files
        that one has read would be in the page cache for the next.
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
        # Workers that run in parallel finish together: a count that is not a multiple of their number leaves the rate
        # to luck.
        while count % max(1, feed.workers) or now - began < self.plan.turn_s:
            batch = feed.next().batch
            count += 1
            samples += samples_in(self.launch.workload, self.launch.ctx, batch)
            now = self.clock.now()
            # Early rates reflect only the first burst.
            early = now - began < self.plan.turn_s / 2
            self.beats.step(count, rate_per_s=None if early else samples / (now - began))
        around, _ = self.around.read()
        feed.close()
        self.switch_s += self.clock.now() - now
        seconds = now - began
        entrant.step_s = seconds / count
        turn = Turn(steps=count, samples=samples, seconds=seconds, around=around)
        return unless_disturbed(turn, self.around.cores, self.spec.plan.busy_cores)

    def leave(self, entrant: Contender) -> None:
        """Do nothing: an entrant's loader was closed at the end of its turn."""
