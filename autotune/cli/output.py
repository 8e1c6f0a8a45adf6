"""The output of commands."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import mmap
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console, RenderableType

from autotune.base.clock import SystemClock
from autotune.base.errors import SIGNALS, AutotuneError, MachineError, NoVerdictError, UnknownNameError, UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import find_daemon
from autotune.base.observer import Observer
from autotune.base.records import SCHEMA_VERSION, StudySpec
from autotune.launcher.remote import Workers
from autotune.profile import Profile
from autotune.profile.in_force import Store
from autotune.report import best_table, to_html, to_markdown, to_text
from autotune.report.document import FILE_WIDTH, FittingTable
from autotune.report.panel import observer_for
from autotune.search import Environment, SearchResult
from autotune.study.tables import read_trials


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON object on stdout."""
    typer.echo(json.dumps(value, allow_nan=False))


def print_json_error(message: str, exit_code: int, *, advice: str | None = None, detail: str | None = None) -> None:
    """Print an error as the only object of a command with ``--json``."""
    error = {"message": message, "advice": advice, "detail": detail, "exit_code": exit_code}
    print_json({"schema_version": SCHEMA_VERSION, "error": error})


def print_rich(renderable: RenderableType, *, stderr: bool = False) -> None:
    """Print tables and texts for people: as wide as the terminal, or `FILE_WIDTH` columns wide into a pipe or a file.

    Text to be copied may be longer than a line, so nothing is cropped.
    """
    _console(stderr=stderr).print(renderable, crop=False)


def plain_table(*columns: str, wrap: Collection[str] = ()) -> FittingTable:
    """Return a table without lines, in which only the columns in ``wrap`` wrap."""
    table = FittingTable(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=name not in wrap, overflow="fold")
    return table


def text_width() -> int:
    """Return the number of columns that `print_rich` has on stdout."""
    return _console(stderr=False).width


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False)


#: Function that renders a document in each format as text, and the format of each ending.
RENDERERS = {"terminal": to_text, "markdown": to_markdown, "html": to_html}
ENDINGS = {".md": "markdown", ".markdown": "markdown", ".txt": "terminal", ".html": "html", ".htm": "html"}


def format_of(typed: str | None, output: Path | None, endings: Mapping[str, str], default: str) -> str:
    """Return the format of a command's output: the one typed, or else the one that belongs to the file's ending.

    Args:
        endings: the format of each ending, such as ``".md": "markdown"``. All formats are among the values.
        default: the format of stdout, or of a file without an ending.

    Raises:
        UnknownNameError: there is no such format.
        UsageError: no format belongs to the file's ending.
    """
    if typed is not None:
        if typed not in endings.values():
            raise UnknownNameError("format", typed, set(endings.values()))
        return typed
    if output is None or not output.suffix:
        return default
    if output.suffix.lower() not in endings:
        formats = ", ".join(dict.fromkeys(endings.values()))
        raise UsageError(
            f"{output.name} would be a format that is not written here",
            advice=f"end it in {' or '.join(endings)}, or choose with --format ({formats}).",
        )
    return endings[output.suffix.lower()]


def print_bytes(text: str) -> None:
    """Print text that may be redirected to a file, as UTF-8 regardless of the terminal's encoding."""
    typer.echo(text.encode("utf-8", "backslashreplace"), nl=False)


def write_output(output: Path | None, text: str) -> None:
    """Write a command's output to a file, and name the file on stderr; print it if there is none.

    Raises:
        UsageError: the file's folder does not exist.
        MachineError: the file cannot be written.
    """
    if output is None:
        print_bytes(text)
        return
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {str(output.parent)!r} to write {output.name} into")
    if output.is_symlink() or (output.exists() and not output.is_file() and not output.is_dir()):
        # Replacing a link, device or pipe (/dev/stdout, /dev/null) with a file would break it for everybody.
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise MachineError(f"{output} cannot be written: {error.strerror}") from error
    else:
        write_atomic(output, text)
    typer.echo(f"wrote {output}", err=True)


# The standard streams of a command, made to work whatever the caller has connected to them.

#: Replacements for characters that a stream's encoding lacks. The blocks of a curve become their heights.
_PLAIN = {
    **{ord(character): str(height) for height, character in enumerate("▁▂▃▄▅▆▇█", 1)},
    **{ord("×"): "x", ord("±"): "+-", ord("·"): "-", ord("…"): "...", ord("→"): "->", ord("–"): "-", ord("—"): "-"},
    **{ord("✓"): "+", ord("✗"): "x", ord("─"): "-", ord("━"): "=", ord("│"): "|", ord("≥"): ">=", ord("≤"): "<="},
}
_STREAMS = {1: "stdout", 2: "stderr"}


