"""A job as a row of ``queue.db``, and back; nothing is believed that is not as it was written."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from autotune.errors import MachineError
from autotune.records import Job, JobRequest, JobRow


class DamagedRow(sqlite3.DatabaseError):
    """A row is not what was written.

    Attributes:
        job: its number, as far as that can be believed.
    """

    def __init__(self, job: object, what: str) -> None:
        super().__init__(f"the row of job {job} {what}")
        self.job = job


_COLUMNS = "id, state, priority, mark, study, not_before, opens, closes, after, notice, job, sum"
#: What a list shows, taken out of the rows by SQLite itself: a queue may hold ten thousand.
_BRIEF = (
    *("id", "state", "json_extract(job, '$.request.spec.name')", "json_extract(job, '$.request.label')", "priority"),
    *("json_extract(job, '$.submitted')",),
    "coalesce(json_extract(job, '$.status.device'), json_extract(job, '$.placed'))",
    *(
        "coalesce(json_extract(job, '$.status.since'), json_extract(job, '$.status.ended'))",
        "json_extract(job, '$.status.ended')",
    ),
    "coalesce(json_extract(job, '$.status.why'), json_extract(job, '$.status.found'))",
)


def row_of(job: Job) -> dict[str, object]:
    """A job's row, by column."""
    text = job.model_dump_json()
    request = job.request
    opens, closes = request.window or (None, None)
    return {
        "id": job.id,
        "state": job.state.value,
        "priority": request.priority,
        "mark": request.spec.mark,
        "study": place_of(request),
        "not_before": request.not_before,
        "opens": opens,
        "closes": closes,
        "after": request.after,
        "notice": job.notice,
        "job": text,
        "sum": sum_of(text),
    }


def place_of(request: JobRequest) -> str:
    """The folder of a job's study. No two jobs share one."""
    return str(Path(request.studies_dir) / request.spec.name)


def sum_of(text: str) -> str:
    """What tells a text from the same with a bit flipped: SQLite's own check looks at the file's structure alone."""
    return hashlib.sha256(text.encode()).hexdigest()


def select(connection: sqlite3.Connection, rest: str = "", *values: object) -> Iterator[Job]:
    """The jobs that a query's last part selects, each read when its turn comes.

    Raises:
        DatabaseError: of SQLite, or one of the rows is not what was written.
        MachineError: one is what another version of autotune wrote, and this one does not understand it.
    """
    for row in connection.execute(f"select {_COLUMNS} from jobs {rest}", values):
        yield _job(row)


def select_brief(connection: sqlite3.Connection, rest: str, *values: object) -> str:
    """The same as a JSON list of `JobRow`, made by SQLite itself. Only its structure is checked."""
    fields = ", ".join(f"'{name}', {name}" for name in JobRow.model_fields)
    columns = ", ".join(f"{how} as {name}" for name, how in zip(JobRow.model_fields, _BRIEF, strict=True))
    query = f"select json_group_array(json_object({fields})) from (select {columns} from jobs {rest})"
    return str(connection.execute(query, values).fetchone()[0])


def _job(row: tuple[object, ...]) -> Job:
    number, text, kept_sum = row[0], row[-2], row[-1]
    if not isinstance(text, str) or sum_of(text) != kept_sum:
        raise DamagedRow(number, "is damaged")
    job = job_of(text, f"the row of job {number}")
    # The text itself need not be what this version would write: it may lack what has been added since.
    if row[:-2] != tuple(row_of(job).values())[:-2]:
        raise DamagedRow(number, "contradicts itself")
    return job


def job_of(text: str, where: str) -> Job:
    """The job in a text that is known to be as it was written.

    Raises:
        MachineError: it was written by a version that this one does not understand. That is no damage.
    """
    try:
        return Job.model_validate_json(text)
    except ValidationError as error:
        raise MachineError(
            f"{where} was written by another version of autotune", advice="use that version, or a newer one."
        ) from error
