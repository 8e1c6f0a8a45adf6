"""Whether a job's files are still what was submitted."""

from __future__ import annotations

from pathlib import Path

from autotune.catalog import source_hash
from autotune.errors import MachineError, UsageError
from autotune.records import JobRequest


def changed_source(request: JobRequest) -> str | None:
    """The first of a job's files that is not as it was when the job was submitted.

    Raises:
        MachineError: one cannot be read now: its disk may not be there yet.
    """
    for path, submitted in request.sources.items():
        try:
            found = source_hash(Path(path))
        except (UsageError, OSError) as error:
            raise MachineError(f"{path} cannot be read: {error}") from error
        if found != submitted:
            return path
    return None