def prepare_streams() -> None:
    """Replace the standard streams with ones that never end a command for a reason unrelated to it.

    A closed descriptor is opened on ``/dev/null``: otherwise the next file to be opened would get its number, and with
    it the printed output. A reader that has left (``| head``) is sent nothing more. A character that the encoding lacks
    is written as a similar one. An impossible terminal size is ignored.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one, because the lower ones are open.
            os.open(os.devnull, os.O_RDWR)
    for variable in ("COLUMNS", "LINES"):
        # Shells set 0 if they do not know the size. rich believes it, like any other number.
        if not re.fullmatch("[1-9][0-9]{0,3}", os.environ.get(variable, "1")):
            del os.environ[variable]
    codecs.register_error("autotune.plain", _plain)
    for descriptor, name in _STREAMS.items():
        setattr(sys, name, _stream(descriptor, getattr(sys, name)))


def flush_streams() -> int:
    """Flush what is buffered, and return an exit code: that of `MachineError` if stdout cannot be written."""
    try:
        sys.stdout.flush()
    except MachineError as error:
        sys.stderr.write(f"autotune: {error}.\n          {error.advice}\n")
        return error.exit_code
    return 0


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(ord(c), "?") for c in error.object[error.start : error.end]), error.end


class _Descriptor(io.FileIO):
    """A descriptor that becomes ``/dev/null`` after a failed write."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, self.fileno())
            os.close(descriptor)
            if isinstance(error, BrokenPipeError) or self.fileno() != 1:
                return len(data)  # type: ignore[arg-type]
            raise MachineError(
                f"stdout cannot be written: {error.strerror}", advice="make room there, or send it elsewhere."
            ) from error


def _stream(descriptor: int, given: TextIO | None) -> TextIO:
    binary = _Descriptor(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(binary),
        encoding=given.encoding if given is not None else "utf-8",
        errors="autotune.plain",
        line_buffering=descriptor == 2 or binary.isatty(),
    )


# Shared by the commands that run a search: signal handling, the environment, and the output at the end.


class StopSignal:
    """The first signal received by a process, or by those forked from it that have joined.

    Any other process that is forked, such as one of a pool of the workload's, is ended by a signal as ever.
    """

    def __init__(self) -> None:
        self._received = mmap.mmap(-1, 1)
        self._joined = {os.getpid()}

    def __call__(self) -> int | None:
        return self._received[0] or None

    def join(self) -> None:
        """Share the signals of this process with the one that it was forked from."""
        self._joined.add(os.getpid())

    def receive(self, number: int, otherwise: Any) -> None:
        """Note a signal, or set its former handler again and receive it once more."""
        data = sys.modules.get("torch.utils.data")
        if os.getpid() in self._joined:
            self._received[0] = self._received[0] or number
        elif data is None or data.get_worker_info() is None:
            # The workers of loaders go on until their training has ended.
            signal.signal(number, otherwise)
            os.kill(os.getpid(), number)


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Record signals instead of dying from them; yield what tells the first one received."""
    stop, before = StopSignal(), {int(number): signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: stop.receive(number, before[number]))
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def environment(stop: Callable[[], int | None]) -> Environment:
    """Return the environment of a search on this machine, with a live panel if stderr is a terminal."""
    observer: Observer = observer_for(sys.stderr.isatty(), SystemClock())
    return replace(Environment.real(observer, stop), workers=_workers)


def _workers(spec: StudySpec, mark: str) -> Workers:
    # Imported on demand: most searches have no cluster.
    from autotune.cluster.ray_workers import RayWorkers

    return RayWorkers(spec, mark)


def end_search(found: SearchResult, *, as_json: bool) -> None:
    """Add the profile of a finished search to the profile store, and print the outcome.

    Raises:
        typer.Exit: there is no verdict.
    """
    profile = found.profile
    if profile is not None and found.outcome.evidence is None:
        _keep_profile(profile)
    if as_json:
        print_json(found.outcome.model_dump(mode="json"))
    else:
        print_rich(best_table(found.outcome, read_trials(found.files), Path.cwd()))
    if profile is None:
        raise typer.Exit(NoVerdictError.exit_code)


def _keep_profile(profile: Profile) -> None:
    """Add the profile to the store that `autotune profiles` and ``load_profile(model=…)`` read."""
    try:
        Store(find_daemon().profiles).keep(profile)
    except AutotuneError as error:
        # The search is finished, and its profile is in the study's folder in any case.
        typer.echo(f"autotune: the profile is not kept with the others: {error}", err=True)
