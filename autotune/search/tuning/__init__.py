"""`autotune.tune` and `autotune.resume`: a search from a script or a notebook, and a study as a Python object.

They take what ``autotune search`` and ``autotune resume`` take, and show the same progress. They import neither torch
nor the user's code: functions given as the workload are only read, a model and a data set only pickled, and both run
in the search's processes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.panel import Panel
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from autotune.base.clock import Clock, SystemClock, timestamp
from autotune.base.errors import (
    AutotuneError,
    InterruptedSearch,
    NoVerdictError,
    ResumeRefusedError,
    UnknownNameError,
    UsageError,
)
from autotune.base.files import write_atomic
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles, find_daemon
from autotune.base.observer import Observer
from autotune.base.records import Finding, Outcome, Standing, Trial
from autotune.knobs import KNOBS
from autotune.profile import Profile, read
from autotune.profile.in_force import Store
from autotune.report import best_so_far_line, read_material, report_on, to_html
from autotune.report.panel import LivePanel, PanelConsole, observer_for
from autotune.search import Environment, SearchResult, find_study, load_outcome
from autotune.search import resume as resume_study
from autotune.search import search as search_study
from autotune.search.study_folders import study_argument
from autotune.search.tuning.workload_file import carried_argument, is_live, model_argument
from autotune.space.formatting import describe, interval_text, likely_by, one_line, rate_text, ratio_text, settings
from autotune.study.request import OPTIONS, SearchOption, read_request, spec_of
from autotune.study.tables import read_trials
from autotune.training.applied import Applied, differences_in_words

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Study", "open_study", "resume", "tune"]

#: The options of a search by the names of the arguments of `tune`.
ARGUMENTS: dict[str, SearchOption] = {one.keyword: one for one in OPTIONS if one.keyword is not None}


def tune(
    model: object,
    dataset: object | None = None,
    *,
    optimizer: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Study:
    """Search for the fastest way to train a workload on this machine.

    Ctrl-C ends the search with a `KeyboardInterrupt` that says how to go on; everything measured is kept.

    Args:
        model: what ``--model`` takes; or a module, an instance or a dictionary with the four functions of a workload
            (`autotune.workload.contract`); or a model: a `torch.nn.Module` on the CPU, or a function or class that
            makes one.
        dataset: a data set, or a function that makes one.
        optimizer: ``optimizer(model)``, makes the optimizer.
        loss: ``loss(model, batch) -> Tensor`` of shape ``()``. Each function may take a `Context` before its other
            arguments, ``model(ctx)``, ``loss(ctx, model, batch)``: by it they learn of batch size, seed and device.
            Functions are written as source for the processes of the search; beside a model or a data set that exists
            already, everything is copied by value (cloudpickle), and trials train copies.
        observer: receives the progress; by default it is shown in the notebook, or printed on stderr.
        options: as below.

    Returns:
        the study, which can be printed, with the profile to be applied.

    Raises:
        AutotuneError: see `autotune.base.errors`.
        KeyboardInterrupt: after Ctrl-C.
    """
    try:
        parsed = {}
        for name, value in options.items():
            if name not in ARGUMENTS:
                raise UnknownNameError("argument of autotune.tune", name, ARGUMENTS)
            if value is not None:
                parsed[ARGUMENTS[name].name] = ARGUMENTS[name].parsed(value)
        studies: Path = parsed.get("studies_dir", DEFAULT_STUDIES)
        parsed["model"] = _model(model, {"dataset": dataset, "optimizer": optimizer, "loss": loss}, studies)
        spec = spec_of(parsed, mark=uuid.uuid4().hex, created=timestamp())
        with _ctrl_c() as stop:
            found = search_study(spec, studies, Environment.real(observer or _progress(), stop))
        return _finished(found)
    except AutotuneError as error:
        raise _for_python(error) from None


def resume(
    study: str | os.PathLike[str],
    *,
    more_s: float | None = None,
    studies_dir: str | os.PathLike[str] = DEFAULT_STUDIES,
    observer: Observer | None = None,
) -> Study:
    """Go on with a study that was interrupted, with everything measured so far; return a finished one as it is.

    Args:
        study: its name or its folder.
        more_s: seconds by which its budget is lengthened; a finished study goes on as well.
        studies_dir: folder that holds the studies.
        observer: receives the progress; by default it is shown in the notebook, or printed on stderr.

    Raises:
        AutotuneError: see `autotune.base.errors`.
        KeyboardInterrupt: after Ctrl-C.
    """
    try:
        if more_s is not None and not more_s > 0:
            raise UsageError(f"more_s is to be above zero, not {more_s!r}")
        files = find_study(os.fspath(study), Path(studies_dir))
        longer = None if more_s is None else lambda before_s: before_s + more_s
        with _ctrl_c() as stop:
            found = resume_study(files, Environment.real(observer or _progress(), stop), longer)
        return _finished(found)
    except AutotuneError as error:
        raise _for_python(error) from None


def _model(model: object, others: Mapping[str, object | None], studies: Path) -> str:
    given = [name for name, function in others.items() if function is not None]
    if isinstance(model, str | os.PathLike):
        if given:
            raise UsageError(f"{', '.join(given)} cannot be given beside a name or a file", advice="leave them out.")
        return str(ARGUMENTS["model"].parsed(model))
    # The first of four functions, and no workload as a whole.
    is_function = callable(model) and not isinstance(model, type) and not hasattr(model, "dataset")
    if not given and not is_live("model", model) and not is_function:
        return model_argument(model, studies)
    missing = [name for name in others if name not in given]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} must be given too",
            advice="a workload has four parts: autotune.tune(model, dataset, optimizer=…, loss=…).",
        )
    parts = {"model": model, **others}
    if any(is_live(name, part) for name, part in parts.items()):
        return carried_argument(parts, studies)
    return model_argument(parts, studies)


def _progress() -> Observer:
    clock = SystemClock()
    return NotebookPanel(clock) if in_notebook() else observer_for(sys.stderr.isatty(), clock)


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], int | None]]:
    """Let a search end in order at Ctrl-C; yield a function that returns the signal, or ``None``.

    Only the main thread can receive signals. In another one, Ctrl-C does what it did before.
    """
    received: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number)) if main else None
    try:
        yield lambda: received[0] if received else None
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


def _for_python(error: AutotuneError) -> BaseException:
    """Return an error as a caller in Python needs it.

    A traceback shows nothing but the message and the notes, options are arguments there, and the frames inside autotune
    tell nobody anything.
    """
    if isinstance(error, InterruptedSearch):
        if error.study is None:
            return KeyboardInterrupt("interrupted before the study began; nothing was measured")
        return KeyboardInterrupt(
            f"everything measured is kept; go on with autotune.resume({error.study!r}), "
            f"or in a shell with: autotune resume {error.study}"
        )
    error.args = (_in_python(str(error)),)
    error.advice = None if error.advice is None else _in_python(error.advice)
    # In the words of Python, and without advice that was taken back.
    error.__notes__ = []
    rows = error.differences if isinstance(error, ResumeRefusedError) else ()
    for note in (error.advice, error.detail, *(f"{what}: {then} in the study, now {now}" for what, then, now in rows)):
        if note:
            error.add_note(f"{note[:1].upper()}{note[1:]}")
    return error.with_traceback(None)


def _in_python(text: str) -> str:
    """Name the arguments of `tune` instead of the command line's options."""
    for name, one in ARGUMENTS.items():
        text = re.sub(rf"(?<![\w-]){re.escape(one.flag)}(?![\w-])", name, text)
    return text


