"""A report independent of its output format: sections of paragraphs, facts, grids, pictures, commands and links.

All content is plain text, never markup. Each renderer escapes it (`autotune.report.terminal`,
`autotune.report.markdown`, `autotune.report.html`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from autotune.report.plots import Plot


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
        language: of the lines, as code blocks name it.
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
    known = tuple((name, what) for name, what in rows if what)
    return (Facts(known),) if known else ()


def without_pictures(document: Document) -> Document:
    """Return the document with the tables that stand for its pictures, for formats that have none."""
    sections = (
        replace(section, parts=tuple(part for one in section.parts for part in _as_text(one)))
        for section in document.sections
    )
    return replace(document, sections=tuple(section for section in sections if section.parts))


def _as_text(part: Part) -> tuple[Part, ...]:
    if not isinstance(part, Picture):
        return (part,)
    return (Paragraph(f"{part.title}. {part.about}"), part.instead) if part.instead else ()
