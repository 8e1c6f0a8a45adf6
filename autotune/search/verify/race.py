"""The race: baseline and finalists launched again in turns, until the ratios are known well enough or time is up.

The winner of a search was picked because it looked best, so its own figure is too good on average (the winner's curse).
The figures of record come from new launches (or from the search's own where there was nobody to pick from, see
`Race.adopt`), in an order that spreads the machine's drift evenly: A B C, C B A, and so
on. An entrant that is surely slower than the leader drops out after two rounds, so that the remaining launches go to
undecided ones (racing: Maron & Moore, "Hoeffding races", NIPS 1994; Birattari et al., "A racing algorithm for
configuring metaheuristics", GECCO 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune import stats
from autotune.space.formatting import one_line, percent_text, rate_text
from autotune.base.records import LaunchKind, TrialResult, TrialStatus
from autotune.study.plans import proof_plan_for
from autotune.search.verify.comparison import LEAST_LAUNCHES, Comparison, shared_rounds
from autotune.search.verify.entrant import Entrant, ended_from_outside, next_s
from autotune.search.verify.final import Final

#: Target for half the width of the ratio's 95 % interval, by kind of device.
TARGETS = {"cpu": 0.03, "cuda": 0.01}
#: Degrees of freedom with which the noise must be known before the race may end, and one more round follows. Ending on
#: an interval that is narrow by luck would make it too narrow on average (Chow & Robbins, "On the asymptotic theory of
#: fixed-width sequential confidence intervals", Ann. Math. Stat. 36, 1965). In simulations this raises the coverage
#: from 90–93 % back to 93–96 %.
LEAST_DEGREES = 3
#: If there is no time for this many rounds, the least promising entrants are left out, but never the baseline, the best
#: and the best at the user's own batch size, as long as two rounds of them fit.
ROUNDS_WANTED, FEWEST = 3, 3
#: More rounds narrow the interval by little.
MAX_ROUNDS = 20
#: Numbers of the rounds of which an earlier run of the study may have left launches.
_NUMBERS = range(1, 4 * MAX_ROUNDS)


class Race:
    """Launches entrants in turns and compares them.

    Args:
        entrants: the first is the one that the others are compared with.
        purpose: first word of the launches' names.
        prior: noise of one launch before there are repeats; ``None`` for the device's usual noise.
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
        #: Seconds of compiling with a cold cache, by graph, as far as they have been seen.
        self.compiled_s = dict(final.compiled_s)
        self._number = 0
        self._made = 0
        self._racing: list[Entrant] = []
        #: Those who take part in the next rounds if there is time for all of them, and the rounds before these.
        self._joined = self._joining = list(entrants)
        self._before = 0
        self._earlier_s: float | None = None
        #: Whether the ratios are known well enough, and whether one more round has followed.
        self._known = self._done = False

    @property
    def baseline(self) -> Entrant:
        return self.entrants[0]

    @property
    def still_racing(self) -> list[Entrant]:
        """Entrants that have not dropped out."""
        return [e for e in self.entrants if e.out is None]

    @property
    def undecided(self) -> list[Entrant]:
        """Those that would take part in another round."""
        return [e for e in self._racing if e.out is None]

    @property
    def is_decided(self) -> bool:
        """Whether more rounds would hardly change which entrant is the best."""
        return self._done or len(self._racing) <= 1 or self._is_long

    @property
    def _is_long(self) -> bool:
        return self._made - self._before >= MAX_ROUNDS

    @property
    def _lacks_a_round(self) -> bool:
        """Whether two that race have not had enough rounds together, because one launch of them has shown nothing."""
        again = self._made - self._before <= LEAST_LAUNCHES
        return again and len(self._racing) == 2 and shared_rounds(*self._racing) < LEAST_LAUNCHES

    @property
    def rounds(self) -> int:
        """Number of rounds with at least two measured entrants."""
        return self._made

    @property
    def ended(self) -> str:
        """Why the race ended, one sentence."""
        if len(self.still_racing) <= 1 and not self._made:
            return "there was nothing to hold against the baseline"
        if not self._made:
            return "there was no time to launch anything again"
        if self._done:
            return f"the ratios are known to within {percent_text(TARGETS[self.final.device])}"
        if len(self._racing) <= 1:
            return "nothing else may still be the fastest"
        if self._is_long:
            return f"{MAX_ROUNDS} rounds are the most there are"
        return "the time for it was up"

    def join(self, entrants: Sequence[Entrant]) -> None:
        """Let others race against the baseline. Those before them take no more rounds."""
        self.compiled_s.update(self.final.compiled_s)
        known = {e.name for e in self.entrants}
        self.entrants += [e for e in entrants if e.name not in known]
        self._joined = self._joining = [self.baseline, *entrants]
        self._before = self._made
        self._earlier_s = None
        self._known = self._done = False

    def adopt(self) -> None:
        """Take the search's own launches for the first round. Nobody may have been chosen by them."""
        self._number = self._made = 1
        for one in self._joining:
            one.rounds = [one.trial.result.measurement]

    def reopen(self) -> None:
        """Who was ahead has dropped out: let those race again whom it had left behind, if `run` is called again."""
        compared = self.compared()
        left = [e for e in self._joined if e.out is None and compared.in_turns(e, self.baseline)]
        self._racing = self._undecided(left)
        self._known = self._done = False

    def run(self, share_s: float) -> None:
        """Run rounds for at most ``share_s`` seconds, and within the budget. Another call continues the race."""
        budget = self.final.launches.budget
        began = self.begin()
        if self._joining:
            self._racing = self._choose_racing(share_s, budget.limit_s - began)
            self._joining = []
        while len(self._racing) > 1 and not self._is_long and not self._done:
            left_s = min(share_s - (budget.spent_s - began), budget.left_s)
            if self._made - self._before < LEAST_LAUNCHES or self._lacks_a_round:
                # One round does not show its noise, so a second round takes precedence over the steps after the race.
                left_s = budget.left_s
                self._racing = self._for_one_more(left_s)
                left_s += self.final.launches.budget.grace_s if len(self._racing) == 2 else 0.0
            if len(self._racing) < 2 or (self._number and self.round_s(self._racing) > max(0.0, left_s)):
                break
            self.round(self._racing)
            # An entrant disturbed in every round so far stays and gets another chance.
            compared = self.compared()
            self._drop_unfit(compared)
            left = [e for e in self._racing if e.out is None]
            if self._made - self._before >= LEAST_LAUNCHES and all(compared.in_turns(e, self.baseline) for e in left):
                self._racing = self._undecided(left)
                self._done = self._known
                self._known = self._known_well_enough(self._racing)

    def narrow(self, racing: Sequence[Entrant], left_s: Callable[[], float]) -> None:
        """Run more rounds of some entrants until their ratios to the baseline, the first of them, are well known.

        Args:
            left_s: returns the seconds left for it.
        """
        # The launches get their own names, so that a resume does not take these rounds for the race's.
        self.purpose = "narrow"
        known = self._known_well_enough(racing)
        done = known
        while not self._is_long and not done:
            racing = [e for e in racing if e.out is None]
            if len(racing) < 2 or self.round_s(racing) > max(0.0, left_s()):
                break
            self.round(racing)
            # One more round follows (see `LEAST_DEGREES`).
            known, done = self._known_well_enough(racing), known

    def _for_one_more(self, left_s: float) -> list[Entrant]:
        """Return the entrants of another round: the baseline and as many of the fastest so far as there is time for.

        A round of two proves more than none of three.
        """
        racing, others = self._racing, [e for e in self._racing if e is not self.baseline and e.out is None]
        if self.final.by_rate and all(e.again for e in others):
            others.sort(key=lambda e: -e.again[-1].samples_per_s)
        while len(others) > 1 and self.round_s([self.baseline, *others]) > max(0.0, left_s):
            others.pop()
        return [e for e in racing if e is self.baseline or e in others]

    def begin(self) -> float:
        """Return the seconds of the budget spent before the race began.

        Launches by an earlier run of the study count as part of the race, so that a resumed race has the entrants and
        the time that it would have had without the interruption.
        """
        began = self.final.launches.budget.spent_s - self.earlier_s
        self._earlier_s = 0.0
        return began

    @property
    def earlier_s(self) -> float:
        """Seconds that an earlier run of the study spent on this race; 0 once `begin` has counted them."""
        if self._earlier_s is None:
            numbers = [number for number in _NUMBERS if number > self._number]
            launches = (self._finished(e, number) for e in self._joining for number in numbers)
            self._earlier_s = sum(result.wall_s for result in launches if result is not None)
        return self._earlier_s

    def _finished(self, one: Entrant, number: int) -> TrialResult | None:
        """Return the result of a launch that an earlier run of the study completed, if any."""
        return self.final.launches.finished(self._name(one, number), one.config)

    def has_run(self, one: Entrant) -> bool:
        """Return whether an earlier run of the study launched an entrant, for the present purpose."""
        return any(self._finished(one, number) is not None for number in _NUMBERS)

    def _was_begun(self, racing: Sequence[Entrant], number: int) -> bool:
        return any(self._finished(e, number) is not None for e in racing)

    def _choose_racing(self, share_s: float, left_s: float) -> list[Entrant]:
        """Return the entrants to race within the given time."""
        racing = [e for e in self._joining if e.out is None]
        # Several rounds of the most promising tell more than one round of all, which does not show its noise. Those
        # whom an earlier run of the study has launched were chosen then.
        while len(racing) > FEWEST and ROUNDS_WANTED * expected_s(racing) > min(share_s, left_s):
            if self.has_run(racing[-1]):
                break
            racing = racing[:-1]
        # Only what is launched twice proves anything.
        missing = LEAST_LAUNCHES - (self._made - self._before)
        while len(racing) > 2 and missing * expected_s(racing) > left_s and not self.has_run(racing[-1]):
            racing = racing[:-1]
        if len(racing) == 2 and missing * expected_s(racing) <= left_s + self.final.launches.budget.grace_s:
            return racing
        grace_s = self.final.launches.budget.grace_s
        first_s = min(max(share_s, grace_s), left_s + grace_s)
        while len(racing) > 1 and expected_s(racing) > first_s:
            # Drop the least promising first. The baseline alone proves nothing.
            racing = racing[:-1] if len(racing) > 2 else []
        return racing

    def round(self, racing: Sequence[Entrant]) -> None:
        """Run one round: launch every entrant once, in the opposite order of the last round.

        A round that an earlier run of the study began is taken as it is, without new launches: a missing launch either
        failed or was interrupted, and a launch now would not run under the same conditions as the others.
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
        result = final.launches.run_outside(
            LaunchKind.MEASURE,
            self._name(one, number),
            f"{one.title} again, launch {number}",
            one.config,
            plan=proof_plan_for(final.launches.plan),
        )
        final.raise_if_stopped()
        self._enter(one, number, result)

    def _enter(self, one: Entrant, number: int, result: TrialResult) -> None:
        final = self.final
        one.expected_s = next_s(result)
        one.rounds += [None] * (number - 1 - len(one.rounds))
        if result.status is TrialStatus.COMPLETE and result.measurement is not None:
            one.rounds.append(result.measurement)
            again = rate_text(result.measurement.samples_per_s, result.measurement.ci95_per_s)
            final.observer.says(f"{one.title} again: {again} {result.measurement.unit}")
            return
        one.rounds.append(None)
        if ended_from_outside(result) or one is self.baseline:
            final.observer.says(f"{one.title} again: not measured: {one_line(result.cause or result.status)}")
        if not ended_from_outside(result) and one is not self.baseline:
            one.out = f"ended as {result.status} when it was launched again: {result.cause}"
            final.observer.says(f"{one.title} {one.out}")

    def _name(self, one: Entrant, number: int) -> str:
        return f"{self.purpose}-{one.name}-{number}"

    def round_s(self, racing: Sequence[Entrant], rounds: int = 1) -> float:
        """Estimate the duration of the next rounds; rounds already made by an earlier run of the study take no time."""
        numbers = range(self._number + 1, self._number + 1 + rounds)
        return sum(expected_s(racing) for number in numbers if not self._was_begun(racing, number))

    def _drop_unfit(self, compared: Comparison) -> None:
        """Let those drop out that do not meet what is required, as far as several launches tell."""
        for one in self._racing:
            if one is not self.baseline and one.out is None and len(one.again) >= LEAST_LAUNCHES:
                one.out = compared.unmet(one)

    def _undecided(self, racing: list[Entrant]) -> list[Entrant]:
        """Return the entrants that may still be the best, overall or at the user's own batch size, and the baseline."""
        if not self.final.by_rate:
            return racing
        compared = self.compared()
        fit = [e for e in racing if compared.unmet(e) is None]
        same = [e for e in fit if self.final.space.same_training(e.config)]
        behind = 1 / (1 - self.final.rate_within)
        return [
            e
            for e in racing
            if e is self.baseline
            or any(
                e in group and compared.ratio(compared.leader(group), e)[1] <= behind for group in (fit, same) if group
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
        """Compare the entrants by the rounds so far."""
        final = self.final
        return Comparison(
            self.entrants,
            prior=self.prior,
            scorer=final.scorer,
            by_rate=final.by_rate,
            required=final.required,
            compiled_s=self.compiled_s,
        )


def expected_s(racing: Sequence[Entrant]) -> float:
    """Estimate the duration of one round."""
    return sum(e.expected_s for e in racing)
