"""A document in the terminal, as HTML, Markdown, or JSON."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from autotune.base.records import SCHEMA_VERSION, Outcome
from autotune.report.document import (
    Commands,
    Curves,
    Document,
    Facts,
    FittingTable,
    Grid,
    Kind,
    Line,
    Links,
    Paragraph,
    Part,
    Picture,
    Verbatim,
    new_fitting_table,
    pairs,
    without_pictures,
)
from autotune.report.drawing import COLOURS, DASHES, Axis, Chart, Drawing, Key, Panel, Series, draw
from autotune.report.headline import answer_of
from autotune.report.material import Material
from autotune.report.sections import whole_training, whole_training_s
from autotune.space.formatting import count, one_line

if TYPE_CHECKING:
    from jinja2 import Template

# A report as a rich renderable, or as plain text. Prints nothing.


_BARS = "▁▂▃▄▅▆▇█"
#: Maximum number of characters of a curve.
_CURVE_CELLS = 48
#: Width in columns when the output is a file.
FILE_WIDTH = 100


def to_terminal(document: Document) -> RenderableType:
    """Return the report as a rich renderable.

    On a narrow terminal, texts wrap, and tables that do not fit become lists; figures, paths and commands stay whole.
    Control characters are removed, and text from outside is never interpreted as markup.
    """
    lines: list[RenderableType] = [Line(Text(one_line(document.title), style="bold"))]
    for section in without_pictures(document).sections:
        if section.title:
            lines += [Text(), Rule(Text(one_line(section.title), style="bold"), align="left", style="dim")]
        for i, part in enumerate(section.parts):
            lines += [Text(), _terminal_part(part)] if i or not section.title else [_terminal_part(part)]
    return Group(*lines)


def to_text(document: Document, width: int = FILE_WIDTH) -> str:
    """Return the report as plain text, without colours, escape sequences or trailing spaces."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, record=True)
    console.print(to_terminal(document), crop=False)
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())


def _terminal_part(part: Part) -> RenderableType:
    match part:
        case Paragraph():
            return Line(Text(one_line(part.text), style="bold" if part.strong else ""))
        case Facts():
            rows = ((one_line(name), one_line(label), isinstance(label, Verbatim)) for name, label in part.rows)
            return Group(*pairs(rows))
        case Grid():
            return _terminal_grid(part)
        case Curves():
            return _curves(part)
        case Picture():
            raise ValueError("a terminal has no pictures")
        case Commands():
            return Group(*(Line(one_line(line), 2, verbatim=True) for line in part.lines))
        case Links():
            return Group(
                *(Line(f"{one_line(label)}: {one_line(target)}", verbatim=True) for label, target in part.rows)
            )


def _terminal_grid(part: Grid) -> Table:
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
        chunk = values[i * len(values) // cells : (i + 1) * len(values) // cells]
        yield sum(chunk) / len(chunk)


# A report as one self-contained HTML page: no script, nothing loaded from elsewhere, light and dark, and printable.
#
# All text is escaped: a cause, a path or a model's name is shown literally and never becomes markup.


def to_html(document: Document) -> str:
    """Return the report as a complete HTML page that ends with a line break."""
    return _template().render(document=document)


@cache
def _template() -> Template:
    # Imported only when a page is rendered: most commands render none.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        # Text from outside is reduced to one line. Output of a macro is markup and stays as it is.
        finalize=lambda value: value if isinstance(value, Markup) else one_line(str(value)),
        trim_blocks=True,
        keep_trailing_newline=True,
        # A daemon that serves pages for weeks keeps the templates that match its code.
        auto_reload=False,
    )
    pages.filters["kind"] = lambda part: type(part).__name__
    # Consecutive pictures are placed side by side.
    pages.filters["groupby_pictures"] = lambda parts: [
        (drawn, list(group)) for drawn, group in groupby(parts, key=lambda part: isinstance(part, Picture))
    ]
    pages.globals["drawn"] = lambda part: _drawn(part, Markup)
    return pages.get_template("report.html")


