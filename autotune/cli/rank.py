"""`autotune rank`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer

from autotune.base.errors import UsageError
from autotune.base.layout import DEFAULT_STUDIES
from autotune.base.records import FIGURES, SCHEMA_VERSION, Figure
from autotune.cli.options import Json, StudiesDir, Study, changed_fields, search_options, study_of, typer_option
from autotune.cli.output import ENDINGS, RENDERERS, format_of, print_json, print_rich, write_output
from autotune.report import to_terminal
from autotune.report.document import Column, Commands, Document, Grid, Kind, Paragraph, Part, Picture, Section
from autotune.report.drawing import Axis, Chart, Panel, Series
from autotune.search import NEWEST, load_outcome
from autotune.search.ranking import Ranked, Ranking, pareto, rank
from autotune.search.study_folders import study_argument
from autotune.space.formatting import count, describe, figure_text, one_line, rate_text, settings
from autotune.space.requirements import Requirements, figure_called
from autotune.study.request import option, read_request

#: Rows of the table; ``--json`` has all.
SHOWN = 15
_RATE, _MEMORY = FIGURES["throughput"], FIGURES["peak_memory"]
#: Divisors of figures for drawing, by unit, each with the resulting unit.
_DRAWN = {"bytes": (2**30, "GiB"), "fraction": (0.01, "%")}


def ranking_page(
    ranking: Ranking,
    front: Sequence[Ranked],
    figures: Sequence[Figure],
    required: Requirements,
    study: str,
    *,
    exports: bool = True,
) -> Document:
    """Return a ranking, or a front of it, as a document.

    Args:
        front: the rows that none is better than in all `figures`; unused without figures.
        study: the study as an argument of commands. exports: its trials can be exported, because it has a profile.
    """
    rows = front if figures else ranking.rows
    shown = rows if figures else rows[:SHOWN]
    parts: list[Part] = [_grid(ranking, shown, figures)]
    if len(figures) == 2:
        parts.append(_picture(ranking, front, figures))
    by = f"By {ranking.objective}" if not figures else f"The front of {' and '.join(f.name for f in figures)}"
    parts.append(Paragraph(f"{by}{f', with {required}' if required else ''}; nothing was launched."))
    if len(rows) > len(shown):
        parts.append(Paragraph(f"{count(len(rows) - len(shown), 'more configuration')}: --json."))
    if not all(row.in_turns for row in shown):
        parts.append(
            Paragraph(
                "* launched in the search only, not in turns with the baseline: figures of what looked best are too "
                "good on average. `autotune verify` launches a profile again."
            )
        )
    best = ranking.best
    if exports and best.trial and not best.derived and not figures:
        commands = [f"autotune export {shlex.quote(study)} --trial {best.trial} -o profile.yaml"]
        commands += [] if best.in_turns else ["autotune verify --profile profile.yaml"]
        parts.append(Commands(tuple(commands)))
    return Document(f"{one_line(PurePath(study).name)}: {by[0].lower()}{by[1:]}", (Section("", tuple(parts)),))


def _grid(ranking: Ranking, rows: Sequence[Ranked], figures: Sequence[Figure]) -> Grid:
    compiled = any(row.overtakes_after is not None for row in rows)
    wanted = [FIGURES[ranking.figure]] if ranking.figure is not None and not figures else figures
    extra = [f for f in wanted if f not in (_RATE, _MEMORY)]
    # People think in figures: the score has a column only if no figure, nor the rate, stands for it.
    scored = not figures and ranking.figure is None and ranking.unit != ranking.rate_unit
    columns = [
        Column("trial"),
        *([Column(ranking.unit or "score")] if scored else []),
        *(Column(f.name.replace("_", " ")) for f in extra),
        Column(ranking.rate_unit),
        Column("peak\nmemory"),
        *([Column("ahead of eager\nfrom step")] if compiled else []),
        Column("launches"),
        Column("optimization", Kind.TEXT),
    ]
    cells = []
    for row in rows:
        step = "" if row.overtakes_after is None else f"{row.overtakes_after:,}"
        description = f"baseline: {settings(row.config)}" if row.trial == 0 else describe(row.config, ranking.baseline)
        cells.append(
            (
                _label(row),
                *([f"{row.score:.4g}"] if scored else []),
                *(_figure(f, row) for f in extra),
                rate_text(row.samples_per_s),
                _figure(_MEMORY, row),
                *([step] if compiled else []),
                f"{row.launches}{'' if row.in_turns else ' *'}",
                f"out: {description} ({row.out})" if row.out else description,
            )
        )
    return Grid(tuple(columns), tuple(cells))


def _label(row: Ranked) -> str:
    return f"{row.trial}{'′' if row.derived else ''}"


def _figure(figure: Figure, row: Ranked) -> str:
    return figure_text(figure, row.figures[figure.name]) if figure.name in row.figures else "-"


def _picture(ranking: Ranking, front: Sequence[Ranked], figures: Sequence[Figure]) -> Picture:
    """Plot all choices over two figures, with the front as a line."""
    across, up = figures
    others = [row for row in ranking.rows if row.out is None and row not in front]
    points = [sorted(_points(some, across, up)) for some in (front, others)]
    description = "; ".join(f"trial {_label(row)}: {_figure(across, row)}, {_figure(up, row)}" for row in front)
    chart = Chart(
        Axis(_title(across)),
        (
            Panel(
                Axis(_title(up)),
                (
                    Series("nothing else is better in both", "dots", tuple(points[0]), colour=1),
                    Series("", "line", tuple(points[0]), colour=1),
                    *([Series("others", "rings", tuple(points[1]), colour=0)] if others else []),
                ),
            ),
        ),
    )
    return Picture(
        f"{up.name} by {across.name}".replace("_", " "), f"{_title(across)}, {_title(up)}: {description}.", chart
    )


def _points(rows: Sequence[Ranked], across: Figure, up: Figure) -> list[tuple[float, float]]:
    return [
        (_drawn(across, row.figures[across.name]), _drawn(up, row.figures[up.name]))
        for row in rows
        if across.name in row.figures and up.name in row.figures
    ]


def _drawn(figure: Figure, value: float) -> float:
    return value / _DRAWN.get(figure.unit, (1, ""))[0]


def _title(figure: Figure) -> str:
    unit = _DRAWN.get(figure.unit, (1, figure.unit))[1]
    return f"{figure.name.replace('_', ' ')} ({unit})"


@search_options([*map(option, ("epochs", "samples", "price_per_hour", "require"))])
def command(
    typed: Mapping[str, Any],
    study: Study = NEWEST,
    objective: Annotated[
        str, typer_option(option("objective"), help_="A name or FILE.py; the study's if none is given.")
    ] = "",
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
    stated = {"objective": option("objective").value(objective)} if objective else {}
    spec = read_request(files).model_copy(update=stated | changed_fields(typed))
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
    if output is None and chosen == "terminal":
        print_rich(to_terminal(page))
    else:
        write_output(output, RENDERERS[chosen](page))


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
