"""The results of the command: lines of JSON, only ever appended, and a page made from the last of each part."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.card.parts import PARTS

#: A host's name of so few letters may be part of any word.
SHORT_NAME = 3
_PATH = re.compile(r"(?<![\w.:/])~?/(?!dev/|proc/|sys/)(?:[\w.+@~%-]+/)+([\w.+@~%-]*)")
_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F-]{8,}")


@dataclass(frozen=True)
class Result:
    """How a part ended.

    Attributes:
        status: ``ok``, ``failed`` or ``skipped``. reason: of the last two.
        seconds: it took. figures: what it noted until its end, whatever the end.
        machine: one line. commit: of the code. time: UTC, when it ended.
        rehearsal: made with small sizes on a CPU: the figures mean nothing.
    """

    part: str
    status: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    machine: str = ""
    commit: str = ""
    time: str = ""
    rehearsal: bool = False


def append(file: Path, result: Result) -> None:
    """Append a result. The file's folder is made if it is missing; host names, paths and UUIDs are taken out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(without_paths(asdict(result)), ensure_ascii=False, default=str)
    host = platform.node()
    if len(host) > SHORT_NAME:
        line = line.replace(host, "HOST")
    with file.open("a") as stream:
        stream.write(line + "\n")


def read(file: Path) -> list[Result]:
    """Return the results of a file in order; an unfinished last line is left out. None if there is no file."""
    if not file.exists():
        return []
    whole = file.read_text().rpartition("\n")[0]
    return [Result(**json.loads(line)) for line in whole.splitlines()]


def last_of_each(results: Sequence[Result]) -> dict[str, Result]:
    """Return the last result of each part, in the order of the parts."""
    found = {result.part: result for result in results}
    return {part.name: found[part.name] for part in PARTS if part.name in found}


def without_paths(value: Any) -> Any:
    """Return JSON data without the names of folders of the machine and without UUIDs of its cards."""
    if isinstance(value, str):
        return _UUID.sub(r"\1-…", _PATH.sub(r"…/\1", value))
    if isinstance(value, Mapping):
        return {str(name): without_paths(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(part) for part in value]
    return value


def page(results: Sequence[Result], title: str) -> str:
    """Return the last result of each part as Markdown."""
    last = last_of_each(results)
    lines = [f"# {title}", ""]
    lines += ["| part | status | seconds | commit | time |", "|---|---|--:|---|---|"]
    lines += [f"| {r.part} | {r.status} | {r.seconds:.0f} | {r.commit} | {r.time} |" for r in last.values()]
    for result in last.values():
        about = next(part.about for part in PARTS if part.name == result.part)
        lines += ["", f"## {result.part}: {about}", "", result.machine, ""]
        if result.rehearsal:
            lines += ["A rehearsal on a CPU with small sizes: the figures mean nothing.", ""]
        if result.reason:
            lines += [f"{result.status}: {_cell(result.reason)}", ""]
        lines += _shown(result.figures)
    return "\n".join(lines).rstrip() + "\n"


def _shown(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield Markdown: a bullet for each figure, and a table for each list of figures."""
    for name, value in figures.items():
        rows = value if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value) else None
        if rows is None:
            yield f"- {name}: {_cell(value)}"
            continue
        # What no row knows takes no column.
        columns = list(dict.fromkeys(key for row in rows for key in row if _cell(row[key])))
        yield from ("", f"{name}:", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns))
        for row in rows:
            yield "| " + " | ".join(_cell(row.get(key)) for key in columns) + " |"
        yield ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return " ".join(str(value).split()).replace("|", "\\|")
