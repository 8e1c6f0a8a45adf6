"""``failure.json``: the error that ended a search without an outcome, kept until the study goes on."""

from __future__ import annotations

import contextlib

from autotune.errors import AutotuneError, MachineError
from autotune.files import write_atomic
from autotune.layout import StudyFiles
from autotune.records import Failure


def note_failure(files: StudyFiles, error: AutotuneError) -> None:
    """Leave the error in the study's folder. On a full disk it is not left: the error itself says all there is."""
    failure = Failure(message=str(error), advice=error.advice, exit_code=error.exit_code)
    with contextlib.suppress(MachineError):
        write_atomic(files.failure, failure.model_dump_json(indent=1))


def read_failure(files: StudyFiles) -> Failure | None:
    """The error that ended the last run, or ``None`` where none did, or none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return Failure.model_validate_json(files.failure.read_text())
    return None