def _finished(found: SearchResult) -> Study:
    # Warnings point at the caller of tune or resume.
    profile = found.profile
    study = Study(found.files, found.outcome, profile)
    if profile is None:
        warnings.warn(f"{study.sentence}; {found.outcome.advice}", stacklevel=3)
    elif found.outcome.evidence is None:
        try:
            Store(find_daemon().profiles).keep(profile)
        except AutotuneError as error:
            warnings.warn(f"the profile is not kept with the others: {error}", stacklevel=3)
    return study


def _document() -> None:
    """Add the options to the signature and the documentation of `tune`, from their one declaration."""
    by_hand = inspect.signature(tune, eval_str=False)
    own = {n: p for n, p in by_hand.parameters.items() if p.kind is not p.VAR_KEYWORD}
    more = {name: one for name, one in ARGUMENTS.items() if name not in own}
    by_name = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, by_name, default=one.default) for name, one in more.items()]
    tune.__signature__ = by_hand.replace(parameters=[*own.values(), *added])  # type: ignore[attr-defined]
    lines = [
        f"{name}: {one.help.replace('; may be repeated', '')} Takes {one.spelling.takes}." for name, one in more.items()
    ]
    head, args, rest = (tune.__doc__ or "").partition("        options: as below.\n")
    if args:
        tune.__doc__ = head + "".join(f"        {line}\n" for line in lines) + rest


_document()


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
        if self.outcome is None:
            return [("folder", str(self.folder))]
        baseline, best, same = self.outcome.baseline, self.outcome.best, self.outcome.best_same_batch
        rows = [("baseline", f"{self._rate(baseline)}: {settings(baseline.config)}")]
        if best.config != baseline.config:
            rows.append(("best", f"{self._rate(best)}: {describe(best.config, baseline.config)}"))
        if same.config not in (baseline.config, best.config):
            rows.append(("same batch", f"{self._rate(same)}: {describe(same.config, baseline.config)}"))
        if self.outcome.profile is not None:
            rows.append(("profile", str(self._files.profile)))
        return [*rows, ("report", str(self._files.report))]

    def _rate(self, standing: Standing) -> str:
        unit = "" if self.outcome is None else self.outcome.unit
        return f"{rate_text(standing.samples_per_second, standing.ci95)} {unit}"

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
    rows = []
    for trial in trials:
        result, measurement = trial.result, trial.result.measurement
        low, high = (None, None) if measurement is None else measurement.ci95_per_s
        row = {
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
        rows.append(row)
    return rows


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
            plain, page = list(self._said), "".join(f"<div>{escape(sentence)}</div>" for sentence in self._said)
            if panel is not None:
                console = _console()
                console.print(panel)
                page += console.export_html(theme=_COLOURS, inline_styles=True, code_format=_PAGE)
                plain += [panel.renderable.plain] if isinstance(panel.renderable, Text) else []
            content = {"text/plain": "\n".join(plain), "text/html": page}
            if self._output is None:
                self._output = display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call, unused-ignore]
            else:
                self._output.update(content, raw=True)


def _console() -> PanelConsole:
    # By default, rich would show whatever is printed to the console in the notebook.
    return PanelConsole(file=io.StringIO(), width=_WIDTH, record=True, force_terminal=True, force_jupyter=False)
