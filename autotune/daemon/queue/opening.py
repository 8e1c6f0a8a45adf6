"""Opening a queue whatever state its file is in."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from autotune.daemon.queue.jobs import Queue
from autotune.daemon.queue.kept import sound_text
from autotune.daemon.queue.rows import job_of, place_of, select
from autotune.daemon.queue.schema import MIGRATIONS, newer, version_of
from autotune.errors import MachineError
from autotune.files import sweep_temporaries, sync_folder
from autotune.layout import JobFiles, QueueFiles
from autotune.records import Job


@dataclass(frozen=True)
class Opened:
    """A queue, and what had to be done to open it.

    Attributes:
        aside: where the damaged file is now; ``None`` where it was sound, or gone. lost: where the folders of jobs are
            now that could not be read.
    """

    queue: Queue
    aside: Path | None = None
    lost: tuple[Path, ...] = ()


def open_queue(files: QueueFiles) -> Opened:
    """Open the queue; make it again from the jobs' folders where its file is damaged or gone.

    Only the one process that writes may call it.

    Raises:
        MachineError: the folder or the file cannot be read or written, or was written by a newer autotune.
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
    jobs, lost = _kept(files)
    # Under another name until it is whole: a crash in between leaves things as they are.
    files.database_in_making.unlink(missing_ok=True)
    queue = Queue(files, files.database_in_making)
    queue.restore(jobs)
    queue.close()
    # The journal first: beside another file it would be played back into that one.
    for belonging in (files.journal, files.database):
        aside = _set_aside(belonging)
    files.database_in_making.rename(files.database)
    sync_folder(files.folder)
    return Opened(Queue(files), aside, tuple(p for p in map(_set_aside, lost) if p is not None))


def _kept(files: QueueFiles) -> tuple[list[Job], list[Path]]:
    """The jobs in the folders, and the folders whose job cannot be read."""
    jobs: list[Job] = []
    lost: list[Path] = []
    places: set[str] = set()
    for folder in sorted(p for p in files.jobs.iterdir() if p.name.isdigit()):
        text = sound_text(JobFiles(folder))
        # One that another version wrote is none that is lost: then nothing is touched.
        job = None if text is None else job_of(text, str(folder))
        if job is not None and files.job(job.id).folder == folder and place_of(job.request) not in places:
            places.add(place_of(job.request))
            jobs.append(job)
        else:
            lost.append(folder)
    return jobs, lost


def is_sound(database: Path) -> bool:
    """Whether SQLite finds nothing wrong with the file, its tables are ours, and every row is as it was written.

    Raises:
        MachineError: it was written by a newer autotune.
    """
    try:
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
            whole = connection.execute("pragma integrity_check").fetchone() == ("ok",)
            version = version_of(connection)
            if not whole or version == 0:
                return False
            try:
                # One after the other: ten thousand at once would stay in this process's memory.
                jobs = sum(1 for _ in select(connection))
            except sqlite3.DatabaseError:
                if version > len(MIGRATIONS):
                    raise newer(version) from None
                # An older one's rows are read once it is brought up to date.
                return version < len(MIGRATIONS)
            if version > len(MIGRATIONS) and not jobs:
                raise newer(version)
            # All rows are of this version: what says otherwise is damaged.
            return version <= len(MIGRATIONS)
    except sqlite3.Error:
        return False


def _set_aside(path: Path) -> Path | None:
    """Give a file or folder a name that is free; ``None`` where there is none."""
    if not path.exists():
        return None
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))
