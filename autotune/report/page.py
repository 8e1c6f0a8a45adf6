"""Writes ``report.html`` into the folder of a finished study."""

from __future__ import annotations

import contextlib
from pathlib import Path

from autotune.base.files import write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.records import Outcome
from autotune.report.formats import to_html
from autotune.report.full_report import report_on
from autotune.report.material import read_material
from autotune.space.formatting import one_line


def leave_page(files: StudyFiles, outcome: Outcome, typed: str) -> str | None:
    """Write ``report.html``; return an error message, or ``None``. Never raises: the search itself has succeeded.

    Args:
        typed: the study as a command-line argument, relative to the current folder.
    """
    try:
        material = read_material(files, outcome, typed=typed, folder=Path.cwd())
        write_atomic(files.report, to_html(report_on(material)))
    except Exception as error:
        # An existing report describes an earlier outcome.
        with contextlib.suppress(OSError):
            files.report.unlink(missing_ok=True)
        return f"the report could not be written: {one_line(str(error)) or type(error).__name__}"
    return None
