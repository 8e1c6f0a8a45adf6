"""What is known of a search while it runs: its baseline, its best trial, and how many trials ended how."""

from __future__ import annotations

from collections import Counter

from autotune.formatting import describe, settings
from autotune.records import Config, Trial, TrialStatus


class Tally:
    """The search's trials so far, its baseline and its best trial."""

    def __init__(self) -> None:
        self.baseline: Trial | None = None
        self.best: Trial | None = None
        self._baseline_config: Config | None = None
        self._statuses: dict[int, TrialStatus] = {}

    def begins(self, config: Config) -> None:
        """Note that a launch begins. The first launch with a configuration runs the baseline."""
        if self._baseline_config is None and config:
            self._baseline_config = dict(config)

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
    def counts(self) -> Counter[str]:
        return Counter(status.value for status in self._statuses.values())

    def what(self, config: Config) -> str:
        """Describe a configuration by its differences from the baseline."""
        if self._baseline_config is None or config == self._baseline_config:
            return f"baseline: {settings(config)}"
        return describe(config, self._baseline_config)
