"""A report independent of its output format: sections of paragraphs, facts, grids, curves, commands and links.

All content is plain text, never markup. Each renderer escapes it (`autotune.report.terminal`,
`autotune.report.markdown`, `autotune.report.html`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
    """A column of a grid. A line break in the title is kept in formats whose titles can have several lines."""

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
        strong: indices of highlighted rows; the reason is given in words elsewhere.
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
class Commands:
    """Command lines for the reader to type."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Links:
    """Rows ``(name, target)``."""

    rows: tuple[tuple[str, str], ...]


Part = Paragraph | Facts | Grid | Curves | Commands | Links


@dataclass(frozen=True)
class Section:
    """A heading and the parts under it."""

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
    known = tuple((name, what) for name, what in rows if what)
    return (Facts(known),) if known else ()
