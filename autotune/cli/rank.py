"""``autotune rank``: rank the configurations of a study anew, with nothing launched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.options import Json, StudiesDir, Study, study_of, typer_option
from autotune.cli.output import format_of, print_bytes, print_json, print_rich, write_output
from autotune.cli.ranking_page import ranking_page
from autotune.base.errors import UsageError
from autotune.base.layout import DEFAULT_STUDIES
from autotune.base.records import SCHEMA_VERSION
from autotune.report import to_html, to_markdown, to_terminal, to_text
from autotune.space.requirements import Requirements, figure_called
from autotune.search import NEWEST, load_outcome
from autotune.search.ranking import Ranked, Ranking, pareto, rank
from autotune.search.study_folders import study_argument
from autotune.study.options import option
from autotune.study.request import read_request

#: Function that renders each format as text. ENDINGS: format by file extension.
RENDERERS = {"terminal": to_text, "markdown": to_markdown, "html": to_html}
ENDINGS = {".md": "markdown", ".txt": "terminal", ".html": "html", ".htm": "html"}


def command(
    study: Study = NEWEST,
    objective: Annotated[
        str, typer_option(option("objective"), help_="A name or FILE.py; the study's if none is given.")
    ] = "",
    epochs: Annotated[int | None, typer_option(option("epochs"), help_="Epochs of the training.")] = None,
    samples: Annotated[int | None, typer_option(option("samples"))] = None,
    price_per_hour: Annotated[
        str | None, typer_option(option("price_per_hour"), help_="What this machine costs, in whatever currency.")
    ] = None,
    require: Annotated[list[str] | None, typer_option(option("require"), help_="What a choice must meet.")] = None,
    front: Annotated[
        str,
        typer.Option(
            "--pareto",
            metavar="FIGURE,FIGURE",
            help="Show only those that no other is as good as in all of these figures and better in one.",
        ),
    ] = "",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write (.html with a picture of a front, .md, .txt).")
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="terminal, markdown or html.  [default: by the file's ending]")
    ] = None,
    studies_dir: StudiesDir = DEFAULT_STUDIES,
    as_json: Json = False,
) -> None:
    """Rank the configurations of a study by another objective, from what was measured. Launches nothing."""
    files = study_of(study, studies_dir)
    if epochs is not None and samples is not None:
        raise UsageError("--epochs and --samples both say how long the training is", advice="leave one of them out.")
    stated = {
        "objective": option("objective").value(objective) if objective else None,
        "price_per_hour": option("price_per_hour").value(price_per_hour),
        "require": tuple(require) if require else None,
    }
    stated = {name: value for name, value in stated.items() if value is not None}
    if epochs is not None or samples is not None:
        stated |= {"epochs": epochs, "samples": samples}
    spec = read_request(files).model_copy(update=stated)
    if objective and len(spec.objectives) > 1:
        raise UsageError("a ranking is by one objective", advice="--pareto FIGURE,FIGURE shows a front of several.")
    figures = [figure_called(name.strip()) for name in front.split(",")] if front else []
    ranking = rank(files, spec, load_outcome(files))
    for trial in ranking.unscored:
        typer.echo(f"trial {trial} has no score by {ranking.objective}: a figure of it is not known", err=True)
    rows = pareto(ranking.rows, figures) if figures else list(ranking.rows)
    if as_json:
        print_json(_as_json(files.name, ranking, rows))
        return
    required = Requirements.parsed(spec.require, spec.goal)
    exports = files.profile.exists()
    page = ranking_page(ranking, rows, figures, required, study_argument(files), exports=exports)
    chosen = format_of(format_, output, ENDINGS, "terminal" if output is None else "markdown")
    if output is not None:
        write_output(output, RENDERERS[chosen](page))
    elif chosen == "terminal":
        print_rich(to_terminal(page))
    else:
        print_bytes(RENDERERS[chosen](page))


def _as_json(study: str, ranking: Ranking, rows: list[Ranked]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study,
        "objective": ranking.objective,
        "unit": ranking.unit,
        "best": None if ranking.best.derived else ranking.best.trial,
        "rows": [
            {
                "trial": row.trial,
                "derived": row.derived,
                "config": row.config,
                "score": row.score,
                "launches": row.launches,
                "in_turns": row.in_turns,
                "figures": row.figures,
                "out": row.out,
                "overtakes_eager_after_steps": row.overtakes_after,
            }
            for row in rows
        ],
        "unscored": list(ranking.unscored),
    }
