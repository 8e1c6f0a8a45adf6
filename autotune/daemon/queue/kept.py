"""A job as its folder has it, beside its row."""

from __future__ import annotations

from autotune.daemon.queue.rows import job_of, sum_of
from autotune.errors import MachineError
from autotune.layout import JobFiles
from autotune.records import Job


def read_kept(files: JobFiles) -> Job:
    """A job as its folder has it.

    Raises:
        MachineError: it cannot be read, or is not what was written.
    """
    text = sound_text(files)
    if text is None:
        raise MachineError(f"{files.job} cannot be read, or is not as it was written")
    return job_of(text, str(files.job))


def sound_text(files: JobFiles) -> str | None:
    """The text of a job, if it is as it was written."""
    try:
        # Not by splitlines: a JSON text may hold what Unicode counts among the line breaks.
        text, kept_sum, _ = files.job.read_text().split("\n")
    except (OSError, ValueError):
        return None
    return text if sum_of(text) == kept_sum else None
