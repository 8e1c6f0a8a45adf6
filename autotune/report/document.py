"""Documents, their parts, and their formats: a terminal, plain text, HTML and Markdown. And tables in one style."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from autotune.base.records import TrialStatus
from autotune.report.drawing import COLOURS, Axis, Chart, Drawing, Key, Panel, Plot, Series, dashes_of, draw
from autotune.space.formatting import count, one_line, status_style

if TYPE_CHECKING:
    from jinja2 import Template

# A report independent of its output format: sections of paragraphs, facts, grids, pictures, commands and links.
#
# All content is plain text, never markup. Each renderer escapes it.


class Kind(Enum):
    """How a column is aligned, and whether it wraps on a narrow page."""

    #: Right-aligned, never wraps.
    FIGURE = "figure"
    #: Left-aligned, never wraps.
    WORD = "word"
    #: Left-aligned, wraps.
    TEXT = "text"


@dataclass(frozen=True)
class Column:
    """A column of a grid. Line breaks in the title are kept in formats that allow several lines in a title."""

    title: str
    kind: Kind = Kind.FIGURE


@dataclass(frozen=True)
class Paragraph:
    """One paragraph. A strong one holds the main result."""

    text: str
    strong: bool = False


class Verbatim(str):
    """A value that is meant to be copied, such as a command, and is never wrapped."""


@dataclass(frozen=True)
class Facts:
    """Rows ``(name, value)``."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        rows: each has one cell per column.
        total: the last row is the sum of the others.
        strong: indices of highlighted rows; the text says elsewhere why they are.
        links: link target of the first cell of each row, for pages that have links.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    total: bool = False
    strong: frozenset[int] = frozenset()
    links: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row does not fit the {len(self.columns)} columns of its grid")


@dataclass(frozen=True)
class Curves:
    """Rows ``(name, values)`` of curves that are drawn on one scale."""

    rows: tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True)
class Picture:
    """A picture, which only a page draws.

    Attributes:
        title: what it shows. about: its alternative text, in whole sentences.
        instead: the same figures as a table, for formats without pictures; ``None`` if a table of the report has them.
    """

    title: str
    about: str
    plot: Plot
    instead: Grid | None = None


@dataclass(frozen=True)
class Commands:
    """Lines for the reader to type or paste, by default into a shell.

    Attributes:
        language: of the lines, as named in code blocks.
    """

    lines: tuple[str, ...]
    language: str = "sh"


@dataclass(frozen=True)
class Links:
    """Rows ``(name, target)``."""

    rows: tuple[tuple[str, str], ...]


Part = Paragraph | Facts | Grid | Curves | Picture | Commands | Links


