"""Opens a queue and rebuilds its database if that is damaged or missing."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from autotune.daemon.queue.job_file import verified_text
from autotune.daemon.queue.jobs import Queue
from autotune.daemon.queue.rows import job_of, select, study_folder
from autotune.daemon.queue.schema import MIGRATIONS, newer, version_of
from autotune.base.errors import MachineError
from autotune.base.files import sweep_temporaries, sync_folder
from autotune.base.layout import JobFiles, QueueFiles
from autotune.base.records import Job


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
    try:
        files.jobs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"cannot make {files.jobs}: {error.strerror}", advice="the folder must be writable."
        ) from error
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
            version = version_of(connection)
            if not whole or version == 0:
                return False
            if version > len(MIGRATIONS):
                raise newer(version)
            if version < len(MIGRATIONS):
                # Rows of an older version are read after the migration.
                return True
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
