"""A race: several configurations take turns beside a reference, in random order, until it is clear who is fastest.

Whatever slows the machine down slows all entrants alike, so their ratios are much more precise than those of separate
launches: a randomized complete block design (Cochran & Cox, Experimental Designs, ch. 4), for computers known as
randomized multiple interleaved trials (Abedi & Brecht, "Conducting repeatable experiments in highly variable cloud
computing environments", ICPE 2017). Entrants that are certainly behind drop out, as in racing (Maron & Moore,
"Hoeffding races", NIPS 1994).

A turn may be anything: a launch's steps on the device, batches of a loader, or those of a recording.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autotune import stats
from autotune.base.clock import Clock
from autotune.base.records import Config, Heat, HeatEntrant, HeatPlan, Phase, Side, TrialStatus, Turn

#: Noise of one turn relative to its round, before there are repeats. On shared CPU cores turns of two steps differ by
#: 3 to 5 % (ResNet-18, 64 and 96 px), and now and then by 30 %: nobody is to drop out for one of those.
PRIORS = {"cpu": stats.LaunchNoise(0.08, 8, False), "cuda": stats.LaunchNoise(0.002, 8, False)}
TIME_IS_UP = "its time is up"
#: Level of one look at who is behind, two-sided. There is a look after each round, and who is out stays out: at this
#: level a dozen looks lose the fastest in 5 % of races at most (Pocock, "Group sequential methods in the design and
#: analysis of clinical trials", Biometrika 64, 1977).
LOOK = 0.0097


def is_contained(side: Side, device: str, status: TrialStatus) -> bool:
    """Return whether an entrant that fails in this way leaves the others of its heat unharmed.

    PyTorch goes on raising for the workers of a loader that has died. On a CPU, oneDNN has been seen to crash in later
    steps after an allocation of its own had failed.

    Args:
        device: its contract name.
    """
    return side == "device" and not (device == "cpu" and status is TrialStatus.OOM)


@dataclass
class Contender:
    """One configuration in a race.

    Attributes:
        status: ``complete`` as long as it takes part. phase, cause, advice, cannot_compile, refuses: of
            what took it out.
        step_s: seconds of a step, as last seen; 0 before the first.
    """

    number: int
    config: Config
    turns: list[Turn | None] = field(default_factory=list)
    status: TrialStatus = TrialStatus.COMPLETE
    phase: Phase | None = None
    cause: str | None = None
    advice: str | None = None
    cannot_compile: bool = False
    refuses: str | None = None
    step_s: float = 0.0
    first_step_s: float | None = None
    peak_bytes: int | None = None

    @property
    def runs(self) -> bool:
        """Whether it takes part in the next round."""
        return self.status is TrialStatus.COMPLETE

    @property
    def rates(self) -> list[float | None]:
        """Samples per second in each round."""
        return [None if turn is None else turn.samples / turn.seconds for turn in self.turns]


class Turns(Protocol):
    """Lets the entrants of one race take their turns."""

    @property
    def prior(self) -> stats.LaunchNoise:
        """Noise of one turn before there are repeats."""
        ...

    @property
    def switch_s(self) -> float:
        """Seconds spent on switching so far."""
        ...

    def take(self, entrant: Contender) -> Turn | None:
        """Let an entrant take a turn; return it, or ``None`` if others kept the machine too busy for it to count.

        What goes wrong with an entrant alone is noted in its status; what it raises ends the race.
        """
        ...

    def leave(self, entrant: Contender) -> None:
        """Clean up after an entrant that takes no more turns, as its status tells.

        Raises:
            Exception: it has left the device in a state in which nobody can go on.
        """
        ...


class Rounds:
    """The rounds of one race.

    Args:
        order: shuffles the entrants before each round.

    Attributes:
        entrants: in the order of the plan; the first is the reference, which takes part in every round.
    """

    def __init__(self, plan: HeatPlan, turns: Turns, clock: Clock, order: random.Random) -> None:
        self.entrants = [Contender(i, config) for i, config in enumerate(plan.entrants)]
        self._plan, self._turns, self._clock, self._order = plan, turns, clock, order
        #: Seconds of the last round.
        self._round_s = 0.0

    def run(self, began: float) -> Heat | None:
        """Let the entrants race, and return the result; ``None`` if others kept the machine too busy to compare
        anything.

        Args:
            began: `clock` reading at the start of the launch; start-up time is counted from it.
        """
        startup_s = self._clock.now() - began
        reference = self.entrants[0]
        ended, late = None, False
        while ended is None:
            running = [e for e in self.entrants if e.runs]
            self._order.shuffle(running)
            round_began = self._clock.now()
            for entrant in running:
                # Without a turn of the reference, those of the others show nothing.
                if not self._is_late(began) or (entrant is reference and not any(reference.turns)):
                    turn = self._turns.take(entrant)
                    if entrant.runs:
                        entrant.turns.append(turn)
                    else:
                        self._turns.leave(entrant)
            self._round_s = self._clock.now() - round_began
            rounds = max(len(entrant.turns) for entrant in self.entrants)
            for entrant in self.entrants:
                # Entrants that are out, failed in this round, or came too late took no turn.
                entrant.turns += [None] * (rounds - len(entrant.turns))
            # Compiling has limits of its own.
            first_s = sum(e.first_step_s or 0.0 for e in self.entrants)
            late = self._is_late(began)
            ended = self._ended(self._clock.now() - began - startup_s - first_s) or (TIME_IS_UP if late else None)
        for entrant in self.entrants:
            if entrant.runs and not any(entrant.turns) and late:
                entrant.status, entrant.cause = TrialStatus.INTERRUPTED, "the heat's time was up before it had a turn"
        compared = self._compared()
        if compared is None and not late and any(e.runs for e in self.entrants if e is not reference):
            return None
        return Heat(
            entrants=tuple(_row(entrant, compared) for entrant in self.entrants),
            noise_sd=0.0 if compared is None else compared.noise.sd,
            startup_s=startup_s,
            switch_s=self._turns.switch_s,
            measured_s=sum(t.seconds for e in self.entrants for t in e.turns if t is not None),
            ended=ended,
            side=self._plan.side,
        )

    def _compared(self) -> stats.ComparedRounds[int] | None:
        rows = {e.number: e.rates for e in self.entrants if any(e.turns)}
        if 0 not in rows or len(rows) < 2:
            return None
        return stats.compare_rounds(rows, prior=self._turns.prior, robust=True)

    def _ended(self, taken_s: float) -> str | None:
        """Drop entrants that are certainly behind; return why the race ends, as a clause, or ``None`` if it goes on.

        Args:
            taken_s: seconds of all turns, including everything around them but first steps.
        """
        rounds = len(self.entrants[0].turns)
        compared = self._compared()
        if compared is not None and not self._plan.all_rounds:
            running = [e.number for e in self.entrants if e.runs]
            behind, ended = _shown(compared, running, self._plan, rounds, self._round_s)
            for number, ratio in behind.items():
                entrant = self.entrants[number]
                entrant.status = TrialStatus.PRUNED
                entrant.cause = f"certainly behind, by {100 * (ratio - 1):.2g} %"
                self._turns.leave(entrant)
            if ended is not None:
                return ended
        if sum(e.runs for e in self.entrants) < 2:
            return "nobody is left to compare"
        if rounds >= self._plan.max_rounds:
            return f"{rounds} rounds were taken"
        return TIME_IS_UP if taken_s >= self._plan.max_s else None

    def _is_late(self, began: float) -> bool:
        """Return whether it is too late for another turn."""
        return self._plan.wall_s is not None and self._clock.now() - began > self._plan.wall_s


def _shown(
    compared: stats.ComparedRounds[int], running: Sequence[int], plan: HeatPlan, rounds: int, round_s: float
) -> tuple[dict[int, float], str | None]:
    """Return what the rounds so far show: by entrant that is certainly behind, how many times as fast the best one is;
    and why there are no more rounds, as a clause, or ``None`` if there are.

    Args:
        running: the entrants of the next round. round_s: seconds of the last one.
    """
    # Others may have disturbed every turn of an entrant.
    effects = {number: compared.fit.effects[number] for number in running if number in compared.fit.effects}
    if not effects:
        return {}, None
    best = max(effects, key=lambda number: effects[number])
    # Any of the others may seem to be ahead of the fastest by luck, so each comparison must be surer than a single one
    # would have to be (Bonferroni's inequality, for multiple comparisons with the best: Hsu, Multiple Comparisons,
    # 1996).
    degrees = max(1.0, compared.noise.degrees)
    surer = stats.t_quantile(degrees, 1 - LOOK / 2 / len(effects)) / stats.t_quantile(degrees)
    # The first files that a loader reads may be cold.
    may_drop = plan.side == "device" or rounds >= plan.min_rounds
    behind: dict[int, float] = {}
    wide = 0.0
    for number in effects:
        ratio, low, high = compared.ratio(best, number)
        if math.log(ratio) <= surer * math.log(ratio / low):
            wide = max(wide, (high - low) / 2 / ratio)
        elif may_drop and number != 0:
            behind[number] = ratio
    left = effects.keys() - behind.keys()
    ended = None
    if rounds >= plan.min_rounds and len(effects) == len(running):
        if not left - {best, 0} and best != 0:
            ended = "the best is known"
        elif wide <= plan.settled:
            ended = "the rest are equal"
        elif stats.gain_per_round([effects[n] for n in left], rounds, compared.noise.sd) < plan.least_per_s * round_s:
            ended = "more rounds are not worth their seconds"
    return behind, ended


def _row(entrant: Contender, compared: stats.ComparedRounds[int] | None) -> HeatEntrant:
    fit = entrant.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)
    ratio = compared.ratio(entrant.number, 0) if compared and fit and any(entrant.turns) else None
    return HeatEntrant(
        config=dict(entrant.config),
        status=entrant.status,
        phase=entrant.phase,
        cause=entrant.cause,
        advice=entrant.advice,
        cannot_compile=entrant.cannot_compile,
        refuses=entrant.refuses,
        turns=tuple(entrant.turns),
        ratio=None if ratio is None else ratio[0],
        ratio_ci95=None if ratio is None else ratio[1:],
        first_step_s=entrant.first_step_s,
        peak_bytes=entrant.peak_bytes,
    )
