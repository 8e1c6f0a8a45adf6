"""``autotune report``: print or write the report of a study, short or in full."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.base.errors import UsageError
from autotune.base.layout import DEFAULT_STUDIES
from autotune.cli.options import Json, Output, StudiesDir, Study, changed_fields, search_options, study_of
from autotune.cli.output import ENDINGS, RENDERERS, format_of, print_rich, text_width, write_output
from autotune.report import read_material, report_on, short_report_on, to_json, to_terminal
from autotune.search import NEWEST, load_outcome
from autotune.search.study_folders import study_argument
from autotune.study.request import option


@search_options([*map(option, ("epochs", "samples", "price_per_hour"))])
def command(
    typed: Mapping[str, Any],
    study: Study = NEWEST,
    output: Output = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="terminal, markdown, pr (short, for a pull request), html or json.  "
            "[default: by the file's ending, else terminal]",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="On the terminal: everything, as files have it, not only the answer.")
    ] = False,
    studies_dir: StudiesDir = DEFAULT_STUDIES,
    as_json: Json = False,
) -> None:
    """Tell the answer of a study, and with --full its whole story: verdict, evidence, costs."""
    if as_json and format_ not in (None, "json"):
        raise UsageError(f"--json and --format {format_} ask for two formats", advice="leave one of them out.")
    if full and format_ == "pr":
        raise UsageError("--full and --format pr contradict each other", advice="--format markdown is the full one.")
    default, endings = "terminal" if output is None else "markdown", {**ENDINGS, ".json": "json"}
    chosen = "pr" if format_ == "pr" else format_of("json" if as_json else format_, output, endings, default)
    files = study_of(study, studies_dir)
    material = read_material(files, load_outcome(files), typed=study_argument(files), folder=Path.cwd())
    # The training may be longer, or the machine dearer, than the search was told.
    material = replace(material, spec=material.spec.model_copy(update=changed_fields(typed)))
    if output is None and chosen == "terminal":
        print_rich(to_terminal(report_on(material) if full else short_report_on(material, width=text_width())))
        return
    # The format for a pull request is the short report as Markdown.
    document = short_report_on(material, lines=None) if chosen == "pr" else report_on(material)
    if chosen == "json":
        text = f"{json.dumps(to_json(material, document), allow_nan=False)}\n"
    else:
        text = RENDERERS["markdown" if chosen == "pr" else chosen](document)
    write_output(output, text)
