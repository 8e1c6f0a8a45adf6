"""A report before it has a form: sections of paragraphs, facts, grids, curves and commands.

Everything in it is plain text. Nothing is markup, and nothing needs to be escaped before it is put in: that is each
renderer's own duty (`autotune.report.terminal`, `autotune.report.markdown`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a column behaves where there is little room."""

    #: Stands to the right, never wraps.
    FIGURE = "figure"
    #: Stands to the left, never wraps.
    WORD = "word"
    #: Stands to the left, gives way.
    TEXT = "text"


@dataclass(frozen=True)
class Column:
    """A column of a grid. A line break in the title is kept where titles can have several lines."""

    title: str
    kind: Kind = Kind.FIGURE


@dataclass(frozen=True)
class Paragraph:
    """One paragraph. A strong one is what a hurried reader should see."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Facts:
    """Rows ``(name, what is known)``."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        rows: as long as there are columns, each.
        total: the last row sums up the others.
        strong: rows to be set off, by index; words elsewhere must say why.
        links: where the first cell of each row leads, on a page that has somewhere to lead to.
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
    """Named sequences of numbers, to be compared with each other."""

    rows: tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True)
class Commands:
    """Command lines to be typed, one each."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Links:
    """Rows ``(what, where it is)``."""

    rows: tuple[tuple[str, str], ...]


Part = Paragraph | Facts | Grid | Curves | Commands | Links


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Document:
    """A whole report.

    Attributes:
        refresh_s: a page that shows what goes on is loaded anew so often; ``None``: never.
    """

    title: str
    sections: tuple[Section, ...]
    refresh_s: int | None = None


def said(*sentences: str | None) -> tuple[Paragraph, ...]:
    """A paragraph for each sentence that there is."""
    return tuple(Paragraph(s) for s in sentences if s)


def facts(*rows: tuple[str, str | None]) -> tuple[Facts, ...]:
    """The rows about which something is known, as one part; none where nothing is."""
    known = tuple((name, what) for name, what in rows if what)
    return (Facts(known),) if known else ()
