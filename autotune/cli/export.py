"""``autotune export``: write the profile of a finished study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import StudiesDir, Study
from autotune.cli.output import format_of, print_bytes, write_output
from autotune.errors import UsageError
from autotune.layout import DEFAULT_STUDIES
from autotune.profile import export as export_profile
from autotune.profile import read
from autotune.search import find_study

_ENDINGS = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def export(
    study: Study,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout if not given.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="yaml or json.  [default: json for a .json file, else yaml]")
    ] = None,
    studies_dir: StudiesDir = DEFAULT_STUDIES,
) -> None:
    """Write the profile of a finished study."""
    chosen = format_of(format_, output, _ENDINGS, "yaml")
    files = find_study(study, studies_dir)
    if not files.profile.exists():
        raise UsageError(f"{files.name} has no profile yet", advice=f"finish it with: autotune resume {study}")
    text = export_profile(read(files.profile), chosen)
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        print_bytes(text)
    else:
        write_output(output, text)
