"""A study as a Python object."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.panel import Panel
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from autotune.base.clock import Clock
from autotune.base.errors import NoVerdictError
from autotune.base.files import write_atomic
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.base.records import Finding, Outcome, Standing, Trial
from autotune.knobs import KNOBS
from autotune.profile import Profile, read
from autotune.report import best_so_far_line, read_material, report_on, to_html
from autotune.report.panel import LivePanel, PanelConsole
from autotune.search import find_study, load_outcome
from autotune.search.study_folders import study_argument
from autotune.space.formatting import describe, interval_text, likely_by, one_line, rate_text, ratio_text, settings
from autotune.study.request import read_request
from autotune.study.tables import read_trials
from autotune.training.applied import Applied, differences_in_words

if TYPE_CHECKING:
    import pandas as pd

# The result of `autotune.tune`: a study to look at, with the profile to apply.


class Study:
    """A study: what a search found, its trials, its report, and its profile.

    Attributes:
        name: the study's name, as `autotune.open_study` and the commands take it.
        folder: the study's folder, with ``profile.yaml`` and ``report.html``.
        outcome: the search as data, as ``autotune search --json`` prints it; ``None`` until it is finished.
    """

    def __init__(self, files: StudyFiles, outcome: Outcome | None, profile: Profile | None = None) -> None:
        self.name: str = study_argument(files)
        self.folder: Path = files.folder
        self.outcome: Outcome | None = outcome
        self._files = files
        self._profile = profile
        self._applied: Applied | None = None

    @property
    def finding(self) -> Finding | None:
        """What the search found; ``None`` until it is finished."""
        return self.outcome.found if self.outcome else None

    @property
    def profile(self) -> Applied:
        """The profile as `autotune.load_profile` returns it, with the same warnings if it was measured elsewhere.

        Raises:
            NoVerdictError: there is no profile, because the search ended without a verdict or has not ended.
            ProfileError: its file cannot be read.
        """
        if self._applied is None:
            if self.outcome is None or self.outcome.found is Finding.OPEN:
                advice = self.outcome.advice if self.outcome else f"go on with autotune.resume({self.name!r})."
                # A traceback shows only the message.
                raise NoVerdictError(f"there is no profile: {self.sentence}; {advice}", advice=advice)
            applied = Applied(self._profile or read(self._files.profile))
            for sentence in differences_in_words(applied):
                warnings.warn(f"{self._files.profile}: {sentence}", stacklevel=2)
            self._applied = applied
        return self._applied

    @property
    def trials(self) -> pd.DataFrame | list[dict[str, Any]]:
        """The trials in order: a pandas DataFrame if pandas is installed, otherwise a list of dictionaries.

        Columns: ``number``, the index of the frame; ``status``; each knob by its name, empty where it has no effect;
        ``samples_per_second``, with the ends of its 95 % interval within the launch, ``ci95_low`` and ``ci95_high``;
        ``score``, the objective's; ``peak_memory_bytes``; ``seconds``, of the whole trial; ``phase``, in which it
        ended; ``cause``, of a failure; ``repeats``, the number of the trial that it repeats.

        Raises:
            MachineError: ``study.db`` cannot be read.
        """
        rows = trial_rows(read_trials(self._files))
        try:
            import pandas as pd
        except ImportError:
            return rows
        return pd.DataFrame(rows).convert_dtypes().set_index("number") if rows else pd.DataFrame()

    def report(self) -> ReportPage:
        """Return the HTML report. A notebook shows it inline; printed, it is the path of its file.

        Raises:
            MachineError: the study cannot be read, or the file cannot be written.
        """
        if self.outcome is None or not self._files.report.is_file():
            material = read_material(self._files, self.outcome, typed=self.name, folder=Path.cwd())
            write_atomic(self._files.report, to_html(report_on(material)))
        return ReportPage(self._files.report)

    @property
    def sentence(self) -> str:
        """What the search found, in words."""
        if self.outcome is None:
            so_far = best_so_far_line(read_trials(self._files), read_request(self._files))
            return "the search is not finished" + (f". {so_far.rstrip('.')}" if so_far else "")
        if self.finding in (Finding.FASTER, Finding.LIKELY):
            best = self.outcome.best
            speedup, interval = ratio_text(best.speedup, best.speedup_ci95), interval_text(best.speedup_ci95)
            likely = f", {likely_by(self.outcome.evidence)}" if self.outcome.evidence else ""
            return f"{speedup} the baseline ({interval} with 95 % confidence){likely}"
        if self.finding is Finding.KEEP:
            return "nothing was shown to be faster than the baseline"
        return f"no verdict: {self.outcome.because}"

    def _rows(self) -> list[tuple[str, str]]:
        """Return the labels and texts of the lines shown for the study."""
        if self.outcome is not None:
            rows = []
            baseline, best, same = self.outcome.baseline, self.outcome.best, self.outcome.best_same_batch
            unit = self.outcome.unit
            rows.append(("baseline", f"{_rate(baseline)} {unit}: {settings(baseline.config)}"))
            if best.config != baseline.config:
                rows.append(("best", f"{_rate(best)} {unit}: {describe(best.config, baseline.config)}"))
            if same.config not in (baseline.config, best.config):
                rows.append(("same batch", f"{_rate(same)} {unit}: {describe(same.config, baseline.config)}"))
            if self.outcome.profile is not None:
                rows.append(("profile", str(self._files.profile)))
            return [*rows, ("report", str(self._files.report))]
        return [("folder", str(self.folder))]

    def __repr__(self) -> str:
        lines = [f"{name:<11} {text}" for name, text in self._rows()]
        return "\n  ".join([f"<Study {self.folder.name}: {self.sentence}", *lines]) + ">"

    def _repr_html_(self) -> str:
        cell = "text-align: left; vertical-align: top"
        rows = "".join(
            f'<tr><th style="{cell}">{escape(name)}</th><td style="{cell}">{escape(text)}</td></tr>'
            for name, text in self._rows()
        )
        return f"<p><b>{escape(self.folder.name)}</b>: {escape(self.sentence)}</p><table>{rows}</table>"


class ReportPage(os.PathLike[str]):
    """An HTML report. Printed, it is the path of its file; a notebook shows the page.

    Attributes:
        path: the path of its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        # A frame isolates the page's styles from the notebook's. The page is embedded because the notebook may be moved
        # or opened elsewhere, without the file.
        style = "width: 100%; height: 40rem; border: 1px solid #8884; resize: vertical"
        page = escape(self.path.read_text())
        return f'<iframe title="autotune report" style="{style}" sandbox="allow-popups" srcdoc="{page}"></iframe>'


