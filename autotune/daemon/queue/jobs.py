"""The queue: submits, changes and reads jobs."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from autotune.base.clock import timestamp
from autotune.daemon.queue.job_file import read_job_file
from autotune.daemon.queue.rows import DamagedRow, checksum, row_of, select, select_brief, study_folder
from autotune.daemon.queue.schema import migrate
from autotune.base.errors import MachineError, UnknownNameError, UsageError
from autotune.base.files import no_room, write_atomic
from autotune.base.layout import QueueFiles
from autotune.base.records import Job, JobRequest, JobState, Status

#: SQLite's busy timeout. The daemon is the only writer, so it waits for readers at most.
BUSY_S = 30.0
#: SQLite's largest integer.
_LARGEST = 2**63 - 1
_LIST = "`autotune jobs` lists them."
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
            migrate(self._open())

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
        made: list[int] = []
        try:
            with self._writing() as connection:
                return [self._submit(connection, request, made, reserve) for request in requests]
        except BaseException:
            # These jobs were not acknowledged, so a queue rebuilt from the folders must not contain them.
            for number in made:
                shutil.rmtree(self.files.job(number).folder, ignore_errors=True)
            raise

    def _submit(
        self, connection: sqlite3.Connection, request: JobRequest, made: list[int], reserve: Callable[[Job], None]
    ) -> Job:
        same = next(select(connection, "where mark = ?", request.spec.mark), None)
        if same is not None:
            return same
        if request.after is not None and self._one(connection, request.after).state in _NEVER_DONE:
            raise UsageError(f"job {request.after} has failed or was cancelled, so that nothing can wait for it")
        taken = next(select(connection, "where study = ?", study_folder(request)), None)
        if taken is not None:
            raise UsageError(
                f"study {request.spec.name!r} is that of job {taken.id} already",
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
            job = self._one(connection, number)
            if job.state not in states:
                raise UsageError(
                    f"job {number} is {job.state.value}", advice=f"`autotune jobs show {number}` says more."
                )
            job = Job.model_validate({**dict(job), "status": to, **changes})
            self._write_job_file(job)
            row = row_of(job)
            assignments = ", ".join(f"{name} = :{name}" for name in row if name != "id")
            connection.execute(f"update jobs set {assignments} where id = :id", row)
        return job

    def job(self, number: int) -> Job:
        """Return one job.

        Raises:
            UnknownNameError: there is no job with this number.
        """
        found = self._select("where id = ?", number) if number <= _LARGEST else []
        if not found:
            raise UnknownNameError("job", str(number), [], advice=_LIST)
        return found[0]

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
            found = dict(self._open().execute("select state, count(*) from jobs group by state").fetchall())
        return {state: found.get(state.value, 0) for state in JobState}

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
        row = row_of(job)
        assignments = ", ".join(f"{name} = :{name}" for name in row if name != "id")
        self._open().execute(f"update jobs set {assignments} where id = :id", row)
        return True

    def _write_job_file(self, job: Job) -> None:
        """Write the copy of the row to the job's folder."""
        folder = self.files.job(job.id)
        # The parent folder is not created: if it was removed, a new one would look like an empty queue.
        folder.folder.mkdir(exist_ok=True)
        text = job.model_dump_json()
        write_atomic(folder.job, f"{text}\n{checksum(text)}\n")

    def _one(self, connection: sqlite3.Connection, number: int) -> Job:
        found = next(select(connection, "where id = ?", number), None) if number <= _LARGEST else None
        if found is None:
            raise UnknownNameError("job", str(number), [], advice=_LIST)
        return found

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
