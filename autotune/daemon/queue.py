"""The daemon's job queue: a SQLite file that only the daemon writes, and a folder for each job.

When `submit` or `move` returns, the change is on disk and survives a crash or power loss: every change is one immediate
transaction, and every commit is synced. Each job's folder holds a copy of its row in ``job.json``, written before the
commit. A damaged database is renamed and rebuilt from these copies (`open_queue`), so the queue is never silently
empty.

    queue = open_queue(QueueFiles(folder))
    job = queue.submit(request)
    queue.move(job.id, JobState.QUEUED, Running(since=timestamp(), device="cpu", …))
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlite_utils import Database
from sqlite_utils.db import DescIndex

from autotune.base.clock import timestamp
from autotune.base.errors import MachineError, UnknownNameError, UsageError
from autotune.base.files import make_folder, no_room, sweep_temporaries, sync_folder, write_atomic
from autotune.base.layout import JobFiles, QueueFiles
from autotune.base.records import Job, JobRequest, JobRow, JobState, Status

#: Version of the tables, which the file's ``user_version`` has; 0 stands for a file without tables.
_VERSION = 1


def _make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables, unless they are there. A change of `_VERSION` also has to convert older ones here."""
    if _version_of(connection) == _VERSION:
        return
    connection.execute("begin immediate")
    jobs: Any = Database(connection)["jobs"]
    columns = {
        "id": int,
        "state": str,
        "priority": int,
        "mark": str,
        "study": str,
        "not_before": float,
        "opens": int,
        "closes": int,
        "after": int,
        "notice": str,
        "job": str,
        "sum": str,
    }
    jobs.create(columns, pk="id", not_null={"state", "priority", "mark", "study", "notice", "job", "sum"})
    jobs.create_index(["study"], unique=True)
    jobs.create_index(["mark"], unique=True)
    # A covering index for scheduling, so that ten thousand queued jobs are scanned without reading their rows.
    jobs.create_index(["state", DescIndex("priority"), "id", "not_before", "opens", "closes", "after", "notice"])
    connection.execute(f"pragma user_version = {_VERSION}")
    connection.execute("commit")


def _version_of(connection: sqlite3.Connection) -> int:
    version = int(connection.execute("pragma user_version").fetchone()[0])
    if version > _VERSION:
        raise MachineError(
            f"the queue was written by a newer autotune (version {version} of its tables)", advice="upgrade autotune."
        )
    return version


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
    "id",
    "state",
    "json_extract(job, '$.request.spec.name')",
    "json_extract(job, '$.request.label')",
    "priority",
    "json_extract(job, '$.submitted')",
    "coalesce(json_extract(job, '$.status.device'), json_extract(job, '$.placed'))",
    "coalesce(json_extract(job, '$.status.since'), json_extract(job, '$.status.ended'))",
    "json_extract(job, '$.status.ended')",
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


def _update(connection: sqlite3.Connection, job: Job) -> None:
    """Write a job into its existing row."""
    row = row_of(job)
    assignments = ", ".join(f"{name} = :{name}" for name in row if name != "id")
    connection.execute(f"update jobs set {assignments} where id = :id", row)


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
    columns = ", ".join(f"{expression} as {name}" for name, expression in zip(JobRow.model_fields, _BRIEF, strict=True))
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


#: SQLite's busy timeout. The daemon is the only writer, so it waits only for readers.
BUSY_S = 30.0
#: SQLite's largest integer.
_LARGEST = 2**63 - 1
_NEVER_DONE = (JobState.FAILED, JobState.CANCELLED)
_FREE_SPACE = "free some space; what was acknowledged is kept, and nothing else was."


