"""A report as one JSON object: the outcome's figures as numbers, and the report's sections as they are printed.

``{"schema_version", "study", "state", "outcome", "title", "sections"}``. ``state`` is ``done``, ``failed`` or
``unfinished``; ``outcome`` is the object that ``autotune search --json`` prints, or null if the search is not done.
``sections`` is a list of ``{"title", "parts"}``, and a part has a ``kind``, which says what else it has:

============= ============================================================
``paragraph`` ``text``, and ``strong`` if it holds the main result
``facts``     ``rows`` of a name and a value
``table``     ``columns`` (names), and ``rows`` of as many texts
``curves``    ``rows`` of ``{"name", "values"}``; a value that is not finite is null
``commands``  ``lines`` to type
``links``     ``rows`` of a name and a target
============= ============================================================
"""

from __future__ import annotations

import math
from typing import Any

from autotune.records import SCHEMA_VERSION
from autotune.report.document import Commands, Curves, Document, Facts, Grid, Links, Paragraph, Part
from autotune.report.material import Material


def to_json(material: Material, document: Document) -> dict[str, Any]:
    """Return the report as an object for ``json.dumps``.

    Args:
        document: the report of this material, from `report_on`.
    """
    outcome = material.outcome
    return {
        "schema_version": SCHEMA_VERSION,
        "study": material.name,
        "state": "done" if outcome else "failed" if material.failure else "unfinished",
        "outcome": outcome and outcome.model_dump(mode="json"),
        "title": document.title,
        "sections": [{"title": s.title, "parts": [_part(part) for part in s.parts]} for s in document.sections],
    }


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
        case Commands():
            return {"kind": "commands", "lines": list(part.lines)}
        case Links():
            return {"kind": "links", "rows": [list(row) for row in part.rows]}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
