"""``autotune report``: print or write the full report of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import StudiesDir, Study
from autotune.cli.output import print_rich, write_output
from autotune.errors import UnknownNameError
from autotune.layout import DEFAULT_STUDIES
from autotune.report import read_material, report_on, to_html, to_markdown, to_terminal, to_text
from autotune.search import find_study, load_outcome
from autotune.search.request import study_argument

#: Function that renders each format as text.
FORMATS = {"terminal": to_text, "markdown": to_markdown, "html": to_html}
#: Format by file extension. Any other extension means Markdown.
_ENDINGS = {".html": "html", ".htm": "html", ".txt": "terminal"}


def command(
    study: Study,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout if not given.")] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="terminal, markdown or html.  [default: terminal; for a file, by its ending]"),
    ] = None,
    studies_dir: StudiesDir = DEFAULT_STUDIES,
) -> None:
    """Tell the whole story of a study: verdict, evidence, costs."""
    chosen = format_ or ("terminal" if output is None else _ENDINGS.get(output.suffix.lower(), "markdown"))
    if chosen not in FORMATS:
        raise UnknownNameError("format", chosen, FORMATS)
    files = find_study(study, studies_dir)
    document = report_on(read_material(files, load_outcome(files), typed=study_argument(files), folder=Path.cwd()))
    if output is not None:
        write_output(output, FORMATS[chosen](document))
    elif chosen == "terminal":
        print_rich(to_terminal(document))
    else:
        typer.echo(FORMATS[chosen](document), nl=False)
