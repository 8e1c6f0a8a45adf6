"""`autotune.tune` and `autotune.resume`: a search from a script or a notebook.

They take the same options as ``autotune search`` and ``autotune resume``, and show the same progress. They import
neither torch nor the user's code: the workload is only pickled here, and runs in the search's processes.
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
from autotune.profile.store import Store
from autotune.report.panel import observer_for
from autotune.search import Environment, SearchResult, find_study
from autotune.search import resume as resume_study
from autotune.search import search as search_study
from autotune.search.tuning.study import NotebookPanel, Study, in_notebook, open_study
from autotune.search.tuning.workload_file import is_live, model_argument
from autotune.study.request import OPTIONS, SearchOption, spec_of

__all__ = ["Study", "open_study", "resume", "tune"]

#: The options of a search, by the names of the arguments of `tune`.
ARGUMENTS: dict[str, SearchOption] = {one.argument: one for one in OPTIONS if one.argument is not None}


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

    Ctrl-C ends the search with a `KeyboardInterrupt` that says how to continue; everything measured is kept.

    Args:
        model: whatever ``--model`` takes; or a module, an instance or a dictionary with the four functions of a
            workload (`autotune.workload.contract`); or a model: a `torch.nn.Module` on the CPU, or a function or class
            that creates one.
        dataset: a data set, or a function that creates one.
        optimizer: ``optimizer(model)``, which creates the optimizer.
        loss: ``loss(model, batch) -> Tensor`` of shape ``()``. Each function may take a `Context` before its other
            arguments, ``model(ctx)``, ``loss(ctx, model, batch)``, which tells it the batch size, seed and device.
            Everything is copied into the processes of the search by value (cloudpickle), and trials train copies.
        observer: receives the progress; by default it is shown in the notebook, or printed on stderr.
        options: as below.

    Returns:
        the study, which can be printed, with the profile to apply.

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
            result = search_study(spec, studies, Environment.real(observer or _progress(), stop))
        return _finished(result)
    except AutotuneError as error:
        raise _for_python(error) from None


def resume(
    study: str | os.PathLike[str],
    *,
    more_s: float | None = None,
    studies_dir: str | os.PathLike[str] = DEFAULT_STUDIES,
    observer: Observer | None = None,
) -> Study:
    """Continue an interrupted study, keeping everything measured so far; return a finished one unchanged.

    Args:
        study: its name or its folder.
        more_s: seconds to add to its budget; a finished study then continues as well.
        studies_dir: the folder that holds the studies.
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
            result = resume_study(files, Environment.real(observer or _progress(), stop), longer)
        return _finished(result)
    except AutotuneError as error:
        raise _for_python(error) from None


def _parsed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options by name, as the command line's parser would return them."""
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
    return model_argument({"model": model, **others}, studies)


def _is_function(model: object) -> bool:
    """Return whether ``model`` can be the first of the four functions rather than a whole workload."""
    return callable(model) and not isinstance(model, type) and not hasattr(model, "dataset")


def _progress() -> Observer:
    clock = SystemClock()
    return NotebookPanel(clock) if in_notebook() else observer_for(sys.stderr.isatty(), clock)


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], int | None]]:
    """Let a search end in an orderly way at Ctrl-C; yield a function that returns the signal, or ``None``.

    Only the main thread can handle signals. In any other thread, Ctrl-C keeps its effect.
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
    """Return an error in the form that a caller in Python needs.

    A traceback shows only the message and the notes, options are arguments in Python, and frames inside autotune help
    nobody.
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
    # Notes in terms of Python, and without advice that has been withdrawn.
    error.__notes__ = []
    rows = error.differences if isinstance(error, ResumeRefusedError) else ()
    for note in (error.advice, error.detail, *(f"{what}: {then} in the study, now {now}" for what, then, now in rows)):
        if note:
            error.add_note(f"{note[:1].upper()}{note[1:]}")
    return error.with_traceback(None)


def _in_python(text: str) -> str:
    """Replace the command line's options in a text by the names of `tune`'s arguments."""
    for name, option in ARGUMENTS.items():
        text = re.sub(rf"(?<![\w-]){re.escape(option.flag)}(?![\w-])", name, text)
    return text


def _finished(found: SearchResult) -> Study:
    # Warnings point to the caller of tune or resume.
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
    """Add the options to the signature and docstring of `tune`, from their single declaration."""
    signature = inspect.signature(tune, eval_str=False)
    explicit = {n: p for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
        for name, option in ARGUMENTS.items()
        if name not in explicit
    ]
    tune.__signature__ = signature.replace(parameters=[*explicit.values(), *added])  # type: ignore[attr-defined]
    lines = [
        f"{name}: {option.help.replace('; may be repeated', '')} Takes {option.spelling.python.words}."
        for name, option in ARGUMENTS.items()
        if name not in explicit
    ]
    head, args, rest = (tune.__doc__ or "").partition("        options: as below.\n")
    if args:
        tune.__doc__ = head + "".join(f"        {line}\n" for line in lines) + rest


_document()
