"""A report as one JSON object: the outcome's figures as numbers, and the report's sections as they are printed.

``{"schema_version", "study", "state", "title", "answer", "training", "outcome", "sections"}``, as docs/json.md shows.
``state`` is ``done``, ``failed`` or ``unfinished``; ``outcome`` is the object that ``autotune search --json`` prints,
or null if the search is not done. ``sections`` is a list of ``{"title", "parts"}``, and a part has a ``kind``, which
says what else it has:

============= ============================================================
``paragraph`` ``text``, and ``strong`` if it holds the main result
``facts``     ``rows`` of a name and a value
``table``     ``columns`` (names), and ``rows`` of as many texts
``curves``    ``rows`` of ``{"name", "values"}``; a value that is not finite is null
``picture``   ``title``, ``about`` (in words), ``plot`` (`autotune.report.plots`, and its ``kind``), ``table`` or null
``commands``  ``lines`` to type or paste, and their ``language``
``links``     ``rows`` of a name and a target
============= ============================================================
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from autotune.base.records import SCHEMA_VERSION, Outcome
from autotune.report.answer import answer_of
from autotune.report.document import Commands, Curves, Document, Facts, Grid, Links, Paragraph, Part, Picture
from autotune.report.epochs import whole_training, whole_training_s
from autotune.report.material import Material


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
        "sections": [{"title": s.title, "parts": [_part(part) for part in s.parts]} for s in document.sections],
    }


def _training(outcome: Outcome, material: Material) -> dict[str, Any] | None:
    """Return how long the training takes that was asked about."""
    whole = whole_training(material)
    if whole is None:
        return None
    names = {"baseline": outcome.baseline, "best": outcome.best, "best_same_batch": outcome.best_same_batch}
    seconds = {f"{name}_s": whole_training_s(outcome, standing, whole) for name, standing in names.items()}
    return {"samples": whole.samples, **seconds, "price_per_hour": material.spec.price_per_hour}


def _part(part: Part) -> dict[str, Any]:
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
            instead = None if part.instead is None else _part(part.instead)
            return {"kind": "picture", "title": part.title, "about": part.about, "plot": plot, "table": instead}
        case Commands():
            return {"kind": "commands", "language": part.language, "lines": list(part.lines)}
        case Links():
            return {"kind": "links", "rows": [list(row) for row in part.rows]}


def _plain(value: Any) -> Any:
    """Return a value of dataclasses as JSON has it: lists for tuples, null for what is not finite."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