class Queue:
    """The jobs in one ``queue.db``. Only the main thread of one process may write; any process may read.

    A method that changes the queue returns once the change is on disk. If it raises, the queue is unchanged and the
    call can be repeated.

    Args:
        database: the database file, if it is not the one of ``files``.

    Raises:
        MachineError: the file cannot be opened, read or written. Every method may raise it.
    """

    def __init__(self, files: QueueFiles, database: Path | None = None) -> None:
        self.files = files
        self._database = database or files.database
        self._connection: sqlite3.Connection | None = None
        #: Number of changes so far. Cached results are valid as long as it stays the same.
        self.changes = 0
        self._inode: int | None = None
        with self._reporting():
            _make_tables(self._open())

    def close(self) -> None:
        """Close the file. Safe to call repeatedly; the next use opens the file again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def is_in_place(self) -> bool:
        """Return whether the open file still exists under its name."""
        try:
            return self._inode in (None, os.stat(self._database).st_ino)
        except OSError:
            return False

    def submit(self, request: JobRequest) -> Job:
        """Submit one job; see `submit_all`."""
        return self.submit_all([request])[0]

    def submit_all(
        self, requests: Sequence[JobRequest], reserve: Callable[[Job], None] = lambda job: None
    ) -> list[Job]:
        """Submit jobs, all or none. A request whose mark is already in the queue returns the existing job.

        Args:
            reserve: called with each new job before it is acknowledged. If it raises, no job is submitted.

        Raises:
            UsageError: a study belongs to another job, or the job that a request depends on has failed.
            UnknownNameError: the job that a request depends on does not exist.
        """
        added: list[int] = []
        try:
            with self._writing() as connection:
                return [self._submit(connection, request, added, reserve) for request in requests]
        except BaseException:
            # These jobs were not acknowledged, so a queue rebuilt from the folders must not contain them.
            for number in added:
                shutil.rmtree(self.files.job(number).folder, ignore_errors=True)
            raise

    def _submit(
        self, connection: sqlite3.Connection, request: JobRequest, made: list[int], reserve: Callable[[Job], None]
    ) -> Job:
        existing = next(select(connection, "where mark = ?", request.spec.mark), None)
        if existing is not None:
            return existing
        if request.after is not None and self.job(request.after).state in _NEVER_DONE:
            raise UsageError(f"job {request.after} has failed or was cancelled, so that nothing can wait for it")
        owner = next(select(connection, "where study = ?", study_folder(request)), None)
        if owner is not None:
            raise UsageError(
                f"study {request.spec.name!r} is that of job {owner.id} already",
                advice="--study gives it another name.",
            )
        (last,) = connection.execute("select coalesce(max(id), 0) from jobs").fetchone()
        job = Job(id=last + 1, submitted=timestamp(), request=request)
        reserve(job)
        made.append(job.id)
        self._write_job_file(job)
        _insert(connection, [job])
        return job

    def is_taken(self, place: str) -> bool:
        """Return whether a job's study has this folder."""
        with self._reporting():
            return self._open().execute("select 1 from jobs where study = ?", (place,)).fetchone() is not None

    def is_known(self, mark: str) -> bool:
        """Return whether a request with this mark was submitted."""
        with self._reporting():
            return self._open().execute("select 1 from jobs where mark = ?", (mark,)).fetchone() is not None

    def move(self, number: int, from_: JobState | Collection[JobState], to: Status, **changes: object) -> Job:
        """Move a job from one state to another, or change the fields of its state.

        Args:
            from_: the states that the job may be in.
            changes: new values of other fields of the job.

        Raises:
            UnknownNameError: there is no such job.
            UsageError: the job is in another state. It is not changed.
        """
        states = {from_} if isinstance(from_, JobState) else set(from_)
        with self._writing() as connection:
            job = self.job(number)
            if job.state not in states:
                raise UsageError(
                    f"job {number} is {job.state.value}", advice=f"`autotune jobs show {number}` says more."
                )
            job = Job.model_validate({**dict(job), "status": to, **changes})
            self._write_job_file(job)
            _update(connection, job)
        return job

    def job(self, number: int) -> Job:
        """Return one job.

        Raises:
            UnknownNameError: there is no job with this number.
        """
        jobs = self._select("where id = ?", number) if number <= _LARGEST else []
        if not jobs:
            raise UnknownNameError("job", str(number), [], advice="`autotune jobs` lists them.")
        return jobs[0]

    def jobs(self, states: Collection[JobState] = tuple(JobState), *, limit: int = -1) -> list[Job]:
        """Return the first ``limit`` jobs (-1: all) in the given states, in the order they start: by priority, then by
        age."""
        where, values = _in(states)
        return self._select(f"{where} order by priority desc, id limit ?", *values, limit)

    def rows(self, states: Collection[JobState] = tuple(JobState)) -> str:
        """Return the same jobs as a JSON list of `JobRow`."""
        where, values = _in(states)
        with self._reporting():
            return select_brief(self._open(), f"{where} order by priority desc, id", *values)

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state."""
        with self._reporting():
            counts = dict(self._open().execute("select state, count(*) from jobs group by state").fetchall())
        return {state: counts.get(state.value, 0) for state in JobState}

    def startable(self, wall_s: float, minute: int, *, only_allow_busy: bool = False) -> list[int]:
        """Return the ids of queued jobs that need only a free device, in the order they start.

        Args:
            wall_s: current time in UNIX seconds.
            minute: minutes since midnight, local time.
            only_allow_busy: leave out the jobs without ``--allow-busy``.
        """
        query = """
            select id from jobs
            where state = 'queued' and coalesce(not_before, 0) <= ?
            and (opens is null or case when opens < closes then ? >= opens and ? < closes
                 else ? >= opens or ? < closes end)
            and (after is null or exists (select 1 from jobs first where first.id = jobs.after
                                          and first.state = 'done'))
            and (not ? or json_extract(job, '$.request.spec.allow_busy'))
            order by priority desc, id
        """
        with self._reporting():
            return [number for (number,) in self._open().execute(query, (wall_s, *[minute] * 4, only_allow_busy))]

    def stopped(self) -> list[Job]:
        """Return the queued jobs that were running when the daemon was stopped."""
        return self._select("where state = 'queued' and json_extract(job, '$.status.boot_id') is not null order by id")

    def dependency_failed(self) -> list[Job]:
        """Return the queued jobs whose dependency has failed or was cancelled."""
        return self._select(
            """where state = 'queued' and after is not null and exists (select 1 from jobs first
               where first.id = jobs.after and first.state in ('failed', 'cancelled')) order by id"""
        )

    def notice_due(self) -> list[Job]:
        """Return the ended jobs whose ``--on-done`` notice has not been sent yet."""
        return self._select("where state in ('done', 'failed', 'cancelled') and notice = 'due' order by id")

    def kept_fresh(self) -> list[Job]:
        """Return the jobs that are done and have ``--keep-fresh``, oldest first."""
        return self._select("where state = 'done' and json_extract(job, '$.request.keep_fresh') order by id")

    def restore(self, jobs: Collection[Job]) -> None:
        """Insert jobs unchanged, all or none. Used to rebuild a queue from the jobs' folders."""
        with self._writing() as connection:
            _insert(connection, jobs)

    def _select(self, rest: str, *values: object) -> list[Job]:
        """Select jobs. A damaged row is repaired first, so that it does not block all others."""
        while True:
            with self._reporting():
                try:
                    return list(select(self._open(), rest, *values))
                except DamagedRow as damaged:
                    if not self._repair(damaged.job):
                        raise

    def _repair(self, number: object) -> bool:
        """Restore a row from its job's folder; return whether that was possible."""
        if not isinstance(number, int):
            return False
        try:
            job = read_job_file(self.files.job(number))
        except MachineError:
            return False
        if job.id != number:
            return False
        _update(self._open(), job)
        return True

    def _write_job_file(self, job: Job) -> None:
        """Write the copy of the row to the job's folder."""
        folder = self.files.job(job.id)
        # The parent folder is not created: if it was removed, a new one would look like an empty queue.
        folder.folder.mkdir(exist_ok=True)
        text = job.model_dump_json()
        write_atomic(folder.job, f"{text}\n{checksum(text)}\n")

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            # isolation_level=None disables the implicit transactions of sqlite3, which are deferred.
            connection = sqlite3.connect(self._database, timeout=BUSY_S, isolation_level=None)
            connection.execute("pragma journal_mode = delete")
            connection.execute("pragma synchronous = full")
            self._inode = os.stat(self._database).st_ino
            self._connection = connection
        return self._connection

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._reporting():
            connection = self._open()
            connection.execute("begin immediate")
            try:
                yield connection
                connection.execute("commit")
                self.changes += 1
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("rollback")
                raise

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            # After a failed sync the connection's page cache cannot be trusted.
            self.close()
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            raise MachineError(
                f"{self._database}: {'the disk is full' if full else error}",
                advice=_FREE_SPACE if full else "nothing that was acknowledged is lost.",
            ) from error
        except OSError as error:
            full = no_room(error)
            raise MachineError(
                f"{self.files.folder}: {'the disk is full' if full else error.strerror}",
                advice=_FREE_SPACE if full else "the folder must be writable.",
            ) from error


