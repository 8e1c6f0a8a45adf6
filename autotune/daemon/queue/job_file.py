"""Reads ``job.json``, the copy of a job's row in its folder."""

from __future__ import annotations

from autotune.daemon.queue.rows import checksum, job_of
from autotune.base.errors import MachineError
from autotune.base.layout import JobFiles
from autotune.base.records import Job


def read_job_file(files: JobFiles) -> Job:
    """Read a job from its folder.

    Raises:
        MachineError: the file cannot be read, or its checksum is wrong.
    """
    text = verified_text(files)
    if text is None:
        raise MachineError(f"{files.job} cannot be read, or is not as it was written")
    return job_of(text, str(files.job))


def verified_text(files: JobFiles) -> str | None:
    """Return the JSON text of a job; ``None`` if it cannot be read or its checksum is wrong."""
    try:
        # Not splitlines, because JSON text may contain Unicode line separators.
        text, stored_sum, _ = files.job.read_text().split("\n")
    except (OSError, ValueError):
        return None
    return text if checksum(text) == stored_sum else None
