"""Output of commands: one JSON object on stdout, or a file."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType

from autotune.errors import UsageError
from autotune.files import write_atomic
from autotune.report.terminal import FILE_WIDTH

#: Far wider than any terminal; a rule across the page is as long as the page is wide.
_WIDEST = 2000


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON object on stdout."""
    typer.echo(json.dumps(value, allow_nan=False))


def print_rich(renderable: RenderableType, *, stderr: bool = False) -> None:
    """Print tables and texts, for people: as wide as the terminal, or `FILE_WIDTH` columns wide into a pipe or a file.

    What is meant to be copied may be longer than a line, so nothing is cropped.
    """
    columns = os.environ.get("COLUMNS", "")
    stream = sys.stderr if stderr else sys.stdout
    width = None
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        width = min(int(columns[:9]), _WIDEST)
    elif stream.isatty():
        # rich takes COLUMNS=0, which shells set where they do not know, at its word.
        width = shutil.get_terminal_size().columns
    Console(stderr=stderr, width=width or FILE_WIDTH, highlight=False, markup=False).print(renderable, crop=False)


def write_output(output: Path, text: str) -> None:
    """Write a command's output to a file, and name the file on stderr.

    Raises:
        UsageError: the file's folder does not exist.
        MachineError: the file cannot be written.
    """
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {str(output.parent)!r} to write {output.name} into")
    write_atomic(output, text)
    typer.echo(f"wrote {output}", err=True)
