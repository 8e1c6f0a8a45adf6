"""Baseline and finalists launched again in turns, until the ratio is known well enough or the time is used up.

The trial that won a search was picked because it looked best, so its own figure is too good on average (the winner's
curse). The figures of record come from fresh launches, in an order that lets all share the machine's drift: forth,
back, forth (A B C, C B A, …). Who is surely slower than the leader drops out after two rounds, so that the launches
left go to those between whom it is open (racing: Maron & Moore, "Hoeffding races", NIPS 1994; Birattari et al.,
"A racing algorithm for configuring metaheuristics", GECCO 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune import stats
from autotune.errors import InterruptedSearch
from autotune.formatting import percent_text, rate_text
from autotune.observer import Observer
from autotune.records import LaunchKind, TrialResult, TrialStatus
from autotune.scoring import Scorer
from autotune.space import Space
from autotune.study.launches import Launches, proof_plan_for
from autotune.verify.comparison import Comparison
from autotune.verify.entrant import Entrant, ended_from_outside, next_s

#: A proof is worth running over the budget by this much; the figures would rest on the search's own launches.
FIRST_ROUND_GRACE_S = 15.0
#: Half the 95 % interval of the ratio that is aimed at, by the kind of device.
TARGETS = {"cpu": 0.03, "cuda": 0.01}
#: An interval that is narrow by luck must not end the race, or it is too narrow on average (Chow & Robbins, "On the
#: asymptotic theory of fixed-width sequential confidence intervals", Ann. Math. Stat. 36, 1965): the noise has to be
#: known with this many degrees of freedom, and one more round follows. In simulation that brings the coverage from
#: 90 to 93 % back to 93 to 96 %.
LEAST_DEGREES = 3
#: So many rounds should fit into the time there is, or the least promising stay out; but for the baseline, the best
#: and the best at the user's own batch.
ROUNDS_WANTED, FEWEST = 3, 3
#: So many show a noise of their own.
LEAST_ROUNDS = 2
#: Rounds beyond this narrow the interval by little.
MAX_ROUNDS = 20


@dataclass(frozen=True)
class Final:
    """What every part of the proof needs.

    Attributes:
        by_rate: the objective is the rate itself, so that intervals of rates say who wins.
        stop: the number of the signal that asks the search to end, or ``None``.
    """

    space: Space
    launches: Launches
    scorer: Scorer
    observer: Observer
    stop: Callable[[], int | None]
    by_rate: bool = True

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.launches.conditions.device.partition(":")[0]

    def heed(self) -> None:
        """Raise what a signal asks for."""
        number = self.stop()
        if number is not None:
            raise InterruptedSearch(number)


class Race:
    """Entrants launched in turns, and what their rounds say.

    Args:
        entrants: the first is what the others are held against.
        purpose: the first word of its launches' names.
        prior: noise of one launch before there were repeats; ``None``: what is usual for this device.
    """

    def __init__(
        self,
        final: Final,
        entrants: Sequence[Entrant],
        *,
        purpose: str = "verify",
        prior: stats.LaunchNoise | None = None,
    ) -> None:
        self.final = final
        self.entrants = list(entrants)
        self.prior = prior or stats.PRIORS[final.device]
        self.purpose = purpose
        self._number = 0
        self._made = 0
        self._racing: list[Entrant] = []
        self._earlier_s: float | None = None
        #: The ratios are known well enough; and one more round has followed.
        self._known = self._done = False

    @property
    def baseline(self) -> Entrant:
        return self.entrants[0]

    @property
    def standing_in(self) -> list[Entrant]:
        """Who is not out."""
        return [e for e in self.entrants if e.out is None]

    @property
    def rounds(self) -> int:
        """How many there were in which some could be held against each other."""
        return self._made

    @property
    def ended(self) -> str:
        """Why there was no further round, one sentence."""
        if len(self.standing_in) <= 1 and not self._made:
            return "there was nothing to hold against the baseline"
        if not self._made:
            return "there was no time to launch anything again"
        if self._done:
            return f"the ratios are known to within {percent_text(TARGETS[self.final.device])}"
        if len(self._racing) <= 1:
            return "nothing else may still be the fastest"
        if self._made >= MAX_ROUNDS:
            return f"{MAX_ROUNDS} rounds are the most there are"
        return "the time for it was up"

    def run(self, share_s: float) -> None:
        """Rounds for at most ``share_s`` seconds, and no longer than the budget lasts. Called again, it goes on."""
        budget = self.final.launches.budget
        began = self.begin()
        if not self._number:
            self._racing = self._field(share_s, budget.limit_s - began)
        while len(self._racing) > 1 and self._made < MAX_ROUNDS and not self._done:
            left_s = min(share_s - (budget.spent_s - began), budget.left_s)
            if self._made < LEAST_ROUNDS:
                # One round shows no noise of its own: a second is worth more than all that comes after the race.
                left_s = budget.left_s
            if self._number and self.round_s(self._racing) > max(0.0, left_s):
                break
            self.round(self._racing)
            # Who was disturbed every time so far stays, and has another chance.
            if self._made >= LEAST_ROUNDS and all(e.seen for e in self._racing if e.out is None):
                self._racing = self._still_open([e for e in self._racing if e.out is None])
                self._done = self._known
                self._known = self._known_well_enough(self._racing)

    def begin(self) -> float:
        """Of the budget, what was spent when this began; launches that an earlier run of the study made belong to it,
        so that it races whom it would have raced without the interruption, and no longer."""
        began = self.final.launches.budget.spent_s - self.earlier_s
        self._earlier_s = 0.0
        return began

    @property
    def earlier_s(self) -> float:
        """What an earlier run of the study spent on this race; nothing once `begin` has counted it."""
        if self._earlier_s is None:
            launches = (self._finished(e, number) for e in self.entrants for number in range(1, 2 * MAX_ROUNDS))
            self._earlier_s = sum(result.wall_s for result in launches if result is not None)
        return self._earlier_s

    def _finished(self, one: Entrant, number: int) -> TrialResult | None:
        """A launch of a round as an earlier run of the study completed it."""
        return self.final.launches.finished(self._name(one, number), one.config)

    def _was_begun(self, racing: Sequence[Entrant], number: int) -> bool:
        return any(self._finished(e, number) is not None for e in racing)

    def _field(self, share_s: float, left_s: float) -> list[Entrant]:
        """Who is going to race in that time."""
        racing = list(self.standing_in)
        # One round of everybody shows no noise: rather the most promising several times.
        while len(racing) > FEWEST and ROUNDS_WANTED * expected_s(racing) > min(share_s, left_s):
            racing = racing[:-1]
        first_s = min(max(share_s, FIRST_ROUND_GRACE_S), left_s + FIRST_ROUND_GRACE_S)
        while len(racing) > 1 and expected_s(racing) > first_s:
            # Rather two proven than four not; the least promising goes first, and alone the baseline proves nothing.
            racing = racing[:-1] if len(racing) > 2 else []
        return racing

    def round(self, racing: Sequence[Entrant]) -> None:
        """One round: everybody once, in the order of the last round turned round.

        One that an earlier run of the study began is taken over as it is. Nothing is launched into it: what is missing
        there failed, or was never made because the run was ended, and a launch of today has not shared its machine.
        """
        self._number += 1
        if self._was_begun(racing, self._number):
            found = {e.name: self._finished(e, self._number) for e in racing if e.out is None}
            self._made += sum(result is not None for result in found.values()) > 1
            for one in racing:
                result = found.get(one.name)
                if result is not None:
                    self._enter(one, self._number, result)
            return
        self._made += 1
        for one in racing if self._number % 2 else reversed(racing):
            if one.out is None:
                self._launch(one, self._number)

    def _launch(self, one: Entrant, number: int) -> None:
        final = self.final
        result = final.launches.aside(
            LaunchKind.MEASURE,
            self._name(one, number),
            f"{one.title} again, launch {number}",
            one.config,
            plan=proof_plan_for(final.launches.plan),
        )
        final.heed()
        self._enter(one, number, result)

    def _enter(self, one: Entrant, number: int, result: TrialResult) -> None:
        final = self.final
        one.expected_s = next_s(result)
        one.rounds += [None] * (number - 1 - len(one.rounds))
        if result.status is TrialStatus.COMPLETE and result.measurement is not None:
            one.rounds.append(result.measurement)
            again = rate_text(result.measurement.samples_per_s, result.measurement.ci95_per_s)
            final.observer.says(f"{one.title} again: {again} samples/s")
            return
        one.rounds.append(None)
        if not ended_from_outside(result) and one is not self.baseline:
            one.out = f"ended as {result.status} when it was launched again: {result.cause}"
            final.observer.says(f"{one.title} {one.out}")

    def _name(self, one: Entrant, number: int) -> str:
        return f"{self.purpose}-{one.name}-{number}"

    def round_s(self, racing: Sequence[Entrant], rounds: int = 1) -> float:
        """About how long the next rounds take; those that an earlier run of the study made take no time."""
        numbers = range(self._number + 1, self._number + 1 + rounds)
        return sum(expected_s(racing) for number in numbers if not self._was_begun(racing, number))

    def _still_open(self, racing: list[Entrant]) -> list[Entrant]:
        """Those who may still be the best, over all or at the user's own batch; the baseline always."""
        if not self.final.by_rate:
            return racing
        compared = self.compared()
        same = [e for e in racing if self.final.space.same_batch(e.config)]
        return [
            e
            for e in racing
            if e is self.baseline
            or any(
                e in group and compared.ratio(compared.leader(group), e)[1] <= 1 for group in (racing, same) if group
            )
        ]

    def _known_well_enough(self, racing: Sequence[Entrant]) -> bool:
        compared = self.compared()
        if not compared.noise.learnt or compared.noise.degrees < LEAST_DEGREES:
            return False
        target = TARGETS[self.final.device]
        for one in racing:
            if one is not self.baseline:
                ratio, low, high = compared.ratio(one, self.baseline)
                if (high - low) / 2 > target * ratio:
                    return False
        return True

    def compared(self) -> Comparison:
        """What the rounds so far say."""
        return Comparison(self.entrants, prior=self.prior, scorer=self.final.scorer, by_rate=self.final.by_rate)


def expected_s(racing: Sequence[Entrant]) -> float:
    """About how long a round of these takes."""
    return sum(e.expected_s for e in racing)
