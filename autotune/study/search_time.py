"""The part of a study's budget that searching may take; what is left is for the proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from autotune import stats
from autotune.base.records import Phase, Trial
from autotune.samplers import WARM_COMPILE
from autotune.study.budget import CHECK_LAUNCHES, Budget, search_share
from autotune.study.complete import CompleteTrials
from autotune.study.history import History, PastContest

#: A search whose contest nothing has won goes on if there is time for this many trials, for this part of it: one trial,
#: its check, two rounds, and holding are eight.
_AGAIN_TRIALS, _AGAIN_PART = 12, 0.5
#: A budget for fewer launches is short.
SHORT_LAUNCHES = 12
#: Seconds are kept for showing a gain of this much, as a natural logarithm, in no more than so many rounds.
_PROMISING, _MOST_ROUNDS = 0.03, 4


class SearchTime:
    """Counts the seconds left for searching.

    Args:
        complete: the trials that have a score.
        adopts: the search's own launches count as a round of the proof (see `StudyLoop.in_turns`).
    """

    def __init__(self, budget: Budget, history: History, complete: CompleteTrials, *, adopts: bool) -> None:
        self._budget = budget
        self._history = history
        self._complete = complete
        self._adopts = adopts

    @property
    def share(self) -> float:
        """The fraction of the budget that searching may take."""
        limit_s = self._budget.limit_s
        contests = [contest.until_s / limit_s for contest in self._history.contests]
        return max([search_share(limit_s, self._usual_s), *contests])

    @property
    def left_s(self) -> float:
        verdict_s = self._budget.left_s - self._verdict_s
        if self.is_whole:
            return verdict_s
        return min(verdict_s, self.share * self._budget.limit_s - self._budget.spent_s)

    @property
    def is_whole(self) -> bool:
        """Whether no more of the budget is kept for the proof than one takes: of a short budget a part says
        nothing, and while nothing but the baseline has completed there is nothing to prove."""
        return len(self._complete.ends) < 2 or (self.is_short and not self._history.contests)

    @property
    def is_short(self) -> bool:
        """Whether the budget has time for few launches, each of which has to be the right one."""
        return bool(self._complete.ends) and self._budget.limit_s < SHORT_LAUNCHES * self._usual_s

    @property
    def _verdict_s(self) -> float:
        """Seconds that showing the gain of the best so far, or of one to come, takes at least, in launches of two in
        turns: without them another trial would only be another guess."""
        best, baseline = self._complete.best, self._complete.baseline
        if best is None or baseline is None or not best.rate_per_s or not baseline.rate_per_s:
            return 0.0
        gain, others = math.log(best.rate_per_s / baseline.rate_per_s), len(self._complete.ordered) - 1
        if gain < _PROMISING:
            # Of a candidate to come. Where there is no time for that, its launch is some evidence.
            to_come_s = 2 * (2 - self._adopts) * self._usual_s
            fits = self._budget.left_s >= to_come_s + fmean(t.result.wall_s for t in self._complete.ends)
            return to_come_s if others or fits else 0.0
        rounds = stats.rounds_to_show(gain, self._complete.noise, among=others + 1, most=_MOST_ROUNDS)
        start_s = best.result.measurement.startup_s if best.result.measurement is not None else 0.0
        check_s = CHECK_LAUNCHES * start_s if self._adopts else 0.0
        return 2 * (rounds - self._adopts) * self._usual_s + check_s

    @property
    def _usual_s(self) -> float:
        """Seconds of a usual launch in the proof, which finds in the cache what a trial compiled."""
        saved = 1 - WARM_COMPILE
        return fmean(t.result.wall_s - saved * t.result.phase_s.get(Phase.COMPILE, 0.0) for t in self._complete.ends)

    def go_on(self, entered: Sequence[Trial], searched_s: float) -> bool:
        """Let the search go on after a contest that none of these trials has won; return whether there is time for it.

        Args:
            searched_s: seconds of the budget that were spent when the contest began.
        """
        left_s = self._budget.left_s
        if not entered or _AGAIN_TRIALS * self._usual_s > left_s:
            return False
        until_s = self._budget.spent_s + _AGAIN_PART * left_s
        numbers = tuple(trial.number for trial in entered)
        self._history.go_on(PastContest(numbers, self._history.newest, searched_s, until_s))
        return True