def open_study(study: str | os.PathLike[str], *, studies_dir: str | os.PathLike[str] = DEFAULT_STUDIES) -> Study:
    """Open a study to look at it. Nothing is launched, and an unfinished study stays as it is.

    Args:
        study: its name or its folder.
        studies_dir: the folder that holds the studies.

    Raises:
        UnknownNameError: there is no such study.
        MachineError: its outcome cannot be read.
    """
    files = find_study(os.fspath(study), Path(studies_dir))
    return Study(files, load_outcome(files))


def trial_rows(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return trials as rows that all have the same keys, those that `Study.trials` describes."""
    used = dict.fromkeys(name for trial in trials for name in trial.config)
    knobs = [*(name for name in KNOBS if name in used), *(name for name in used if name not in KNOBS)]
    return [_row(trial, knobs) for trial in trials]


def _row(trial: Trial, knobs: Sequence[str]) -> dict[str, Any]:
    result, measurement = trial.result, trial.result.measurement
    low, high = (None, None) if measurement is None else measurement.ci95_per_s
    return {
        "number": trial.number,
        "status": result.status.value,
        **{name: trial.config.get(name) for name in knobs},
        "samples_per_second": trial.rate_per_s,
        "ci95_low": low,
        "ci95_high": high,
        "score": trial.score,
        "peak_memory_bytes": measurement.peak_bytes if measurement else result.peak_bytes,
        "seconds": result.wall_s,
        "phase": result.phase.value if result.phase else None,
        "cause": result.cause,
        "repeats": trial.repeats,
    }


def _rate(standing: Standing) -> str:
    return rate_text(standing.samples_per_second, standing.ci95)


# Progress of a search in a notebook: the terminal's panel as HTML, in one output that is updated in place.

#: Width of the panel in columns: what fits beside the prompt of a cell.
_WIDTH = 100
_PAGE = '<pre style="white-space: pre-wrap; line-height: 1.2">{code}</pre>'
#: Black, red, green, yellow, blue, magenta, cyan and white, readable on both light and dark pages.
_COLOURS = TerminalTheme(
    (255, 255, 255),
    (0, 0, 0),
    [
        *((96, 96, 96), (215, 80, 70), (40, 150, 70), (170, 125, 0)),
        *((60, 130, 220), (160, 100, 220), (20, 140, 150), (128, 128, 128)),
    ],
)


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookPanel(LivePanel):
    """Shows progress in one output that is updated in place. When the search ends, its sentences remain.

    Needs IPython, but no widgets. A front end that cannot show HTML shows the same as text.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, _console())
        self._said: list[str] = []
        self._output: Any = None

    def says(self, sentence: str) -> None:
        self._said.append(one_line(sentence))
        self._show(None)

    def ends(self) -> None:
        super().ends()
        self._show(None)

    def _show(self, panel: Panel | None) -> None:
        from IPython.display import display

        with self._without_errors():
            content = {"text/plain": self._plain(panel), "text/html": self._html(panel)}
            if self._output is None:
                self._output = display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call, unused-ignore]
            else:
                self._output.update(content, raw=True)

    def _html(self, panel: Panel | None) -> str:
        sentences = "".join(f"<div>{escape(sentence)}</div>" for sentence in self._said)
        if panel is None:
            return sentences
        page = _console()
        page.print(panel)
        return sentences + page.export_html(theme=_COLOURS, inline_styles=True, code_format=_PAGE)

    def _plain(self, panel: Panel | None) -> str:
        lines = list(self._said)
        if panel is not None and isinstance(panel.renderable, Text):
            lines.append(panel.renderable.plain)
        return "\n".join(lines)


def _console() -> PanelConsole:
    # By default, rich would show whatever is printed to the console in the notebook.
    return PanelConsole(file=io.StringIO(), width=_WIDTH, record=True, force_terminal=True, force_jupyter=False)
