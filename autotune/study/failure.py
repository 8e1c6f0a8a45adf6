"""``failure.json``: the error that ended a search without an outcome. It is kept until the study is resumed."""

from __future__ import annotations

import contextlib

from autotune.base.errors import AutotuneError, MachineError
from autotune.base.files import write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.records import Failure


def note_failure(files: StudyFiles, error: AutotuneError) -> None:
    """Write the error to the study's folder. On a full disk nothing is written: the error itself is enough."""
    failure = Failure(message=str(error), advice=error.advice, exit_code=error.exit_code)
    with contextlib.suppress(MachineError):
        write_atomic(files.failure, failure.model_dump_json(indent=1))


def read_failure(files: StudyFiles) -> Failure | None:
    """Return the error that ended the last run; ``None`` if there is none, or the file cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return Failure.model_validate_json(files.failure.read_text())
    return None
