"""``autotune report``: print or write the report of a study, short or in full."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autotune.base.errors import UsageError
from autotune.base.layout import DEFAULT_STUDIES
from autotune.cli.options import Json, Output, StudiesDir, Study, length_of, study_of, typer_option
from autotune.cli.output import ENDINGS, RENDERERS, format_of, print_rich, text_width, write_output
from autotune.report import Material, read_material, report_on, short_report_on, to_json, to_terminal
from autotune.search import NEWEST, load_outcome
from autotune.search.study_folders import study_argument
from autotune.study.request import option


def command(
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
    epochs: Annotated[
        int | None, typer_option(option("epochs"), help_="Epochs of the training, instead of those of the search.")
    ] = None,
    samples: Annotated[int | None, typer_option(option("samples"), help_="Or samples that it reads in all.")] = None,
    price_per_hour: Annotated[
        str | None, typer_option(option("price_per_hour"), help_="What the machine costs, in whatever currency.")
    ] = None,
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
    study_material = read_material(files, load_outcome(files), typed=study_argument(files), folder=Path.cwd())
    material = _asked_about(study_material, epochs, samples, price_per_hour)
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


def _asked_about(material: Material, epochs: int | None, samples: int | None, price: str | None) -> Material:
    """Return the material with another length of the training, or another price, than the search was given.

    Raises:
        UsageError: a value is invalid, or both lengths are given.
    """
    update = length_of(epochs, samples)
    if price is not None:
        update["price_per_hour"] = option("price_per_hour").value(price)
    return replace(material, spec=material.spec.model_copy(update=update))
