"""Tables and sentences about studies as rich renderables, and the full report. Prints nothing.

On a narrow terminal, figures keep their units and do not wrap; only descriptions of configurations do. Colour never
carries meaning alone. Text from outside (causes, paths, model names) is never interpreted as markup, and its control
characters are removed.
"""

from __future__ import annotations

from autotune.report.document import to_html, to_markdown, to_terminal, to_text
from autotune.report.full_report import (
    best_so_far_line,
    best_table,
    headline_of,
    leave_page,
    report_on,
    short_report_on,
    to_json,
)
from autotune.report.listing import StudyRow, space_table, studies_table, trials_table
from autotune.report.material import Material, read_material
from autotune.report.sections import heat_table

__all__ = [
    "Material",
    "StudyRow",
    "best_so_far_line",
    "best_table",
    "headline_of",
    "heat_table",
    "leave_page",
    "read_material",
    "report_on",
    "short_report_on",
    "space_table",
    "studies_table",
    "to_html",
    "to_json",
    "to_markdown",
    "to_terminal",
    "to_text",
    "trials_table",
]
