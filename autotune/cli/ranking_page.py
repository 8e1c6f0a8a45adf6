"""A ranking as a document, for the terminal, as Markdown or as a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePath

from autotune.space.formatting import count, describe, figure_text, one_line, rate_text, settings
from autotune.base.records import FIGURES, Figure
from autotune.report.document import Column, Commands, Document, Grid, Kind, Paragraph, Part, Picture, Section
from autotune.report.plots import Axis, Chart, Panel, Series
from autotune.space.requirements import Requirements
from autotune.search.ranking import Ranked, Ranking

#: Rows of the table; ``--json`` has all.
SHOWN = 15
_RATE, _MEMORY = FIGURES["throughput"], FIGURES["peak_memory"]
#: Factors by which figures are divided to be drawn, and the unit then.
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
        front: the rows that nothing is better than in all `figures`; without figures, nothing.
        study: as an argument of commands. exports: its trials can be exported, because it has a profile.
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
    asked = [FIGURES[ranking.figure]] if ranking.figure is not None and not figures else figures
    extra = [f for f in asked if f not in (_RATE, _MEMORY)]
    # A score has a unit, and people think in figures.
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
        what = f"baseline: {settings(row.config)}" if row.trial == 0 else describe(row.config, ranking.baseline)
        cells.append(
            (
                _label(row),
                *([f"{row.score:.4g}"] if scored else []),
                *(_figure(f, row) for f in extra),
                rate_text(row.samples_per_s),
                _figure(_MEMORY, row),
                *([step] if compiled else []),
                f"{row.launches}{'' if row.in_turns else ' *'}",
                f"out: {what} ({row.out})" if row.out else what,
            )
        )
    return Grid(tuple(columns), tuple(cells))


def _label(row: Ranked) -> str:
    return f"{row.trial}{'′' if row.derived else ''}"


def _figure(figure: Figure, row: Ranked) -> str:
    return figure_text(figure, row.figures[figure.name]) if figure.name in row.figures else "-"


def _picture(ranking: Ranking, front: Sequence[Ranked], figures: Sequence[Figure]) -> Picture:
    """Draw all choices over two figures, with the front as steps."""
    across, up = figures
    others = [row for row in ranking.rows if row.out is None and row not in front]
    points = [sorted(_points(some, across, up)) for some in (front, others)]
    told = "; ".join(f"trial {_label(row)}: {_figure(across, row)}, {_figure(up, row)}" for row in front)
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
    return Picture(f"{up.name} by {across.name}".replace("_", " "), f"{_title(across)}, {_title(up)}: {told}.", chart)


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
