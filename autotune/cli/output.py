"""Output of commands: one JSON object on stdout, or a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType

from autotune.base.errors import MachineError, UnknownNameError, UsageError
from autotune.base.files import write_atomic
from autotune.base.records import SCHEMA_VERSION
from autotune.report.terminal import FILE_WIDTH


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON object on stdout."""
    typer.echo(json.dumps(value, allow_nan=False))


def print_json_error(message: str, exit_code: int, *, advice: str | None = None, detail: str | None = None) -> None:
    """Print an error as the one object of a command that was asked for JSON."""
    error = {"message": message, "advice": advice, "detail": detail, "exit_code": exit_code}
    print_json({"schema_version": SCHEMA_VERSION, "error": error})


def print_rich(renderable: RenderableType, *, stderr: bool = False) -> None:
    """Print tables and texts, for people: as wide as the terminal, or `FILE_WIDTH` columns wide into a pipe or a file.

    What is meant to be copied may be longer than a line, so nothing is cropped.
    """
    _console(stderr=stderr).print(renderable, crop=False)


def text_width() -> int:
    """Return how many columns `print_rich` has on stdout."""
    return _console(stderr=False).width


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False)


def format_of(typed: str | None, output: Path | None, endings: Mapping[str, str], default: str) -> str:
    """Return the format of a command's output: the one typed, else the one that the file's ending stands for.

    Args:
        endings: each ending with its format, such as ``".md": "markdown"``. All formats are among the values.
        default: the format of stdout, or of a file without an ending.

    Raises:
        UnknownNameError: there is no such format.
        UsageError: the file's ending stands for none.
    """
    if typed is not None:
        if typed not in endings.values():
            raise UnknownNameError("format", typed, set(endings.values()))
        return typed
    if output is None or not output.suffix:
        return default
    if output.suffix.lower() not in endings:
        known = ", ".join(dict.fromkeys(endings.values()))
        raise UsageError(
            f"{output.name} would be a format that is not written here",
            advice=f"end it in {' or '.join(endings)}, or choose with --format ({known}).",
        )
    return endings[output.suffix.lower()]


def print_bytes(text: str) -> None:
    """Print what may be redirected to a file, as UTF-8 whatever the terminal's encoding is."""
    typer.echo(text.encode("utf-8", "backslashreplace"), nl=False)


def write_output(output: Path, text: str) -> None:
    """Write a command's output to a file, and name the file on stderr.

    Raises:
        UsageError: the file's folder does not exist, or the file is a device or a pipe.
        MachineError: the file cannot be written.
    """
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {str(output.parent)!r} to write {output.name} into")
    if output.is_symlink() or (output.exists() and not output.is_file() and not output.is_dir()):
        # Replacing a link, a device or a pipe (/dev/stdout, /dev/null) by a file would break it for everybody.
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise MachineError(f"{output} cannot be written: {error.strerror}") from error
    else:
        write_atomic(output, text)
    typer.echo(f"wrote {output}", err=True)
