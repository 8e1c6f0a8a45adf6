"""``autotune report``: print or write the full report of a study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Json, StudiesDir, Study
from autotune.cli.output import format_of, print_bytes, print_rich, write_output
from autotune.errors import UsageError
from autotune.layout import DEFAULT_STUDIES
from autotune.report import read_material, report_on, to_html, to_json, to_markdown, to_terminal, to_text
from autotune.search import find_study, load_outcome
from autotune.search.request import study_argument

#: Function that renders each format as text.
_RENDERERS = {"terminal": to_text, "markdown": to_markdown, "html": to_html}
#: Format by file extension.
_ENDINGS = {
    **{".md": "markdown", ".markdown": "markdown", ".txt": "terminal", ".html": "html", ".htm": "html"},
    ".json": "json",
}


def command(
    study: Study,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout if not given.")] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", help="terminal, markdown, html or json.  [default: by the file's ending, else terminal]"
        ),
    ] = None,
    studies_dir: StudiesDir = DEFAULT_STUDIES,
    as_json: Json = False,
) -> None:
    """Tell the whole story of a study: verdict, evidence, costs."""
    if as_json and format_ not in (None, "json"):
        raise UsageError(f"--json and --format {format_} ask for two formats", advice="leave one of them out.")
    default = "terminal" if output is None else "markdown"
    chosen = format_of("json" if as_json else format_, output, _ENDINGS, default)
    files = find_study(study, studies_dir)
    material = read_material(files, load_outcome(files), typed=study_argument(files), folder=Path.cwd())
    document = report_on(material)
    if output is None and chosen == "terminal":
        print_rich(to_terminal(document))
        return
    if chosen == "json":
        text = f"{json.dumps(to_json(material, document), allow_nan=False)}\n"
    else:
        text = _RENDERERS[chosen](document)
    if output is not None:
        write_output(output, text)
    else:
        print_bytes(text)