def _drawn(part: Picture | Curves, markup: type[str]) -> Drawing:
    """Draw a picture. If that fails, the page has only its table, or the ends of its curves."""
    picture = _picture_of(part) if isinstance(part, Curves) else part
    drawing = Drawing("")
    if not isinstance(part, Curves) or any(math.isfinite(value) for _, values in part.rows for value in values):
        with contextlib.suppress(Exception):
            drawing = draw(picture.plot, picture.title, picture.about)
    legend = _ends(part) if isinstance(part, Curves) else drawing.legend
    return Drawing(markup(drawing.svg), legend)


def _picture_of(curves: Curves) -> Picture:
    steps = max((len(values) for _, values in curves.rows), default=0)
    finite = [value for _, values in curves.rows for value in values if math.isfinite(value)]
    names = ", ".join(one_line(name) for name, _ in curves.rows)
    ends = f", from {min(finite):.3g} to {max(finite):.3g}" if finite else ""
    series = tuple(
        Series(name, "line", tuple(enumerate(values, 1)), i) for i, (name, values) in enumerate(curves.rows) if values
    )
    chart = Chart(Axis("step"), (Panel(Axis("loss"), series),))
    return Picture(f"Losses: {names}", f"Loss at steps 1 to {steps}{ends}: {names}", chart)


def _ends(curves: Curves) -> tuple[Key, ...]:
    """Return the legend of curves, with the first and last value of each, and where it ended if it ended early."""
    steps = max((len(values) for _, values in curves.rows), default=0)
    legend = []
    for i, (name, values) in enumerate(curves.rows):
        ends = f"{values[0]:.3g} → {values[-1]:.3g}" if values else "no step"
        early = f", ended after {count(len(values), 'step')}" if 0 < len(values) < steps else ""
        dashes = " ".join(f"{2 * dash:g}" for dash in DASHES[i % len(DASHES)])
        legend.append(Key(f"{one_line(name)}: {ends}{early}", "line", i % COLOURS, dashes))
    return tuple(legend)


# A report as one JSON object: the outcome's figures as numbers, and the report's sections as they are printed.
#
# ``{"schema_version", "study", "state", "title", "answer", "training", "outcome", "sections"}``, as docs/json.md shows.
# ``state`` is ``done``, ``failed`` or ``unfinished``; ``outcome`` is the object that ``autotune search --json`` prints,
# or null if the search is not done. ``sections`` is a list of ``{"title", "parts"}``. The ``kind`` of a part determines
# its other keys:
#
# ============= ============================================================
# ``paragraph`` ``text``, and ``strong`` if it holds the main result
# ``facts``     ``rows`` of a name and a value
# ``table``     ``columns`` (names), and ``rows`` of as many texts
# ``curves``    ``rows`` of ``{"name", "values"}``; a value that is not finite is null
# ``picture``   ``title``, ``about`` (in words), ``plot``
#               (`autotune.report.drawing`, and its ``kind``), ``table`` or null
# ``commands``  ``lines`` to type or paste, and their ``language``
# ``links``     ``rows`` of a name and a target
# ============= ============================================================


def to_json(material: Material, document: Document) -> dict[str, Any]:
    """Return the report as an object for ``json.dumps``.

    Args:
        document: the report of this material, from `report_on`.
    """
    outcome, answer = material.outcome, answer_of(material)
    return {
        "schema_version": SCHEMA_VERSION,
        "study": material.name,
        "state": "done" if outcome else "failed" if material.failure else "unfinished",
        "title": document.title,
        "answer": {**asdict(answer), "rows": [{"name": name, "text": text} for name, text in answer.rows]},
        "training": None if outcome is None else _training(outcome, material),
        "outcome": outcome and outcome.model_dump(mode="json"),
        "sections": [{"title": s.title, "parts": [_json_part(part) for part in s.parts]} for s in document.sections],
    }


def _training(outcome: Outcome, material: Material) -> dict[str, Any] | None:
    """Return how long the requested training takes."""
    whole = whole_training(material)
    if whole is None:
        return None
    names = {"baseline": outcome.baseline, "best": outcome.best, "best_same_batch": outcome.best_same_batch}
    seconds = {f"{name}_s": whole_training_s(outcome, standing, whole) for name, standing in names.items()}
    return {"samples": whole.samples, **seconds, "price_per_hour": material.spec.price_per_hour}


