"""Detects changes to a job's files since it was submitted."""

from __future__ import annotations

from pathlib import Path

from autotune.workload.catalog import source_hash
from autotune.base.errors import MachineError, UsageError
from autotune.base.records import JobRequest


def changed_source(request: JobRequest) -> str | None:
    """Return the first of a job's files that has changed since the job was submitted; ``None`` if none has.

    Raises:
        MachineError: a file cannot be read, perhaps because its disk is not mounted yet.
    """
    for path, submitted in request.sources.items():
        try:
            found = source_hash(Path(path))
        except (UsageError, OSError) as error:
            raise MachineError(f"{path} cannot be read: {error}") from error
        if found != submitted:
            return path
    return None
