"""Output of commands: one JSON object on stdout, or a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from autotune.errors import UsageError
from autotune.files import write_atomic


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON object on stdout."""
    typer.echo(json.dumps(value, allow_nan=False))


def write_output(output: Path, text: str) -> None:
    """Write a command's output to a file, and name the file on stderr.

    Raises:
        UsageError: the file's folder does not exist, or the file is a device or a pipe.
        MachineError: the file cannot be written.
    """
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {str(output.parent)!r} to write {output.name} into")
    if output.exists() and not output.is_file() and not output.is_dir():
        # Replacing it, as root may, would make /dev/null a plain file.
        raise UsageError(f"{output} is a device or a pipe", advice="without -o, it is written to stdout.")
    write_atomic(output, text)
    typer.echo(f"wrote {output}", err=True)
