"""A report as GitHub-flavoured Markdown (https://github.github.com/gfm/).

Every text is escaped: a cause, a path or a model's name is shown as it is and never becomes markup, a link or a new
cell of a table.
"""

from __future__ import annotations

import re

from autotune.formatting import one_line
from autotune.report.document import Commands, Curves, Document, Facts, Grid, Kind, Links, Paragraph, Part

#: Characters that begin something inside a line. Tildes strike out, dollars begin mathematics on GitHub.
_INLINE = re.compile(r"[\\`*\[\]<>|~$#]")
#: An underscore means emphasis only at a word's edge, and most of ours stand inside one.
_EDGE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
_ENTITY = re.compile(r"&(?=#?\w+;)")
#: What GitHub makes links of by itself.
_LINK = re.compile(r"(?<=\w)(:)(?=//)|(?<=\bwww)(\.)", re.IGNORECASE)
#: What begins a list, a quotation or a rule at the front of a line.
_FRONT = re.compile(r"^([-+=]|\d+[.)](?=\s|$))")


def to_markdown(document: Document) -> str:
    """The report as Markdown, ending with a line break."""
    blocks = [f"# {escape(document.title)}"]
    for section in document.sections:
        blocks.append(f"## {escape(section.title)}")
        for part in section.parts:
            block = _part(part)
            # Two lists with the same bullet would be read as one.
            if block.startswith("- ") and blocks[-1].startswith("- "):
                block = "\n".join(f"*{line[1:]}" for line in block.splitlines())
            blocks += [block] if block else []
    return "\n\n".join(blocks) + "\n"


def escape(text: str, *, front: bool = False) -> str:
    """``text`` on one line, such that Markdown shows it as it is; ``front`` where it begins a block."""
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
        case Commands():
            return _fenced([one_line(line) for line in part.lines])
        case Links():
            return "\n".join(f"- {escape(what, front=True)}: {escape(where)}" for what, where in part.rows)


def _grid(part: Grid) -> str:
    rules = ["--:" if column.kind is Kind.FIGURE else ":--" for column in part.columns]
    rows = [[escape(cell) for cell in row] for row in part.rows]
    if part.total and rows:
        rows[-1] = [f"**{cell}**" if cell else "" for cell in rows[-1]]
    lines = [[escape(column.title) for column in part.columns], rules, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _fenced(lines: list[str]) -> str:
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}sh", *lines, fence])