def _in(states: Collection[JobState]) -> tuple[str, list[str]]:
    return f"where state in ({', '.join('?' for _ in states)})", [state.value for state in states]


def _insert(connection: sqlite3.Connection, jobs: Collection[Job]) -> None:
    table: Any = Database(connection)["jobs"]
    table.insert_all(map(row_of, jobs))


@dataclass(frozen=True)
class Opened:
    """An open queue, and the repairs made to open it.

    Attributes:
        aside: new path of the damaged database; ``None`` if it was sound or missing.
        lost: new paths of the job folders that could not be read.
    """

    queue: Queue
    aside: Path | None = None
    lost: tuple[Path, ...] = ()


def open_queue(files: QueueFiles) -> Opened:
    """Open the queue, and rebuild it from the jobs' folders if the database is damaged or missing.

    Only the process that writes the queue may call this.

    Raises:
        MachineError: the folder or the database cannot be read or written, or a newer autotune wrote it.
    """
    make_folder(files.jobs, "the folder must be writable.")
    sweep_temporaries(files.folder)
    if files.database.exists() and is_sound(files.database):
        return Opened(Queue(files))
    jobs, lost = _read_folders(files)
    # Built under a temporary name, so that a crash in between changes nothing.
    files.database_in_making.unlink(missing_ok=True)
    queue = Queue(files, files.database_in_making)
    queue.restore(jobs)
    queue.close()
    # The journal is moved first: SQLite would roll an old journal back into the new database.
    for path in (files.journal, files.database):
        aside = _set_aside(path)
    files.database_in_making.rename(files.database)
    sync_folder(files.folder)
    return Opened(Queue(files), aside, tuple(p for p in map(_set_aside, lost) if p is not None))


