"""The result of `autotune.tune`: what the search found, to be looked at and to be applied."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from autotune.applied import Applied
from autotune.errors import NoVerdictError
from autotune.formatting import describe, interval_text, rate_text, ratio_text, settings
from autotune.records import Finding, Outcome, Standing
from autotune.search import SearchResult


class Tuned(Applied):
    """The result of a search, applied to a training as the object that `autotune.load_profile` returns.

    Without a verdict there is nothing to apply: every method that would raises `NoVerdictError`.

    Attributes:
        study: the folder of the study, with ``profile.yaml`` and ``report.html``.
        outcome: the search as data, as ``autotune search --json`` prints it.
        finding: what the search found.
    """

    def __init__(self, found: SearchResult) -> None:
        profile = found.profile
        self.study: Path = found.files.folder
        self.outcome: Outcome = found.outcome
        self.finding: Finding = found.outcome.found
        if profile is not None:
            super().__init__(profile)

    def __getattr__(self, name: str) -> Any:
        if name in ("profile", "config", "device"):
            raise NoVerdictError(f"nothing can be applied: {self.sentence}", advice=self.outcome.advice)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def sentence(self) -> str:
        """What the search found, for people."""
        if self.finding is Finding.FASTER:
            best = self.outcome.best
            speedup, interval = ratio_text(best.speedup, best.speedup_ci95), interval_text(best.speedup_ci95)
            return f"{speedup} the baseline ({interval} with 95 % confidence)"
        if self.finding is Finding.KEEP:
            return "nothing was shown to be faster than the baseline"
        return f"no verdict: {self.outcome.because}"

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
        files = ["report.html"] if self.outcome.profile is None else ["profile.yaml", "report.html"]
        return [*rows, *((name.partition(".")[0], str(self.study / name)) for name in files)]

    def __repr__(self) -> str:
        lines = [f"{name:<11} {text}" for name, text in self._rows()]
        return "\n  ".join([f"<Tuned {self.study.name}: {self.sentence}", *lines]) + ">"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._rows())
        return f"<p><b>{escape(self.study.name)}</b>: {escape(self.sentence)}</p><table>{rows}</table>"


def _rate(standing: Standing) -> str:
    return f"{rate_text(standing.samples_per_second, standing.ci95)} samples/s"
