"""`autotune.tune` and `autotune.resume`: a search from a script or a notebook.

They take what ``autotune search`` and ``autotune resume`` take, and show the same progress. They import neither torch
nor the user's code: functions given as the workload are only read, a model and a data set only pickled, and both run
in the search's processes.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.base.clock import SystemClock, timestamp
from autotune.base.errors import AutotuneError, InterruptedSearch, ResumeRefusedError, UnknownNameError, UsageError
from autotune.base.layout import DEFAULT_STUDIES, find_daemon
from autotune.base.observer import Observer
from autotune.profile.in_force import Store
from autotune.report.panel import observer_for
from autotune.search import Environment, SearchResult, find_study
from autotune.search import resume as resume_study
from autotune.search import search as search_study
from autotune.search.tuning.study import NotebookPanel, Study, in_notebook, open_study
from autotune.search.tuning.workload_file import carried_argument, is_live, model_argument
from autotune.study.request import OPTIONS, SearchOption, spec_of

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
        parsed = _parsed(options)
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


def _parsed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options by name, as the command line's parser would have returned them."""
    parsed = {}
    for name, value in options.items():
        if name not in ARGUMENTS:
            raise UnknownNameError("argument of autotune.tune", name, ARGUMENTS)
        if value is not None:
            parsed[ARGUMENTS[name].name] = ARGUMENTS[name].parsed(value)
    return parsed


def _model(model: object, others: Mapping[str, object | None], studies: Path) -> str:
    given = [name for name, function in others.items() if function is not None]
    if isinstance(model, str | os.PathLike):
        if given:
            raise UsageError(f"{', '.join(given)} cannot be given beside a name or a file", advice="leave them out.")
        return str(ARGUMENTS["model"].parsed(model))
    if not given and not is_live("model", model) and not _is_function(model):
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


def _is_function(model: object) -> bool:
    """Return whether it may be the first of four functions, and is no workload as a whole."""
    return callable(model) and not isinstance(model, type) and not hasattr(model, "dataset")


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
        return study
    if found.outcome.evidence is not None:
        return study
    try:
        Store(find_daemon().profiles).keep(profile)
    except AutotuneError as error:
        warnings.warn(f"the profile is not kept with the others: {error}", stacklevel=3)
    return study


def _document() -> None:
    """Add the options to the signature and the documentation of `tune`, from their one declaration."""
    by_hand = inspect.signature(tune, eval_str=False)
    own = {n: p for n, p in by_hand.parameters.items() if p.kind is not p.VAR_KEYWORD}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=one.default)
        for name, one in ARGUMENTS.items()
        if name not in own
    ]
    tune.__signature__ = by_hand.replace(parameters=[*own.values(), *added])  # type: ignore[attr-defined]
    lines = [
        f"{name}: {one.help.replace('; may be repeated', '')} Takes {one.spelling.takes}."
        for name, one in ARGUMENTS.items()
        if name not in own
    ]
    head, args, rest = (tune.__doc__ or "").partition("        options: as below.\n")
    if args:
        tune.__doc__ = head + "".join(f"        {line}\n" for line in lines) + rest


_document()