def _read_folders(files: QueueFiles) -> tuple[list[Job], list[Path]]:
    """Return the jobs in the folders, and the folders whose job cannot be read."""
    jobs: list[Job] = []
    lost: list[Path] = []
    studies: set[str] = set()
    for folder in sorted(p for p in files.jobs.iterdir() if p.name.isdigit()):
        text = verified_text(JobFiles(folder))
        # A job written by another version is not lost: `job_of` raises, and nothing is changed.
        job = None if text is None else job_of(text, str(folder))
        if job is not None and files.job(job.id).folder == folder and study_folder(job.request) not in studies:
            studies.add(study_folder(job.request))
            jobs.append(job)
        else:
            lost.append(folder)
    return jobs, lost


def is_sound(database: Path) -> bool:
    """Return whether the database passes SQLite's integrity check, has the expected tables, and every row is intact.

    Raises:
        MachineError: a newer autotune wrote the database.
    """
    try:
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
            whole = connection.execute("pragma integrity_check").fetchone() == ("ok",)
            if not whole or _version_of(connection) == 0:
                return False
            # Read one by one, because a list of ten thousand jobs would enlarge the process for good.
            for _ in select(connection):
                pass
            return True
    except sqlite3.Error:
        return False


def _set_aside(path: Path) -> Path | None:
    """Rename a file or folder to an unused name and return its new path; ``None`` if it does not exist."""
    if not path.exists():
        return None
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))
