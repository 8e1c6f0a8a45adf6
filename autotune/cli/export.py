"""``autotune export``: write the profile of a finished study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import StudiesDir, Study
from autotune.cli.output import write_output
from autotune.errors import UsageError
from autotune.layout import DEFAULT_STUDIES
from autotune.profile import export as export_profile
from autotune.profile import read
from autotune.records import Finding
from autotune.search import find_study, load_outcome


def export(
    study: Study,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout if not given.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="yaml or json.  [default: json for a .json file, else yaml]")
    ] = None,
    studies_dir: StudiesDir = DEFAULT_STUDIES,
) -> None:
    """Write the profile of a finished study."""
    chosen = format_ or ("json" if output is not None and output.suffix == ".json" else "yaml")
    files = find_study(study, studies_dir)
    outcome = load_outcome(files)
    if outcome is not None and outcome.found is Finding.OPEN:
        raise UsageError(
            f"{files.name} has no profile, because there is no verdict: {outcome.because}", advice=outcome.advice
        )
    if not files.profile.exists():
        raise UsageError(f"{files.name} has no profile yet", advice=f"finish it with: autotune resume {study}")
    text = export_profile(read(files.profile), chosen)
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_output(output, text)
