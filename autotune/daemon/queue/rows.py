"""Converts jobs to rows of ``queue.db`` and back, and verifies every row that is read."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from autotune.base.errors import MachineError
from autotune.base.records import Job, JobRequest, JobRow


class DamagedRow(sqlite3.DatabaseError):
    """A row's checksum is wrong, or its columns contradict its JSON.

    Attributes:
        job: the job's id as read from the row, which may be damaged too.
    """

    def __init__(self, job: object, what: str) -> None:
        super().__init__(f"the row of job {job} {what}")
        self.job = job


_COLUMNS = "id, state, priority, mark, study, not_before, opens, closes, after, notice, job, sum"
#: SQL expressions for the fields of `JobRow`. SQLite evaluates them, because a queue may hold ten thousand jobs.
_BRIEF = (
    *("id", "state", "json_extract(job, '$.request.spec.name')", "json_extract(job, '$.request.label')", "priority"),
    *("json_extract(job, '$.submitted')",),
    "coalesce(json_extract(job, '$.status.device'), json_extract(job, '$.placed'))",
    *(
        "coalesce(json_extract(job, '$.status.since'), json_extract(job, '$.status.ended'))",
        "json_extract(job, '$.status.ended')",
    ),
    "coalesce(json_extract(job, '$.status.why'), json_extract(job, '$.status.found'))",
    # Only the scheduler knows why a job waits.
    "null",
    "json_extract(job, '$.request.refreshes')",
)


def row_of(job: Job) -> dict[str, object]:
    """Return a job's row as a dict of columns."""
    text = job.model_dump_json()
    request = job.request
    opens, closes = request.window or (None, None)
    return {
        "id": job.id,
        "state": job.state.value,
        "priority": request.priority,
        "mark": request.spec.mark,
        "study": study_folder(request),
        "not_before": request.not_before,
        "opens": opens,
        "closes": closes,
        "after": request.after,
        "notice": job.notice,
        "job": text,
        "sum": checksum(text),
    }


def study_folder(request: JobRequest) -> str:
    """Return the folder of a job's study. No two jobs share one."""
    return str(Path(request.studies_dir) / request.spec.name)


def checksum(text: str) -> str:
    """Return the SHA-256 of a text. It detects flipped bits, which SQLite's own structural check does not."""
    return hashlib.sha256(text.encode()).hexdigest()


def select(connection: sqlite3.Connection, rest: str = "", *values: object) -> Iterator[Job]:
    """Yield the jobs that match the rest of a query, reading each row lazily.

    Raises:
        sqlite3.DatabaseError: SQLite failed, or a row is damaged (`DamagedRow`).
        MachineError: another version of autotune wrote a row that this version cannot read.
    """
    for row in connection.execute(f"select {_COLUMNS} from jobs {rest}", values):
        yield _job(row)


def select_brief(connection: sqlite3.Connection, rest: str, *values: object) -> str:
    """Return the same jobs as a JSON list of `JobRow`, built by SQLite. Checksums are not verified."""
    fields = ", ".join(f"'{name}', {name}" for name in JobRow.model_fields)
    columns = ", ".join(f"{how} as {name}" for name, how in zip(JobRow.model_fields, _BRIEF, strict=True))
    query = f"select json_group_array(json_object({fields})) from (select {columns} from jobs {rest})"
    return str(connection.execute(query, values).fetchone()[0])


def _job(row: tuple[object, ...]) -> Job:
    number, text, stored_sum = row[0], row[-2], row[-1]
    if not isinstance(text, str) or checksum(text) != stored_sum:
        raise DamagedRow(number, "is damaged")
    job = job_of(text, f"the row of job {number}")
    # The JSON is not compared, because an older version may have written it without the newest fields.
    if row[:-2] != tuple(row_of(job).values())[:-2]:
        raise DamagedRow(number, "contradicts itself")
    return job


def job_of(text: str, where: str) -> Job:
    """Parse a job from text whose checksum was verified.

    Raises:
        MachineError: another version of autotune wrote a job that this version cannot read. It is not damaged.
    """
    try:
        return Job.model_validate_json(text)
    except ValidationError as error:
        raise MachineError(
            f"{where} was written by another version of autotune", advice="use that version, or a newer one."
        ) from error
