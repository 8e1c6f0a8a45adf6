"""What finished trials teach a search and its sampler: configurations to avoid, and the duration of trials."""

from __future__ import annotations

import math

from autotune.base.records import StudyHeat, Trial, TrialStatus
from autotune.samplers.cost import CostModel
from autotune.space import Lessons, key

#: How an entrant of a heat fails for a reason of its own, by the heat's side.
_LESSONS = {
    "device": (TrialStatus.OOM, TrialStatus.COMPILE_FAILED, TrialStatus.DIVERGED),
    "loader": (TrialStatus.SHM_EXHAUSTED,),
}


class Experience:
    """Lessons and costs from the trials of one study.

    A trial or a heat entered several times counts once, so that a search and its sampler can share an instance without
    coordination.

    Args:
        usual_s, compile_limit_s, must_compile: see `CostModel`.
    """

    def __init__(self, usual_s: float = 0.0, *, compile_limit_s: float = math.inf, must_compile: bool = False) -> None:
        self.lessons = Lessons()
        self.costs = CostModel(usual_s, compile_limit_s=compile_limit_s, must_compile=must_compile)
        self._entered: set[int] = set()
        self._heats: set[int] = set()
        #: Keys of the configurations that have completed a trial.
        self.ran: set[str] = set()

    def learn_heat(self, heat: StudyHeat) -> None:
        """Learn from a heat that has ended."""
        if heat.number in self._heats:
            return
        self._heats.add(heat.number)
        for entrant in heat.heat.entrants:
            # What has run in a process of its own will run there again, whatever happened among others; and what takes
            # long there, or much of the host's memory, may not do so alone.
            if key(entrant.config) not in self.ran and (
                entrant.status in _LESSONS[heat.heat.side] or entrant.refuses is not None
            ):
                self.lessons.learn(
                    entrant.status,
                    entrant.config,
                    cannot_compile=entrant.cannot_compile,
                    refuses=entrant.refuses,
                )
            self.costs.learn_entrant(entrant)

    def learn(self, trial: Trial) -> None:
        """Learn from a finished trial."""
        # A trial killed while it was created has no configuration; a transient failure says nothing about it.
        if trial.number in self._entered or not trial.config or trial.result.transient:
            return
        self._entered.add(trial.number)
        if trial.result.status is TrialStatus.COMPLETE:
            self.ran.add(key(trial.config))
        self.lessons.learn(
            trial.result.status,
            trial.config,
            cannot_compile=trial.result.cannot_compile,
            refuses=trial.result.refuses,
        )
        self.costs.learn(trial.config, trial.result)
