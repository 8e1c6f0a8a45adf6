"""What the finished trials of a study teach whoever searches: what need not be tried, and how long trials take."""

from __future__ import annotations

from autotune.records import Trial
from autotune.samplers.cost import CostModel
from autotune.space import Lessons


class Experience:
    """Lessons and costs from the trials of one study. Each trial counts once, however often it is entered, so that a
    search and its sampler can share one, and neither has to know what the other has entered.

    Args:
        usual_s: of a trial, before one was seen.
    """

    def __init__(self, usual_s: float = 0.0) -> None:
        self.lessons = Lessons()
        self.costs = CostModel(usual_s)
        self._entered: set[int] = set()

    def learn(self, trial: Trial) -> None:
        """Enter a finished trial."""
        # Killed while it was being asked for, it has no configuration; failed in passing, it says nothing about it.
        if trial.number in self._entered or not trial.config or trial.result.transient:
            return
        self._entered.add(trial.number)
        self.lessons.learn(trial.result.status, trial.config)
        self.costs.learn(trial.config, trial.result)
