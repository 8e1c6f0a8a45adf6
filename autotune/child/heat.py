"""A heat: several configurations train in turns, in one process, on resident batches, with one set of weights.

Whatever slows the machine down slows all entrants alike, so their ratios are much more precise than those of separate
launches: a randomized complete block design (Cochran & Cox, Experimental Designs, ch. 4), for computers known as
randomized multiple interleaved trials (Abedi & Brecht, "Conducting repeatable experiments in highly variable cloud
computing environments", ICPE 2017). Entrants that are certainly behind drop out, as in racing (Maron & Moore,
"Hoeffding races", NIPS 1994).
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune import stats
from autotune.child.beats import Beats
from autotune.child.failure import Disturbed, Verdict, classify
from autotune.child.launch import Launch, order_seed
from autotune.child.loop import checked
from autotune.child.surroundings import Watcher, card_of, reason_to_discard
from autotune.clock import Clock
from autotune.errors import AutotuneError, UsageError
from autotune.knobs.compile_mode import eager
from autotune.records import Config, Heat, HeatEntrant, HeatPlan, Phase, TrialSpec, TrialStatus, Turn
from autotune.space import why_apart
from autotune.switching import Switch, as_found
from autotune.training import Step, build, move, open_loader, samples_in, step_of
from autotune.workload import Context

#: Noise of one turn relative to its round, before there are repeats. On shared CPU cores turns of two steps differ by
#: 3 to 5 % (ResNet-18, 64 and 96 px), and now and then by 30 %: nobody is to drop out for one of those.
PRIORS = {"cpu": stats.LaunchNoise(0.08, 8, False), "cuda": stats.LaunchNoise(0.002, 8, False)}

#: Counted steps of a turn. On shared CPU cores the noise lasts for seconds, so that a second step tells little that the
#: first did not, and short turns cancel more of it.
LEAST_STEPS = 1


@dataclass
class Contender:
    """One configuration in a heat.

    Attributes:
        step_s: seconds of a step, as last seen; 0 before the first.
    """

    number: int
    config: Config
    ctx: Context
    turns: list[Turn | None] = field(default_factory=list)
    verdict: Verdict | None = None
    phase: Phase | None = None
    step: Step | None = None
    step_s: float = 0.0
    first_step_s: float | None = None
    peak_bytes: int | None = None

    @property
    def rates(self) -> list[float | None]:
        """Samples per second in each round."""
        return [None if turn is None else turn.samples / turn.seconds for turn in self.turns]


def heat(spec: TrialSpec, beats: Beats, clock: Clock, began: float) -> Heat:
    """Compare ``spec.heat.entrants`` in turns.

    Args:
        began: `clock` reading at the start of the launch; start-up time is counted from it.

    Raises:
        UsageError: a training cannot be switched between the entrants.
        Disturbed: other processes kept the machine too busy to measure.

    Whatever the reference raises is raised; what another entrant raises takes that one out of the heat.
    """
    if spec.heat is None:
        raise AutotuneError(f"{spec.launch} is to compare configurations and is not told which")
    return _Heat(spec, spec.heat, beats, clock).run(began)


class _Heat:
    def __init__(self, spec: TrialSpec, plan: HeatPlan, beats: Beats, clock: Clock) -> None:
        for other in plan.entrants[1:]:
            why = why_apart(plan.entrants[0], other)
            if why is not None:
                raise UsageError(f"these configurations cannot be compared in one process: {why}")
        found = as_found()
        self.around = Watcher(card_of(spec), clock)
        self.launch = launch = Launch(spec, beats)
        self.spec, self.plan, self.beats, self.clock = spec, plan, beats, clock
        self.entrants = [
            Contender(i, config, dataclasses.replace(launch.ctx, batch_size=int(config["batch_size"])))
            for i, config in enumerate(plan.entrants)
        ]
        self.device = launch.device
        self.cuda = launch.device.type == "cuda"
        #: Seconds that switching has taken, and the last round.
        self.switch_s = self.round_s = 0.0
        self._settled = False
        batches = self._batches()
        launch.wake()
        self.batches = {b: move(x, self.device, non_blocking=False, channels_last=False) for b, x in batches.items()}
        # The workload decides how its model is built; each entrant's own settings are switched on when its turn comes.
        self.built = build(launch.workload, launch.ctx, eager(plan.entrants[0]))
        self.switch = Switch(self.built.model, self.built.optimizer, found)
        self._keep_weights()

    @property
    def reference(self) -> Contender:
        return self.entrants[0]

    def run(self, began: float) -> Heat:
        startup_s = self.clock.now() - began
        order = random.Random(order_seed(self.spec))
        ended = None
        measured_s = 0.0
        while ended is None:
            running = [e for e in self.entrants if e.verdict is None]
            order.shuffle(running)
            round_began = self.clock.now()
            for entrant in running:
                self._guarded(entrant, self._turn)
            self.round_s = self.clock.now() - round_began
            for entrant in self.entrants:
                # Who is out, and who failed in this round, took no turn.
                entrant.turns += [None] * (len(self.reference.turns) - len(entrant.turns))
            measured_s = sum(t.seconds for e in self.entrants for t in e.turns if t is not None)
            ended = self._ended(measured_s)
        compared = self._compared()
        if compared is None:
            raise Disturbed("other processes kept the machine too busy to compare anything")
        return Heat(
            entrants=tuple(self._row(entrant, compared) for entrant in self.entrants),
            noise_sd=compared.noise.sd,
            startup_s=startup_s,
            switch_s=self.switch_s,
            measured_s=measured_s,
            ended=ended,
        )

    def _batches(self) -> dict[int, Any]:
        """Return one batch of each size, made in this process as the workload's loader makes them."""
        found = {}
        for entrant in self.entrants:
            size = entrant.ctx.batch_size
            if size not in found:
                loader = open_loader(
                    self.launch.workload,
                    entrant.ctx,
                    {"batch_size": size},
                    worker_start_method=self.spec.worker_start_method,
                    order_seed=order_seed(self.spec),
                )
                found[size] = next(iter(loader))
        return found

    def _keep_weights(self) -> None:
        """Make steps leave the weights as they are. The kernels are the same."""
        for group in self.built.optimizer.param_groups:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].zero_()
            elif "lr" in group:
                group["lr"] = 0.0

    def _guarded(self, entrant: Contender, work: Any) -> None:
        """Let an entrant work; an error takes it out of the heat."""
        leader = os.getpid()
        self.beats.turn(entrant.number)
        try:
            work(entrant)
        except BaseException as error:
            if os.getpid() != leader or entrant is self.reference:
                raise
            if self.cuda:
                # With a corrupted CUDA context this raises, and nobody can go on.
                torch.cuda.synchronize()
            entrant.phase = self.beats.phase
            spec = self.spec.model_copy(update={"config": dict(entrant.config)})
            entrant.verdict = classify(error, spec, entrant.phase)
        if entrant.verdict is not None:
            self._clean_up(entrant, entrant.verdict)

    def _clean_up(self, entrant: Contender, verdict: Verdict) -> None:
        """Leave nothing of an entrant that has failed to the others."""
        entrant.step = None
        self.built.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        if verdict.status is TrialStatus.DIVERGED:
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
        if entrant.step is None:
            built = self.built
            entrant.step = step_of(self.launch.workload, entrant.ctx, built.model, built.optimizer, entrant.config)
        return entrant.step

    def _turn(self, entrant: Contender) -> None:
        """Take a turn of as many steps as last `turn_s`, and at least one.

        An entrant's very first step is not counted. On CUDA no first step of a turn is, because the caches of the
        allocator are empty and the device waits for the host; on a CPU it takes 1.5 % longer (ResNet-18, 96 px), of all
        entrants alike, and counting it is worth more than it costs.
        """
        first = entrant.first_step_s is None
        self.beats.enter(Phase.COMPILE if first else Phase.MEASURE)
        step = self._dressed(entrant)
        batch = self.batches[entrant.ctx.batch_size]
        if first:
            began = self.clock.now()
            checked(step(batch))
            entrant.first_step_s = self.clock.now() - began
            self.beats.enter(Phase.MEASURE)
            if not self._settled:
                self._settled = True
                self.around.settle_in()
            if self.cuda:
                # Kernels were tried in it, with workspaces that no later step needs.
                self.launch.memory.begin_turn()
        if self.cuda:
            checked(step(batch))
        wanted = math.ceil(self.plan.turn_s / entrant.step_s) if entrant.step_s > 0 else LEAST_STEPS
        count = max(LEAST_STEPS, wanted)
        self.around.begin()
        start = self._mark()
        for _ in range(count):
            loss = step(batch)
        end = self._mark()
        checked(loss)
        seconds = start.elapsed_time(end) / 1e3 if self.cuda else end - start
        around, _ = self.around.read()
        entrant.step_s = seconds / count
        memory = self.launch.memory
        entrant.peak_bytes = max(entrant.peak_bytes or 0, memory.peak_reserved_bytes or memory.peak_bytes)
        samples = count * samples_in(self.launch.workload, entrant.ctx, batch)
        self.beats.step(len(entrant.turns) + 2, rate_per_s=samples / seconds)
        cores, busy = self.around.cores, self.spec.plan.busy_cores
        quiet = reason_to_discard(around, cores, busy) is None
        turn = Turn(steps=count, samples=samples, seconds=seconds, around=around)
        entrant.turns.append(turn if quiet else None)

    def _mark(self) -> Any:
        if not self.cuda:
            return self.clock.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _compared(self) -> stats.ComparedRounds[int] | None:
        rows = {e.number: e.rates for e in self.entrants if any(e.turns)}
        if 0 not in rows or len(rows) < 2:
            return None
        return stats.compare_rounds(rows, prior=PRIORS[self.device.type])

    def _ended(self, measured_s: float) -> str | None:
        """Take out who is certainly behind; return why the heat ends, as a clause, or ``None`` if it goes on."""
        compared = self._compared()
        rounds = len(self.reference.turns)
        running = [e for e in self.entrants if e.verdict is None]
        if compared is not None:
            seen = [e for e in running if any(e.turns)]
            best = max(seen, key=lambda e: compared.fit.effects[e.number])
            # One of them seems the best by luck, so each comparison with it has to be surer than a single one would
            # (Bonferroni's inequality).
            degrees = max(1.0, compared.noise.degrees)
            surer = stats.t_quantile(degrees, 1 - 0.025 / len(seen)) / stats.t_quantile(degrees)
            wide = 0.0
            for entrant in seen:
                ratio, low, high = compared.ratio(best.number, entrant.number)
                behind = math.log(ratio) > surer * math.log(ratio / low)
                if behind and entrant is not self.reference:
                    entrant.verdict = Verdict(TrialStatus.PRUNED, f"certainly behind, by {100 * (ratio - 1):.2g} %")
                    entrant.step = None
                elif not behind:
                    wide = max(wide, (high - low) / 2 / ratio)
            running = [e for e in running if e.verdict is None]
            if rounds >= self.plan.min_rounds:
                if not [e for e in running if e not in (best, self.reference)] and best is not self.reference:
                    return "the best is known"
                if wide <= self.plan.settled:
                    return "the rest are equal"
                effects = [compared.fit.effects[e.number] for e in seen if e.verdict is None]
                if stats.gain_per_round(effects, rounds, compared.noise.sd) < self.plan.least_per_s * self.round_s:
                    return "more rounds are not worth their seconds"
        if len(running) < 2:
            return "nobody is left to compare"
        if rounds >= self.plan.max_rounds:
            return f"{rounds} rounds were taken"
        return "its time is up" if measured_s >= self.plan.max_s else None

    def _row(self, entrant: Contender, compared: stats.ComparedRounds[int]) -> HeatEntrant:
        verdict = entrant.verdict
        fit = verdict is None or verdict.status is TrialStatus.PRUNED
        ratio = compared.ratio(entrant.number, 0) if fit and any(entrant.turns) else None
        return HeatEntrant(
            config=dict(entrant.config),
            status=TrialStatus.COMPLETE if verdict is None else verdict.status,
            phase=entrant.phase,
            cause=None if verdict is None else verdict.cause,
            advice=None if verdict is None else verdict.advice,
            cannot_compile=verdict is not None and verdict.cannot_compile,
            turns=tuple(entrant.turns),
            ratio=None if ratio is None else ratio[0],
            ratio_ci95=None if ratio is None else ratio[1:],
            first_step_s=entrant.first_step_s,
            peak_bytes=entrant.peak_bytes,
        )
