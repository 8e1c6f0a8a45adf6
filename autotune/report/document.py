"""Documents and their parts, and tables in one style."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from autotune.base.records import TrialStatus
from autotune.report.drawing import Plot
from autotune.space.formatting import status_style

# A report independent of its output format: sections of paragraphs, facts, grids, pictures, commands and links.
#
# All content is plain text, never markup. Each renderer escapes it (`autotune.report.formats`).


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


def new_fitting_table() -> FittingTable:
    """Return an empty table in the common style of tables with a heading."""
    return FittingTable(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold"
    )


class FittingTable(Table):
    """A table that becomes a list if the terminal is too narrow for it, so that no cell is ever cut.

    Columns with ``no_wrap`` keep their width, the others wrap. In the list, each row is a paragraph.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.fits(console, options):
            yield from super().__rich_console__(console, options)
        else:
            yield from self._as_list()

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Return whether the terminal is wide enough for a table."""
        return self._needs(console, options) <= options.max_width

    def _needs(self, console: Console, options: ConsoleOptions) -> int:
        free = options.update(max_width=_MUCH)
        needed = 2 * (len(self.columns) - 1)
        for column in self.columns:
            cells = [Measurement.get(console, free, cell) for cell in (column.header, *column.cells)]
            widest = max(cell.maximum for cell in cells)
            needed += widest if column.no_wrap else min(widest, max(_NARROW, *(cell.minimum for cell in cells)))
        return needed

    def _as_list(self) -> RenderResult:
        titles = [" ".join(_plain(column.header).plain.split()) for column in self.columns]
        wraps = [not column.no_wrap for column in self.columns]
        for number, cells in enumerate(zip(*(column.cells for column in self.columns), strict=True)):
            if number and any(titles):
                yield Text()
            yield from _paragraph(titles, wraps, [_plain(cell) for cell in cells])
        if any(titles):
            yield Text()


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
    table = new_fitting_table()
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in _FIGURES else "left",
            no_wrap=name not in wrap,
            overflow="fold" if name in wrap else "ellipsis",
        )
    return table


def status_cell(status: TrialStatus) -> Text:
    # worker_died is by far the longest status: on one line it would take room from the descriptions.
    return Text(status.value.replace("worker_died", "worker_\ndied"), style=status_style(status))
