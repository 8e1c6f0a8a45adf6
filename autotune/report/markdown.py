"""A report as GitHub-flavoured Markdown (https://github.github.com/gfm/).

All text is escaped: a cause, a path or a model's name is shown literally and never becomes markup, a link or a new
table cell.
"""

from __future__ import annotations

import re

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
    without_pictures,
)

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
            block = _part(part)
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
    return _FRONT.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", text) if front else text


def _part(part: Part) -> str:
    match part:
        case Paragraph():
            text = escape(part.text, front=not part.strong)
            return f"**{text}**" if part.strong and text else text
        case Facts():
            return "\n".join(f"- **{escape(name) or '?'}**: {escape(what)}" for name, what in part.rows)
        case Grid():
            return _grid(part)
        case Curves():
            rows = ((name, ", ".join(f"{v:.4g}" for v in values) or "no step") for name, values in part.rows)
            return "\n".join(f"- {escape(name, front=True)}: {numbers}" for name, numbers in rows)
        case Picture():
            raise ValueError("Markdown has no pictures")
        case Commands():
            return _fenced([one_line(line) for line in part.lines], part.language)
        case Links():
            return "\n".join(f"- {escape(what, front=True)}: {escape(where)}" for what, where in part.rows)


def _grid(part: Grid) -> str:
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
