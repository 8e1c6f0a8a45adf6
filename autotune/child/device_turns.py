"""Turns on the device: entrants train on resident batches, with one set of weights."""

from __future__ import annotations

import dataclasses
import gc
import math
from typing import Any

import torch

from autotune.training.batches import move
from autotune.child.beats import Beats
from autotune.child.heat import race
from autotune.child.launch import Launch, order_seed
from autotune.child.loop import checked
from autotune.child.surroundings import Watcher, cards_of, reason_to_discard
from autotune.base.clock import Clock
from autotune.base.errors import UsageError
from autotune.knobs.compile_mode import eager
from autotune.stats.racing import PRIORS, Contender
from autotune.base.records import Heat, HeatPlan, Phase, TrialSpec, TrialStatus, Turn
from autotune.space import why_apart
from autotune.training.switching import Switch, as_found, fixed
from autotune.training.step import Step, build, first_batch, open_loader, samples_in, step_of

#: Counted steps of a turn. On shared CPU cores the noise lasts for seconds, so that a second step tells little that the
#: first did not, and short turns cancel more of it.
LEAST_STEPS = 1
#: On a CPU, the first step of a turn counts if steps take this long.
SETTLED_S = 0.2


def device_heat(spec: TrialSpec, plan: HeatPlan, beats: Beats, clock: Clock, began: float) -> Heat:
    """Compare configurations that one training can be switched between, without a loader.

    Args:
        began: `clock` reading at the start of the launch; start-up time is counted from it.

    Raises:
        UsageError: a training cannot be switched between the entrants.
        Disturbed: other processes kept the machine too busy to measure.

    Whatever the reference raises is raised; what another entrant raises takes that one out of the heat.
    """
    turns = _DeviceTurns(spec, plan, beats, clock)
    return race(spec, plan, turns, beats, clock, began)


class _DeviceTurns:
    def __init__(self, spec: TrialSpec, plan: HeatPlan, beats: Beats, clock: Clock) -> None:
        for other in plan.entrants[1:]:
            why = why_apart(plan.entrants[0], other)
            if why is not None:
                raise UsageError(f"these configurations cannot be compared in one process: {why}")
        self.around = Watcher(cards_of(spec), clock)
        self.launch = launch = Launch(spec, beats, fixed(spec.config))
        self.spec, self.plan, self.beats, self.clock = spec, plan, beats, clock
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
        # The workload's own code may have allowed TF32, say, which is then in force in each entrant's trial, too.
        self.switch = Switch(self.built.model, self.built.optimizer, as_found())
        self._keep_weights()

    def _batches(self) -> dict[int, Any]:
        """Return one batch of each size, made in this process as the workload's loader makes them."""
        found = {}
        for ctx in self.contexts:
            size = ctx.batch_size
            if size not in found:
                loader = open_loader(
                    self.launch.workload,
                    ctx,
                    {"batch_size": size},
                    worker_start_method=self.spec.worker_start_method,
                    order=self.launch.order,
                    seed=order_seed(self.spec),
                )
                found[size] = first_batch(loader)
        return found

    def _keep_weights(self) -> None:
        """Make steps leave the weights as they are. The kernels are the same."""
        for group in self.built.optimizer.param_groups:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].zero_()
            elif "lr" in group:
                group["lr"] = 0.0

    def leave(self, entrant: Contender) -> None:
        """Leave nothing of an entrant to the others."""
        self._steps.pop(entrant.number, None)
        if entrant.status is TrialStatus.PRUNED:
            return
        if self.cuda:
            # With a corrupted CUDA context this raises, and nobody can go on.
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
        """Take a turn of as many steps as last `turn_s`, and at least one.

        An entrant's very first step is not counted, and no first step of a turn after it: caches are those of the last
        entrant. On a CPU a step of half a second takes 1.5 % longer then (ResNet-18, 96 px), and counting it is worth
        more than it costs; one of 50 ms takes three times as long (MobileNetV3). On CUDA the allocator's cache is
        empty, and no first step of a turn counts.
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
                # So that the first turn is as long as the others: of shorter ones, `PRIORS` expect too much.
                entrant.step_s = self._seconds_of(step, batch)
                # Kernels were tried in the first step, with workspaces that no later step needs.
                self.launch.memory.begin_turn()
        elif not self.cuda and entrant.step_s < SETTLED_S:
            checked(step(batch))
        wanted = math.ceil(self.plan.turn_s / entrant.step_s) if entrant.step_s > 0 else LEAST_STEPS
        count = max(LEAST_STEPS, wanted)
        self.around.begin()
        if self.cuda:
            # It fills the allocator, and is not waited for: the device is at work when the time begins.
            step(batch)
        start = self._mark()
        for _ in range(count):
            loss = step(batch)
        end = self._mark()
        # Before anything is waited for: an idle card's clocks are held down by nothing.
        at_work = self.around.at_work()
        checked(loss)
        seconds = start.elapsed_time(end) / 1e3 if self.cuda else end - start
        around = self.around.read()[0].model_copy(update=at_work)
        entrant.step_s = seconds / count
        memory = self.launch.memory
        entrant.peak_bytes = max(entrant.peak_bytes or 0, memory.peak_reserved_bytes or memory.peak_bytes)
        samples = count * samples_in(self.launch.workload, ctx, batch)
        self.beats.step(len(entrant.turns) + 2, rate_per_s=samples / seconds)
        cores, busy = self.around.cores, self.spec.plan.busy_cores
        quiet = reason_to_discard(around, cores, busy) is None
        turn = Turn(steps=count, samples=samples, seconds=seconds, around=around)
        return turn if quiet else None

    def _seconds_of(self, step: Step, batch: Any) -> float:
        """Take a step, wait for it, and return how long that took."""
        began = self.clock.now()
        checked(step(batch))
        return self.clock.now() - began

    def _mark(self) -> Any:
        if not self.cuda:
            return self.clock.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
