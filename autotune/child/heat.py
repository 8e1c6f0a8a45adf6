"""A heat: several configurations take turns in one process, beside a reference, in random order.

Whatever slows the machine down slows all entrants alike, so their ratios are much more precise than those of separate
launches: a randomized complete block design (Cochran & Cox, Experimental Designs, ch. 4), for computers known as
randomized multiple interleaved trials (Abedi & Brecht, "Conducting repeatable experiments in highly variable cloud
computing environments", ICPE 2017). Entrants that are certainly behind drop out, as in racing (Maron & Moore,
"Hoeffding races", NIPS 1994).

What a turn is, `device_turns` and `loader_turns` say.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, field
from typing import Protocol

from autotune import stats
from autotune.child.beats import Beats
from autotune.child.failure import Disturbed, Verdict, classify
from autotune.child.launch import order_seed
from autotune.clock import Clock
from autotune.records import Config, Heat, HeatEntrant, HeatPlan, Phase, TrialSpec, TrialStatus, Turn

TIME_IS_UP = "its time is up"


@dataclass
class Contender:
    """One configuration in a heat.

    Attributes:
        step_s: seconds of a step, as last seen; 0 before the first.
    """

    number: int
    config: Config
    turns: list[Turn | None] = field(default_factory=list)
    verdict: Verdict | None = None
    phase: Phase | None = None
    step_s: float = 0.0
    first_step_s: float | None = None
    peak_bytes: int | None = None

    @property
    def rates(self) -> list[float | None]:
        """Samples per second in each round."""
        return [None if turn is None else turn.samples / turn.seconds for turn in self.turns]


class Turns(Protocol):
    """Lets the entrants of one heat take their turns.

    Attributes:
        prior: noise of one turn before there are repeats. switch_s: seconds spent on switching so far.
        contained: what one entrant raises leaves the others unharmed. If not, it ends the heat.
    """

    prior: stats.LaunchNoise
    switch_s: float
    contained: bool

    def take(self, entrant: Contender) -> Turn | None:
        """Let an entrant take a turn; return it, or ``None`` if others kept the machine too busy for it to count.

        Raises whatever the entrant's own code raises.
        """
        ...

    def leave(self, entrant: Contender) -> None:
        """Clean up after an entrant that takes no more turns, as its verdict tells.

        Raises:
            Exception: it has left the device in a state in which nobody can go on.
        """
        ...


def race(spec: TrialSpec, plan: HeatPlan, turns: Turns, beats: Beats, clock: Clock, began: float) -> Heat:
    """Compare the entrants of a heat in rounds.

    Args:
        began: `clock` reading at the start of the launch; start-up time is counted from it.

    Raises:
        Disturbed: other processes kept the machine too busy to measure.

    Whatever the reference raises is raised; what another entrant raises takes that one out of the heat if the turns are
    contained.
    """
    return _Race(spec, plan, turns, beats, clock).run(began)


class _Race:
    def __init__(self, spec: TrialSpec, plan: HeatPlan, turns: Turns, beats: Beats, clock: Clock) -> None:
        self.spec, self.plan, self.turns, self.beats, self.clock = spec, plan, turns, beats, clock
        self.entrants = [Contender(i, config) for i, config in enumerate(plan.entrants)]
        #: Seconds of the last round.
        self.round_s = 0.0

    @property
    def reference(self) -> Contender:
        return self.entrants[0]

    def run(self, began: float) -> Heat:
        startup_s = self.clock.now() - began
        order = random.Random(order_seed(self.spec))
        ended, late = None, False
        while ended is None:
            running = [e for e in self.entrants if e.verdict is None]
            order.shuffle(running)
            round_began = self.clock.now()
            for entrant in running:
                # Without a turn of the reference, the others' tell nothing.
                if not self._is_late(began) or (entrant is self.reference and not any(entrant.turns)):
                    self._guarded(entrant)
            self.round_s = self.clock.now() - round_began
            rounds = max(len(entrant.turns) for entrant in self.entrants)
            for entrant in self.entrants:
                # Who is out, who failed in this round, and for whom it was too late, took no turn.
                entrant.turns += [None] * (rounds - len(entrant.turns))
            # Compiling has limits of its own.
            first_s = sum(e.first_step_s or 0.0 for e in self.entrants)
            late = self._is_late(began)
            ended = self._ended(self.clock.now() - began - startup_s - first_s) or (TIME_IS_UP if late else None)
        for entrant in self.entrants:
            if entrant.verdict is None and not any(entrant.turns) and late:
                entrant.verdict = Verdict(TrialStatus.INTERRUPTED, "the heat's time was up before it had a turn")
        compared = self._compared()
        if compared is None and not late:
            raise Disturbed("other processes kept the machine too busy to compare anything")
        return Heat(
            entrants=tuple(self._row(entrant, compared) for entrant in self.entrants),
            noise_sd=0.0 if compared is None else compared.noise.sd,
            startup_s=startup_s,
            switch_s=self.turns.switch_s,
            measured_s=sum(t.seconds for e in self.entrants for t in e.turns if t is not None),
            ended=ended,
            side=self.plan.side,
        )

    def _guarded(self, entrant: Contender) -> None:
        """Let an entrant take its turn; an error takes it out of the heat."""
        leader = os.getpid()
        self.beats.turn(entrant.number)
        try:
            entrant.turns.append(self.turns.take(entrant))
        except BaseException as error:
            if os.getpid() != leader or entrant is self.reference or not self.turns.contained:
                raise
            entrant.phase = self.beats.phase
            spec = self.spec.model_copy(update={"config": dict(entrant.config)})
            entrant.verdict = classify(error, spec, entrant.phase)
        if entrant.verdict is not None:
            self.turns.leave(entrant)

    def _compared(self) -> stats.ComparedRounds[int] | None:
        rows = {e.number: e.rates for e in self.entrants if any(e.turns)}
        if 0 not in rows or len(rows) < 2:
            return None
        return stats.compare_rounds(rows, prior=self.turns.prior, robust=True)

    def _ended(self, taken_s: float) -> str | None:
        """Take out who is certainly behind; return why the heat ends, as a clause, or ``None`` if it goes on.

        Args:
            taken_s: seconds of all turns, with everything around them but first steps.
        """
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
            # The first files that a loader reads may be cold.
            may_drop = self.plan.side == "device" or rounds >= self.plan.min_rounds
            for entrant in seen:
                ratio, low, high = compared.ratio(best.number, entrant.number)
                behind = math.log(ratio) > surer * math.log(ratio / low)
                if behind and may_drop and entrant is not self.reference:
                    entrant.verdict = Verdict(TrialStatus.PRUNED, f"certainly behind, by {100 * (ratio - 1):.2g} %")
                    self.turns.leave(entrant)
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
        return TIME_IS_UP if taken_s >= self.plan.max_s else None

    def _is_late(self, began: float) -> bool:
        """Return whether it is too late for another turn."""
        return self.plan.wall_s is not None and self.clock.now() - began > self.plan.wall_s

    def _row(self, entrant: Contender, compared: stats.ComparedRounds[int] | None) -> HeatEntrant:
        verdict = entrant.verdict
        fit = verdict is None or verdict.status is TrialStatus.PRUNED
        ratio = compared.ratio(entrant.number, 0) if compared and fit and any(entrant.turns) else None
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
