"""The result of `autotune.tune`: what the search found, to be looked at and to be applied."""

from __future__ import annotations

from enum import StrEnum
from html import escape
from pathlib import Path

from autotune.applied import Applied
from autotune.formatting import counts_text, describe, interval_text, rate_text, ratio_text, settings
from autotune.records import Outcome, Standing, TrialStatus
from autotune.search import SearchResult


class Ending(StrEnum):
    """What a search found out."""

    WON = "won"
    #: Nothing was shown to be faster than the baseline.
    KEPT = "kept"
    #: Nothing but the baseline could be measured.
    NO_VERDICT = "no verdict"


def ending_of(outcome: Outcome) -> Ending:
    """Return what a search found out. Everything in this package that depends on it asks here."""
    if max(outcome.best.speedup_ci95[0], outcome.best_same_batch.speedup_ci95[0]) > 1:
        return Ending.WON
    measured = outcome.trials.get(TrialStatus.COMPLETE, 0) + outcome.trials.get(TrialStatus.PRUNED, 0)
    return Ending.KEPT if measured > 1 else Ending.NO_VERDICT


class Tuned(Applied):
    """The result of a search, applied to a training as the object that `autotune.load_profile` returns.

    Attributes:
        study: the folder of the study, with ``profile.yaml`` and ``report.html``.
        outcome: the search as data, as ``autotune search --json`` prints it.
        ending: what the search found out.
    """

    def __init__(self, found: SearchResult) -> None:
        super().__init__(found.profile)
        self.study: Path = found.files.folder
        self.outcome: Outcome = found.outcome
        self.ending: Ending = ending_of(found.outcome)

    @property
    def sentence(self) -> str:
        """What the search found out, for people."""
        if self.ending is Ending.WON:
            best = self.outcome.best
            speedup, interval = ratio_text(best.speedup, best.speedup_ci95), interval_text(best.speedup_ci95)
            return f"{speedup} the baseline ({interval} with 95 % confidence)"
        if self.ending is Ending.KEPT:
            return "nothing was shown to be faster than the baseline"
        return f"no verdict: nothing but the baseline could be measured ({counts_text(self.outcome.trials)})"

    def _rows(self) -> list[tuple[str, str]]:
        """Return what is shown of it, line by line."""
        outcome = self.outcome
        baseline = outcome.baseline
        rows = [("baseline", f"{_rate(baseline)}: {settings(baseline.config)}")]
        if outcome.best.config != baseline.config:
            rows.append(("best", f"{_rate(outcome.best)}: {describe(outcome.best.config, baseline.config)}"))
        if outcome.best_same_batch.config not in (baseline.config, outcome.best.config):
            same = outcome.best_same_batch
            rows.append(("same batch", f"{_rate(same)}: {describe(same.config, baseline.config)}"))
        return [*rows, ("profile", str(self.study / "profile.yaml")), ("report", str(self.study / "report.html"))]

    def __repr__(self) -> str:
        lines = [f"{name:<11} {text}" for name, text in self._rows()]
        return "\n  ".join([f"<Tuned {self.study.name}: {self.sentence}", *lines]) + ">"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._rows())
        return f"<p><b>{escape(self.study.name)}</b>: {escape(self.sentence)}</p><table>{rows}</table>"


def _rate(standing: Standing) -> str:
    return f"{rate_text(standing.samples_per_second, standing.ci95)} samples/s"
