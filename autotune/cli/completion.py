"""Shell completion: studies, models, formats, and knobs with their values.

Runs nothing and needs no torch.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import typer

from autotune.base import tracking
from autotune.base.errors import AutotuneError
from autotune.base.layout import DEFAULT_STUDIES
from autotune.knobs import KNOBS, spell
from autotune.knobs.knob import doubled
from autotune.profile.export import FORMATS
from autotune.samplers import SAMPLERS
from autotune.workload.catalog import declared_knobs, find_workload, objective_names, torchvision_names, workload_names

#: Set by the shell's completion function.
_ASKED = "_AUTOTUNE_COMPLETE"
#: Largest integer that is offered.
_LARGEST = 64


def studies(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the studies in ``--studies-dir``."""
    folder = Path(ctx.params.get("studies_dir") or DEFAULT_STUDIES).expanduser()
    return _fitting((request.parent.name for request in folder.glob("*/study.yaml")), incomplete)


def models(incomplete: str) -> list[str]:
    """Return catalog names, Python files and folders; torchvision's names only once something is typed."""
    names = {*workload_names(), *(torchvision_names() if incomplete else ())}
    return [*_fitting(names, incomplete), *_files(incomplete)]


def objectives(incomplete: str) -> list[str]:
    """Return catalog names, Python files and folders."""
    return [*_fitting(objective_names(), incomplete), *_files(incomplete)]


def samplers(incomplete: str) -> list[str]:
    """Return the names of the samplers."""
    return _fitting(SAMPLERS, incomplete)


def formats(incomplete: str) -> list[str]:
    """Return the names of the formats of ``autotune export``, Python files and folders."""
    return [*_fitting(FORMATS, incomplete), *_files(incomplete)]


def trackers(incomplete: str) -> list[str]:
    """Return the names of the experiment trackers."""
    return _fitting(tracking.names(), incomplete)


def knobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ``KNOB=`` for every knob that fits, or ``KNOB=VALUE`` if only one does."""
    values = _values(ctx)
    name, equals, typed = incomplete.partition("=")
    names = [name] if equals else _fitting(values, name)
    if not equals and len(names) != 1:
        return [f"{knob}=" for knob in names]
    # For --set: the values before the last comma are typed already.
    before, comma, last = typed.rpartition(",")
    return [
        f"{knob}={before}{comma}{value}"
        for knob in names
        for value in values.get(knob, ())
        if value.startswith(last) and value not in before.split(",")
    ]


@contextlib.contextmanager
def for_bash() -> Iterator[None]:
    """Rejoin words that bash split at ``=``, and print only the replacement of the part behind the last ``=``.

    Wraps the parsing of a command line; has no effect unless bash asks for completions.
    """
    if os.environ.get(_ASKED) != "complete_bash" or "COMP_WORDS" not in os.environ:
        yield
        return
    joined = _join_words()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            typer.echo(line.rpartition("=")[2] if "=" in joined else line)


def _join_words() -> str:
    """Rejoin the words in the environment; return the word to complete."""
    words, place = os.environ["COMP_WORDS"].split(), int(os.environ.get("COMP_CWORD") or 0)
    joined: list[str] = []
    for word in words[: place + 1]:
        if joined and (word == "=" or joined[-1].endswith("=")):
            joined[-1] += word
        else:
            joined.append(word)
    # The word to complete is empty if the shell counts one word more than there are.
    last = "" if place >= len(words) else joined[-1]
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = " ".join(joined), str(len(joined) - (last != ""))
    return last


def _values(ctx: typer.Context) -> Mapping[str, tuple[str, ...]]:
    """Return the values offered for each knob, including the workload's own."""
    values_by_knob: dict[str, tuple[str, ...]] = {}
    for name, knob in KNOBS.items():
        numbers = (*((0,) if knob.minimum == 0 else ()), *doubled(max(1, knob.minimum), _LARGEST))
        values_by_knob[name] = tuple(spell(value) for value in (numbers if knob.values is None else knob.values))
    model = ctx.params.get("model")
    with contextlib.suppress(AutotuneError, OSError):
        path = find_workload(model, {}).path if isinstance(model, str) else None
        for name, values in ((declared_knobs(Path(path)) or {}) if path is not None else {}).items():
            values_by_knob[f"workload.{name}"] = tuple(spell(value) for value in values)
    return values_by_knob


def _files(incomplete: str) -> Iterator[str]:
    folder, _, start = incomplete.rpartition("/")
    base = folder + "/" if "/" in incomplete else ""
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(Path(base or ".").expanduser()), key=lambda e: e.name):
            if entry.name.startswith(start) and not entry.name.startswith((".", "__")):
                if entry.is_dir():
                    yield f"{base}{entry.name}/"
                elif entry.name.endswith(".py"):
                    yield f"{base}{entry.name}"


def _fitting(names: Iterable[str], start: str) -> list[str]:
    return sorted(name for name in names if name.startswith(start))
