"""The part of a study's budget that searching may take; what is left is for the proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from autotune.records import Phase, Trial
from autotune.samplers import WARM_COMPILE
from autotune.study.budget import Budget, search_share
from autotune.study.history import History, PastContest

#: A search whose contest nothing has won goes on if there is time for this many trials, for this part of it: one trial,
#: its check, two rounds, and holding are eight.
_AGAIN_TRIALS, _AGAIN_PART = 12, 0.5


class SearchTime:
    """Counts the seconds left for searching.

    Args:
        ends: returns the complete trials that tell how long the proof's launches will take: the baseline's, and the
            best one of several.
    """

    def __init__(self, budget: Budget, history: History, ends: Callable[[], Sequence[Trial]]) -> None:
        self._budget = budget
        self._history = history
        self._ends = ends

    @property
    def share(self) -> float:
        """The fraction of the budget that searching may take."""
        limit_s = self._budget.limit_s
        share = search_share(limit_s, self._usual_s if len(self._ends()) > 1 else None)
        return max(share, *(contest.until_s / limit_s for contest in self._history.contests), 0.0)

    @property
    def left_s(self) -> float:
        return self.share * self._budget.limit_s - self._budget.spent_s

    @property
    def _usual_s(self) -> float:
        """Seconds of a usual launch in the proof, which finds in the cache what a trial compiled."""
        saved = 1 - WARM_COMPILE
        return fmean(t.result.wall_s - saved * t.result.phase_s.get(Phase.COMPILE, 0.0) for t in self._ends())

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
