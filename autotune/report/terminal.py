"""A report as a rich renderable, or as plain text. Prints nothing."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from autotune.space.formatting import one_line
from autotune.report.document import (
    Commands,
    Curves,
    Document,
    Facts,
    Grid,
    Kind,
    Links,
    Paragraph,
    Part,
    Picture,
    Verbatim,
    without_pictures,
)
from autotune.report.lines import FittingTable, Line, new_fitting_table, pairs

_BARS = "▁▂▃▄▅▆▇█"
#: Maximum number of characters of a curve.
_CURVE_CELLS = 48
#: Width in columns when the output is a file.
FILE_WIDTH = 100


def to_terminal(document: Document) -> RenderableType:
    """Return the report as a rich renderable.

    On a narrow terminal texts wrap, and tables that do not fit become lists; figures, paths and commands stay whole.
    Control characters are removed, and text from outside is never interpreted as markup.
    """
    lines: list[RenderableType] = [Line(Text(one_line(document.title), style="bold"))]
    for section in without_pictures(document).sections:
        if section.title:
            lines += [Text(), Rule(Text(one_line(section.title), style="bold"), align="left", style="dim")]
        for i, part in enumerate(section.parts):
            lines += [Text(), _part(part)] if i or not section.title else [_part(part)]
    return Group(*lines)


def to_text(document: Document, width: int = FILE_WIDTH) -> str:
    """Return the report as plain text, without colours, escape sequences and trailing spaces."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, record=True)
    console.print(to_terminal(document), crop=False)
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())


def _part(part: Part) -> RenderableType:
    match part:
        case Paragraph():
            return Line(Text(one_line(part.text), style="bold" if part.strong else ""))
        case Facts():
            rows = ((one_line(name), one_line(what), isinstance(what, Verbatim)) for name, what in part.rows)
            return Group(*pairs(rows))
        case Grid():
            return _grid(part)
        case Curves():
            return _curves(part)
        case Picture():
            raise ValueError("a terminal has no pictures")
        case Commands():
            return Group(*(Line(one_line(line), 2, verbatim=True) for line in part.lines))
        case Links():
            return Group(*(Line(f"{one_line(what)}: {one_line(where)}", verbatim=True) for what, where in part.rows))


def _grid(part: Grid) -> Table:
    table = new_fitting_table()
    for column in part.columns:
        gives_way = column.kind is Kind.TEXT
        table.add_column(
            Text(column.title),
            justify="right" if column.kind is Kind.FIGURE else "left",
            no_wrap=not gives_way,
            overflow="fold" if gives_way else "ellipsis",
        )
    for i, row in enumerate(part.rows):
        last = part.total and i == len(part.rows) - 1
        if last:
            table.add_section()
        style = "bold" if last or i in part.strong else ""
        table.add_row(*(Text(one_line(cell)) for cell in row), style=style)
    return table


def _curves(part: Curves) -> Table:
    everything = [v for _, values in part.rows for v in values]
    low, high = min(everything, default=0.0), max(everything, default=0.0)
    table = FittingTable(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for name, values in part.rows:
        ends = f"{values[0]:.3g} → {values[-1]:.3g}" if values else "no step"
        table.add_row(Text(one_line(name)), Text(_sparkline(values, low, high)), Text(ends))
    return table


def _sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Draw values on a scale from ``low`` to ``high``, one character per value or per average of neighbours."""
    if high <= low:
        return _BARS[0] * min(len(values), _CURVE_CELLS)
    top = len(_BARS) - 1
    return "".join(_BARS[round(top * (v - low) / (high - low))] for v in _condensed(values))


def _condensed(values: Sequence[float]) -> Iterator[float]:
    cells = min(len(values), _CURVE_CELLS)
    for i in range(cells):
        some = values[i * len(values) // cells : (i + 1) * len(values) // cells]
        yield sum(some) / len(some)
