"""The page that every finished search leaves in its folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from autotune.files import write_atomic
from autotune.formatting import one_line
from autotune.layout import StudyFiles
from autotune.records import Outcome
from autotune.report.full_report import story
from autotune.report.html import to_html
from autotune.report.material import read_material


def leave_page(files: StudyFiles, outcome: Outcome, *, typed: str) -> str | None:
    """Write ``report.html``; returns what went wrong, one sentence. Never raises: a report spoils no finished search.

    Args:
        typed: the study as commands take it from the current folder.
    """
    try:
        material = read_material(files, outcome, typed=typed, folder=Path.cwd())
        write_atomic(files.report, to_html(story(material)))
    except Exception as error:
        # One that is there already tells of an outcome before this one.
        with contextlib.suppress(OSError):
            files.report.unlink(missing_ok=True)
        return f"the report could not be written: {one_line(str(error)) or type(error).__name__}"
    return None
