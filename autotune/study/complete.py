"""The complete trials of a study: what they score, which of them is ahead, and how much launches scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autotune import stats
from autotune.base.errors import UnscoredError
from autotune.base.records import Config, Measurement, Trial, TrialStatus
from autotune.space.requirements import Requirements
from autotune.samplers.auto.rates import MOSTLY_DEVICE
from autotune.workload.scoring import Scorer
from autotune.space import Space, key


class TrialScores:
    """Scores trials by the objectives of a study.

    Args:
        further: of further objectives, which Optuna's samplers consider, too.
        by_rate: the search is for the rate itself.
        baseline: its score must be known.
        says: called with a sentence about a trial that has none.
    """

    def __init__(
        self,
        scorer: Scorer,
        further: Sequence[Scorer],
        *,
        by_rate: bool,
        baseline: Config,
        says: Callable[[str], None],
    ) -> None:
        self._scorer = scorer
        self._further = further
        self._by_rate = by_rate
        self._baseline = baseline
        self._says = says

    def fields(self, trial: Trial, measurement: Measurement) -> dict[str, Any]:
        """Return a trial's scores as its fields; none if an objective lacks a figure of this launch, as when a counter
        did not answer once.

        Raises:
            UnscoredError: it is the baseline.
        """
        try:
            score = measurement.samples_per_s if self._by_rate else self._scorer.score(measurement)
            return {"score": score, "further": tuple(other.score(measurement) for other in self._further)}
        except UnscoredError as error:
            if key(trial.config) == key(self._baseline):
                raise
            self._says(f"trial {trial.number} has no score: {error}")
            return {}

    def judged(self, measurement: Measurement) -> float:
        """Return what a launch scores by an objective that chooses among the fastest; 0 if that is not known."""
        return self._scorer.known(measurement) or 0.0


class CompleteTrials:
    """The trials that have a score.

    Args:
        reference: the configuration of the baseline. required: what the winner must meet.
        usual: what launches scatter by, until repeats have shown it.

    Attributes:
        baseline: the baseline's first complete trial: trial 0, or the one that repeated it; ``None`` before that.
        ordered: all of them, best first; those that do not meet what is required come last.
    """

    def __init__(self, reference: Config, required: Requirements, usual: stats.LaunchNoise) -> None:
        self.baseline: Trial | None = None
        self.ordered: list[Trial] = []
        self._reference = reference
        self._required = required
        self._usual = usual
        #: Rates of each configuration's complete trials.
        self._launched: dict[str, list[stats.Rate]] = {}

    @property
    def noise(self) -> stats.LaunchNoise:
        """Variation between launches of equal configurations, from repeated launches, or else the usual value."""
        repeated = [rates for rates in self._launched.values() if len(rates) > 1]
        return stats.launch_noise(repeated, prior=self._usual)

    @property
    def best(self) -> Trial | None:
        return next(iter(self.ordered), None)

    @property
    def ends(self) -> list[Trial]:
        """The baseline's trial, and the best one of several."""
        best = self.ordered[:1] if len(self.ordered) > 1 else []
        return [trial for trial in (self.baseline, *best) if trial is not None]

    @property
    def fitting(self) -> list[Trial]:
        """Those that meet what is required."""
        return [trial for trial in self.ordered if self._required.allow(trial)]

    def enter(self, trial: Trial) -> None:
        """Enter a trial, if it is complete."""
        measurement = trial.result.measurement
        if trial.result.status is not TrialStatus.COMPLETE or trial.score is None:
            return
        self.ordered.append(trial)
        self.ordered.sort(key=lambda t: (not self._required.allow(t), -(t.score or 0.0)))
        if self.baseline is None and key(trial.config) == key(self._reference):
            self.baseline = trial
        if measurement is not None:
            rate = stats.Rate(measurement.samples_per_s, *measurement.ci95_per_s)
            self._launched.setdefault(key(trial.config), []).append(rate)

    def leave_out(self, is_wrong: Callable[[Config], bool]) -> None:
        """Leave out configurations that do not train as they should."""
        self.ordered = [trial for trial in self.ordered if not is_wrong(trial.config)]


def is_device_bound(space: Space, trials: Sequence[Trial]) -> bool:
    """Return whether the baseline hardly waits for its loader, so that what its device gains is a gain."""
    seen = [t.result.measurement for t in trials if t.config and key(t.config) == key(space.baseline)]
    waits = [m.loader_wait_fraction for m in seen if m is not None]
    return any(part is not None and part <= MOSTLY_DEVICE for part in waits)