@dataclass(frozen=True)
class Section:
    """A heading and the parts under it. A section without a title follows the document's own."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Document:
    """A whole report.

    Attributes:
        refresh_s: interval at which a page reloads itself; ``None`` for never.
    """

    title: str
    sections: tuple[Section, ...]
    refresh_s: int | None = None


def paragraphs(*sentences: str | None) -> tuple[Paragraph, ...]:
    """Return a paragraph for each text that is not empty."""
    return tuple(Paragraph(s) for s in sentences if s)


def facts(*rows: tuple[str, str | None]) -> tuple[Facts, ...]:
    """Return the rows that have a value as one part, or nothing if there are none."""
    present = tuple((name, value) for name, value in rows if value)
    return (Facts(present),) if present else ()


def without_pictures(document: Document) -> Document:
    """Return the document with tables in place of its pictures, for formats that have none."""
    sections = (
        replace(section, parts=tuple(part for item in section.parts for part in _as_text(item)))
        for section in document.sections
    )
    return replace(document, sections=tuple(section for section in sections if section.parts))


def _as_text(part: Part) -> tuple[Part, ...]:
    if not isinstance(part, Picture):
        return (part,)
    return (Paragraph(f"{part.title}. {part.about}"), part.instead) if part.instead else ()


# Text on a terminal of any width: wrapped between words, and never inside a path or a command.
#
# A terminal itself wraps a line that is too long, and yields it as one line when it is copied. So text that is meant to
# be copied is printed as one line, however long.

#: What stays on one line: a quoted command, a command that ends a sentence, a word.
_UNBROKEN = re.compile(r"`[^`]*`\S*|(?<=: )autotune \S.*$|\S+")
#: Width of the narrowest readable column.
_NARROW = 20
_MUCH = 100_000


def wrapped(text: Text, width: int) -> list[Text]:
    """Return a text as lines of at most ``width`` columns, except where a single word, path or command is longer."""
    lines: list[Text] = []
    for paragraph in text.split("\n", allow_blank=True) or [text]:
        breaks, begin, end = [], 0, 0
        for match in _UNBROKEN.finditer(paragraph.plain):
            if end > begin and cell_len(paragraph.plain[begin : match.end()]) > width:
                breaks.append(begin := match.start())
            end = match.end()
        lines += paragraph.divide(breaks)
    for line in lines:
        line.rstrip()
    return lines


def _unbroken(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ignore"
    return line


class Line:
    """A text, wrapped by `wrapped`.

    Args:
        indent: columns to the left of each line; on the first line, they hold ``label``.
        verbatim: the text is meant to be copied as it is, and therefore not wrapped.
    """

    def __init__(self, text: Text | str, indent: int = 0, *, label: Text | str = "", verbatim: bool = False) -> None:
        self._text = text if isinstance(text, Text) else Text(text)
        self._label = label if isinstance(label, Text) else Text(label)
        self._indent = indent
        self._verbatim = verbatim

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent, label = self._indent, self._label.copy()
        if label and options.max_width - indent < _NARROW:
            # There is no room beside the label.
            yield _unbroken(label)
            indent, label = 2, Text()
        lines = [self._text] if self._verbatim else wrapped(self._text, max(1, options.max_width - indent))
        for line in lines:
            label.pad_right(indent - label.cell_len)
            # Assemble a new text, because spaces put before a styled text would be styled.
            yield _unbroken(Text.assemble(label, line))
            label = Text()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._text)


def pairs(rows: Iterable[tuple[str, str, bool]]) -> list[Line]:
    """Return lines ``name  value`` with aligned values; the third item says whether the value is verbatim."""
    rows = tuple(rows)
    indent = max((cell_len(name) for name, _, _ in rows), default=0) + 2
    return [Line(value, indent, label=Text(name, style="dim"), verbatim=verbatim) for name, value, verbatim in rows]


def _table_of(columns: Iterable[Column]) -> FittingTable:
    """Return an empty table in the common style of tables with a heading."""
    table = FittingTable(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold"
    )
    for column in columns:
        gives_way = column.kind is Kind.TEXT
        table.add_column(
            Text(column.title),
            justify="right" if column.kind is Kind.FIGURE else "left",
            no_wrap=not gives_way,
            overflow="fold" if gives_way else "ellipsis",
        )
    return table


class FittingTable(Table):
    """A table that becomes a list if the terminal is too narrow for it, so that no cell is ever cut.

    Columns with ``no_wrap`` keep their width, the others wrap. In the list, each row is a paragraph.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.fits(console, options):
            yield from super().__rich_console__(console, options)
            return
        titles = [" ".join(_plain(column.header).plain.split()) for column in self.columns]
        wraps = [not column.no_wrap for column in self.columns]
        for number, cells in enumerate(zip(*(column.cells for column in self.columns), strict=True)):
            if number and any(titles):
                yield Text()
            yield from _paragraph(titles, wraps, [_plain(cell) for cell in cells])
        if any(titles):
            yield Text()

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Return whether the terminal is wide enough for a table."""
        free = options.update(max_width=_MUCH)
        needed = 2 * (len(self.columns) - 1)
        for column in self.columns:
            cells = [Measurement.get(console, free, cell) for cell in (column.header, *column.cells)]
            widest = max(cell.maximum for cell in cells)
            needed += widest if column.no_wrap else min(widest, max(_NARROW, *(cell.minimum for cell in cells)))
        return needed <= options.max_width


def _plain(cell: object) -> Text:
    return cell.copy() if isinstance(cell, Text) else Text(str(cell))


def _paragraph(titles: Sequence[str], wraps: Sequence[bool], cells: Sequence[Text]) -> RenderResult:
    """Yield a row as lines: its first cell with its first text, then its figures, then its other texts."""
    name = Text.assemble(f"{titles[0]} ", cells[0]) if cells[0].plain.isdigit() else cells[0]
    filled = [i for i, cell in enumerate(cells) if i and cell.plain not in ("", "-")]
    texts = [i for i in filled if wraps[i]]
    figures = [f"{titles[i]} {''.join(cells[i].plain.splitlines())}".strip() for i in filled if not wraps[i]]
    if texts and not wraps[0]:
        yield Line(cells[texts.pop(0)], name.cell_len + 2, label=name)
    else:
        yield Line(name)
    if figures:
        yield _Figures(figures)
    for i in texts:
        yield Line(Text.assemble(f"{titles[i]}: " if titles[i] else "", cells[i]), 2)


class _Figures:
    """Figures with their titles, as many on a line as fit."""

    def __init__(self, figures: Sequence[str]) -> None:
        self._figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for figure in self._figures:
            longer = f"{line} · {figure}" if line else f"  {figure}"
            if line and cell_len(longer) > options.max_width:
                yield _unbroken(Text(line))
                longer = f"  {figure}"
            line = longer
        yield _unbroken(Text(line))


# The common style of all tables: figures are right-aligned and never wrap, descriptions wrap.

_FIGURES = ("trial", "samples/s", "steps/s", "speedup", "peak\nmemory", "took", "trials", "rate", "95 %", "turns")


def new_table(*columns: str, wrap: Collection[str] = ("optimization",)) -> FittingTable:
    """Return a table in which only the columns in ``wrap`` wrap, and figures are right-aligned."""
    kinds = {**dict.fromkeys(_FIGURES, Kind.FIGURE), **dict.fromkeys(wrap, Kind.TEXT)}
    return _table_of(Column(name, kinds.get(name, Kind.WORD)) for name in columns)


def status_cell(status: TrialStatus) -> Text:
    # worker_died is by far the longest status: on one line it would take room from the descriptions.
    return Text(status.value.replace("worker_died", "worker_\ndied"), style=status_style(status))


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
    table = _table_of(part.columns)
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
        table.add_row(Text(one_line(name)), Text(_sparkline(values, low, high)), Text(_ends(values)))
    return table


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3g} → {values[-1]:.3g}" if values else "no step"


def _sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Draw values on a scale from ``low`` to ``high``, one character per value or per average of neighbours."""
    cells, line = min(len(values), _CURVE_CELLS), ""
    for i in range(cells):
        chunk = values[i * len(values) // cells : (i + 1) * len(values) // cells]
        part = (sum(chunk) / len(chunk) - low) / (high - low) if high > low else 0.0
        line += _BARS[round((len(_BARS) - 1) * part)]
    return line


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
    picture, legend = _picture_of(part) if isinstance(part, Curves) else (part, None)
    drawing = Drawing("")
    if not isinstance(part, Curves) or any(math.isfinite(value) for _, values in part.rows for value in values):
        with contextlib.suppress(Exception):
            drawing = draw(picture.plot, picture.title, picture.about)
    return Drawing(markup(drawing.svg), drawing.legend if legend is None else legend)


def _picture_of(curves: Curves) -> tuple[Picture, tuple[Key, ...]]:
    """Return curves as a picture, and their legend: the first and last value of each, and where it ended if early."""
    steps = max((len(values) for _, values in curves.rows), default=0)
    finite = [value for _, values in curves.rows for value in values if math.isfinite(value)]
    names = ", ".join(one_line(name) for name, _ in curves.rows)
    ends = f", from {min(finite):.3g} to {max(finite):.3g}" if finite else ""
    series, legend = [], []
    for i, (name, values) in enumerate(curves.rows):
        series += [Series(name, "line", tuple(enumerate(values, 1)), i)] if values else []
        early = f", ended after {count(len(values), 'step')}" if 0 < len(values) < steps else ""
        legend.append(Key(f"{one_line(name)}: {_ends(values)}{early}", "line", i % COLOURS, dashes_of(i)))
    chart = Chart(Axis("step"), (Panel(Axis("loss"), tuple(series)),))
    return Picture(f"Losses: {names}", f"Loss at steps 1 to {steps}{ends}: {names}", chart), tuple(legend)


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
            lines = [one_line(line) for line in part.lines]
            longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
            fence = "`" * max(3, longest + 1)
            return "\n".join([f"{fence}{part.language}", *lines, fence])
        case Links():
            return "\n".join(f"- {escape(what, front=True)}: {escape(where)}" for what, where in part.rows)


def _markdown_grid(part: Grid) -> str:
    rules = ["--:" if column.kind is Kind.FIGURE else ":--" for column in part.columns]
    rows = [[escape(cell) for cell in row] for row in part.rows]
    if part.total and rows:
        rows[-1] = [f"**{cell}**" if cell else "" for cell in rows[-1]]
    lines = [[escape(column.title) for column in part.columns], rules, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
