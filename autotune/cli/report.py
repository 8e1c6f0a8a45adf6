"""``autotune report``: the whole story of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autotune.cli.inspect import Study, write_output
from autotune.cli.running import STUDIES, StudiesDir
from autotune.errors import UnknownNameError
from autotune.report import read_material, story, to_markdown, to_terminal, to_text
from autotune.tuning import find_study, load_outcome
from autotune.tuning.request import as_typed

FORMATS = ("terminal", "markdown")


def command(
    study: Study,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout if not given.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="terminal or markdown.  [default: terminal; markdown for a file]")
    ] = None,
    studies_dir: StudiesDir = STUDIES,
) -> None:
    """Tell the whole story of a study: verdict, evidence, costs."""
    chosen = format_ or (FORMATS[0] if output is None else FORMATS[1])
    if chosen not in FORMATS:
        raise UnknownNameError("format", chosen, FORMATS)
    files = find_study(study, studies_dir)
    told = story(read_material(files, load_outcome(files), typed=as_typed(files), folder=Path.cwd()))
    if output is not None:
        write_output(output, to_markdown(told) if chosen == "markdown" else to_text(told))
    elif chosen == "markdown":
        typer.echo(to_markdown(told), nl=False)
    else:
        Console().print(to_terminal(told))