def _json_part(part: Part) -> dict[str, Any]:
    match part:
        case Paragraph():
            return {"kind": "paragraph", "text": part.text, "strong": part.strong}
        case Facts():
            return {"kind": "facts", "rows": [list(row) for row in part.rows]}
        case Grid():
            titles = [" ".join(column.title.split()) for column in part.columns]
            return {"kind": "table", "columns": titles, "rows": [list(row) for row in part.rows]}
        case Curves():
            return {"kind": "curves", "rows": [{"name": n, "values": list(map(_finite, v))} for n, v in part.rows]}
        case Picture():
            plot = {"kind": type(part.plot).__name__.lower(), **_plain(asdict(part.plot))}
            instead = None if part.instead is None else _json_part(part.instead)
            return {"kind": "picture", "title": part.title, "about": part.about, "plot": plot, "table": instead}
        case Commands():
            return {"kind": "commands", "language": part.language, "lines": list(part.lines)}
        case Links():
            return {"kind": "links", "rows": [list(row) for row in part.rows]}


def _plain(value: Any) -> Any:
    """Convert a value from a dataclass for JSON: tuples to lists, non-finite numbers to null."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# A report as GitHub-flavoured Markdown (https://github.github.com/gfm/).
#
# All text is escaped: a cause, a path or a model's name is shown literally and never becomes markup, a link or a new
# table cell.

#: Characters with a meaning inside a line. On GitHub, tildes strike text out and dollar signs begin mathematics.
_INLINE = re.compile(r"[\\`*\[\]<>|~$#]")
#: An underscore means emphasis only at a word's edge. Inside a word, as in most names of knobs, it needs no escape.
_EDGE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
_ENTITY = re.compile(r"&(?=#?\w+;)")
#: Text that GitHub turns into a link by itself.
_LINK = re.compile(r"(?<=\w)(:)(?=//)|(?<=\bwww)(\.)", re.IGNORECASE)
#: Text that begins a list or a rule at the start of a line.
_FRONT = re.compile(r"^([-+=]|\d+[.)](?=\s|$))")


def to_markdown(document: Document) -> str:
    """Return the report as Markdown that ends with a line break."""
    blocks = [f"# {escape(document.title)}"]
    for section in without_pictures(document).sections:
        blocks += [f"## {escape(section.title)}"] if section.title else []
        for part in section.parts:
            block = _markdown_part(part)
            # Markdown merges adjacent lists that have the same bullet.
            if block.startswith("- ") and blocks[-1].startswith("- "):
                block = "\n".join(f"*{line[1:]}" for line in block.splitlines())
            blocks += [block] if block else []
    return "\n\n".join(blocks) + "\n"


def escape(text: str, *, front: bool = False) -> str:
    """Return ``text`` on one line, escaped so that Markdown shows it literally.

    Args:
        front: the text begins a block.
    """
    text = _INLINE.sub(r"\\\g<0>", one_line(text))
    text = _EDGE.sub(r"\_", text)
    text = _ENTITY.sub(r"\&", text)
    text = _LINK.sub(r"\\\g<0>", text)
    return _FRONT.sub(lambda match: f"{match[0][:-1]}\\{match[0][-1]}", text) if front else text


def _markdown_part(part: Part) -> str:
    match part:
        case Paragraph():
            text = escape(part.text, front=not part.strong)
            return f"**{text}**" if part.strong and text else text
        case Facts():
            return "\n".join(f"- **{escape(name) or '?'}**: {escape(what)}" for name, what in part.rows)
        case Grid():
            return _markdown_grid(part)
        case Curves():
            rows = ((name, ", ".join(f"{v:.4g}" for v in values) or "no step") for name, values in part.rows)
            return "\n".join(f"- {escape(name, front=True)}: {numbers}" for name, numbers in rows)
        case Picture():
            raise ValueError("Markdown has no pictures")
        case Commands():
            return _fenced([one_line(line) for line in part.lines], part.language)
        case Links():
            return "\n".join(f"- {escape(what, front=True)}: {escape(where)}" for what, where in part.rows)


def _markdown_grid(part: Grid) -> str:
    rules = ["--:" if column.kind is Kind.FIGURE else ":--" for column in part.columns]
    rows = [[escape(cell) for cell in row] for row in part.rows]
    if part.total and rows:
        rows[-1] = [f"**{cell}**" if cell else "" for cell in rows[-1]]
    lines = [[escape(column.title) for column in part.columns], rules, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _fenced(lines: list[str], language: str) -> str:
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])
