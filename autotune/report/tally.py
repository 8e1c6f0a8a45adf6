"""What is known of a search while it runs: its baseline, its best trial, its trials' ends, and who leads a heat."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from autotune.space.formatting import alone, count, counts_text, describe, ratio_text, seconds_text, settings, unit_of
from autotune.base.records import Beat, Config, StudyHeat, Trial, TrialStatus

#: Entrants of a heat that are named, the fastest first.
_NAMED = 3


class Leaderboard:
    """The standing of a heat that is running, from its beats.

    Args:
        entrants: the first is the reference.
    """

    def __init__(self, entrants: Sequence[Config]) -> None:
        self._entrants = entrants
        self._logs: dict[int, list[float]] = {}

    def __len__(self) -> int:
        return len(self._entrants)

    def add(self, beat: Beat) -> None:
        if beat.turn is not None and beat.rate_per_s:
            self._logs.setdefault(beat.turn, []).append(math.log(beat.rate_per_s))

    def leaders(self) -> list[tuple[float, Config]]:
        """Return the fastest so far, each with its rate relative to the reference's; roughly, since they have not run
        in the same moments."""
        own = self._logs.get(0)
        if own is None:
            return []
        found = [(math.exp(fmean(logs) - fmean(own)), self._entrants[i]) for i, logs in self._logs.items()]
        return sorted(found, key=lambda one: -one[0])[:_NAMED]


class Tally:
    """The search's trials so far, its baseline and its best trial."""

    def __init__(self) -> None:
        self.baseline: Trial | None = None
        self.best: Trial | None = None
        self._baseline_config: Config | None = None
        self._statuses: dict[int, TrialStatus] = {}
        #: Titles of the launches that have begun in this run of the search.
        self._begun: set[str] = set()

    def begins(self, title: str, config: Config) -> None:
        """Note that a launch begins. The first launch with a configuration runs the baseline."""
        self._begun.add(title)
        if self._baseline_config is None and config:
            self._baseline_config = dict(config)

    def has_begun(self, title: str) -> bool:
        """Return whether a launch with this title has begun in this run of the search."""
        return title in self._begun

    def beside(self, title: str) -> int:
        """Return the number of trials that run beside the launch with this title."""
        ended = {f"trial {number}" for number in self._statuses}
        return sum(one.startswith("trial ") for one in self._begun - ended - {title})

    def add(self, trial: Trial) -> None:
        self._statuses[trial.number] = trial.result.status
        if trial.number == 0:
            self._baseline_config = trial.config
        if trial.score is None:
            return
        # An interrupted baseline is repeated under another trial number.
        if self.baseline is None and trial.config == self._baseline_config:
            self.baseline = trial
        if self.best is None or self.best.score is None or trial.score > self.best.score:
            self.best = trial

    @property
    def unit(self) -> str:
        return unit_of([self.baseline] if self.baseline is not None else [])

    @property
    def counts(self) -> Counter[str]:
        return Counter(status.value for status in self._statuses.values())

    def what(self, config: Config) -> str:
        """Describe a configuration by its differences from the baseline."""
        if self._baseline_config is None or config == self._baseline_config:
            return f"baseline: {settings(config)}"
        return describe(config, self._baseline_config)

    def told(self, heat: StudyHeat) -> str:
        """Return one sentence on a heat that has ended."""
        entrants = heat.heat.entrants
        measured = sorted((e for e in entrants if e.ratio is not None), key=lambda e: -(e.ratio or 0.0))
        if len(measured) < 2:
            return f"heat {heat.number} showed nothing: {heat.heat.ended}"
        named = [f"{ratio_text(e.ratio or 1.0, e.ratio_ci95)} {self.what(e.config)}" for e in measured[:_NAMED]]
        failed = Counter(e.status.value for e in entrants if e.ratio is None)
        others = f" ({counts_text(failed)})" if failed else ""
        return (
            f"heat {heat.number}: {count(len(entrants), 'configuration')}{others} in {seconds_text(heat.wall_s)}; "
            f"{alone(heat.heat.side)}, relative to {self.what(heat.heat.reference.config)}: {'; '.join(named)}"
        )
