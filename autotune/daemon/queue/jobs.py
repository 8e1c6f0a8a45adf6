"""The queue itself: jobs in, jobs changed, jobs read."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from autotune.clock import timestamp
from autotune.daemon.queue.kept import read_kept
from autotune.daemon.queue.rows import DamagedRow, place_of, row_of, select, select_brief, sum_of
from autotune.daemon.queue.schema import migrate
from autotune.errors import MachineError, UnknownNameError, UsageError
from autotune.files import no_room, write_atomic
from autotune.layout import QueueFiles
from autotune.records import Job, JobRequest, JobState, Status

#: A writer that finds another one waits so long. There is one writer; who reads holds nobody up for longer.
BUSY_S = 30.0
_LIST = "`autotune jobs` lists them."
_NEVER_DONE = (JobState.FAILED, JobState.CANCELLED)
_FREE_SPACE = "free some space; what was acknowledged is kept, and nothing else was."


class Queue:
    """The jobs in one ``queue.db``. One process writes, its main thread alone; any may read.

    Every method that changes something returns when that is on disk, and raises where it is not: then the queue is as
    it was before, and the same call may be made again.

    Args:
        database: the file, where it is not the one of `files`.

    Raises:
        MachineError: the file cannot be opened, or (from every method) read or written.
    """

    def __init__(self, files: QueueFiles, database: Path | None = None) -> None:
        self.files = files
        self._database = database or files.database
        self._connection: sqlite3.Connection | None = None
        #: How often something was changed: what was read before is still true while this is the same.
        self.changes = 0
        self._inode: int | None = None
        with self._reporting():
            migrate(self._open())

    def close(self) -> None:
        """Call it any number of times; the next use opens the file again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def is_in_place(self) -> bool:
        """Whether the file that is open is still the one of that name."""
        try:
            return self._inode in (None, os.stat(self._database).st_ino)
        except OSError:
            return False

    def submit(self, request: JobRequest) -> Job:
        """Take a job in; see `submit_all`."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[JobRequest]) -> list[Job]:
        """Take jobs in, all or none. A request that is here already (its mark says so) is not taken twice.

        Raises:
            UsageError: a study is another job's already.
            UnknownNameError: one is to wait for a job that there is not.
        """
        made: list[int] = []
        try:
            with self._writing() as connection:
                return [self._submit(connection, request, made) for request in requests]
        except BaseException:
            # Nobody was told that they were taken, so no later queue may find them.
            for number in made:
                shutil.rmtree(self.files.job(number).folder, ignore_errors=True)
            raise

    def _submit(self, connection: sqlite3.Connection, request: JobRequest, made: list[int]) -> Job:
        same = next(select(connection, "where mark = ?", request.spec.mark), None)
        if same is not None:
            return same
        if request.after is not None and self._one(connection, request.after).state in _NEVER_DONE:
            raise UsageError(f"job {request.after} has failed or was cancelled, so that nothing can wait for it")
        taken = next(select(connection, "where study = ?", place_of(request)), None)
        if taken is not None:
            raise UsageError(
                f"study {request.spec.name!r} is that of job {taken.id} already",
                advice="--study gives it another name.",
            )
        (last,) = connection.execute("select coalesce(max(id), 0) from jobs").fetchone()
        job = Job(id=last + 1, submitted=timestamp(), request=request)
        made.append(job.id)
        self._keep(job)
        _insert(connection, [job])
        return job

    def is_taken(self, place: str) -> bool:
        """Whether a folder is that of a job's study."""
        with self._reporting():
            return self._open().execute("select 1 from jobs where study = ?", (place,)).fetchone() is not None

    def is_known(self, mark: str) -> bool:
        """Whether a request with this mark was taken in."""
        with self._reporting():
            return self._open().execute("select 1 from jobs where mark = ?", (mark,)).fetchone() is not None

    def move(self, number: int, from_: JobState | Collection[JobState], to: Status, **changes: object) -> Job:
        """Let a job go from one state to another, or change what its state holds.

        Args:
            from_: the states in which it may be found.
            changes: of other fields of the job.

        Raises:
            UnknownNameError: there is no such job.
            UsageError: it is in another state; nothing is changed.
        """
        states = {from_} if isinstance(from_, JobState) else set(from_)
        with self._writing() as connection:
            job = self._one(connection, number)
            if job.state not in states:
                raise UsageError(
                    f"job {number} is {job.state.value}", advice=f"`autotune jobs show {number}` says more."
                )
            job = Job.model_validate({**dict(job), "status": to, **changes})
            self._keep(job)
            row = row_of(job)
            assignments = ", ".join(f"{name} = :{name}" for name in row if name != "id")
            connection.execute(f"update jobs set {assignments} where id = :id", row)
        return job

    def job(self, number: int) -> Job:
        """One job.

        Raises:
            UnknownNameError: there is none with this number.
        """
        found = self._select("where id = ?", number)
        if not found:
            raise UnknownNameError("job", str(number), [], advice=_LIST)
        return found[0]

    def jobs(self, states: Collection[JobState] = tuple(JobState)) -> list[Job]:
        """All jobs in some states, the one whose turn it is first: by priority, then by age."""
        where, values = _in(states)
        return self._select(f"{where} order by priority desc, id", *values)

    def rows(self, states: Collection[JobState] = tuple(JobState)) -> str:
        """The same for a list: JSON, a list of `JobRow`."""
        where, values = _in(states)
        with self._reporting():
            return select_brief(self._open(), f"{where} order by priority desc, id", *values)

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        with self._reporting():
            found = dict(self._open().execute("select state, count(*) from jobs group by state").fetchall())
        return {state: found.get(state.value, 0) for state in JobState}

    def startable(self, wall_s: float, minute: int) -> list[int]:
        """The numbers of queued jobs that nothing but a device keeps from running, the one whose turn it is first.

        Args:
            wall_s: UNIX seconds now. minute: after midnight, local time.
        """
        query = """
            select id from jobs
            where state = 'queued' and coalesce(not_before, 0) <= ?
            and (opens is null or case when opens < closes then ? >= opens and ? < closes
                 else ? >= opens or ? < closes end)
            and (after is null or exists (select 1 from jobs first where first.id = jobs.after
                                          and first.state = 'done'))
            order by priority desc, id
        """
        with self._reporting():
            return [number for (number,) in self._open().execute(query, (wall_s, *[minute] * 4))]

    def stopped(self) -> list[Job]:
        """Queued jobs that ran when the daemon was told to stop."""
        return self._select("where state = 'queued' and json_extract(job, '$.status.boot_id') is not null order by id")

    def in_vain(self) -> list[Job]:
        """Queued jobs that wait for one that will never be done."""
        return self._select(
            """where state = 'queued' and after is not null and exists (select 1 from jobs first
               where first.id = jobs.after and first.state in ('failed', 'cancelled')) order by id"""
        )

    def unnoticed(self) -> list[Job]:
        """Ended jobs whose end somebody has still to be told."""
        return self._select("where state in ('done', 'failed', 'cancelled') and notice = 'due' order by id")

    def kept_fresh(self) -> list[Job]:
        """Jobs that are done and whose profile is to be kept fresh, the oldest first."""
        return self._select("where state = 'done' and json_extract(job, '$.request.keep_fresh') order by id")

    def restore(self, jobs: Collection[Job]) -> None:
        """Enter jobs as they are, all or none: into a queue that is made again from its folders."""
        with self._writing() as connection:
            _insert(connection, jobs)

    def _select(self, rest: str, *values: object) -> list[Job]:
        """Jobs, with every damaged row among them mended first: one of them must not hold up all others."""
        while True:
            with self._reporting():
                try:
                    return list(select(self._open(), rest, *values))
                except DamagedRow as damaged:
                    if not self._mended(damaged.job):
                        raise

    def _mended(self, number: object) -> bool:
        """Make a row again from its job's folder, if that has it."""
        if not isinstance(number, int):
            return False
        try:
            job = read_kept(self.files.job(number))
        except MachineError:
            return False
        if job.id != number:
            return False
        row = row_of(job)
        assignments = ", ".join(f"{name} = :{name}" for name in row if name != "id")
        self._open().execute(f"update jobs set {assignments} where id = :id", row)
        return True

    def _keep(self, job: Job) -> None:
        """Beside the row, what the row could be made from again."""
        folder = self.files.job(job.id)
        # Not what it lies in: where that was taken away, a new one would look like an empty queue.
        folder.folder.mkdir(exist_ok=True)
        text = job.model_dump_json()
        write_atomic(folder.job, f"{text}\n{sum_of(text)}\n")

    def _one(self, connection: sqlite3.Connection, number: int) -> Job:
        found = next(select(connection, "where id = ?", number), None)
        if found is None:
            raise UnknownNameError("job", str(number), [], advice=_LIST)
        return found

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            # Without the module's own transactions: it begins a deferred one before each write.
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
            # What a failed sync has left in the connection's cache is not to be trusted.
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
