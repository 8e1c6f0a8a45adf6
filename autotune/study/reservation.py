"""Reservations: the folder of a study is kept for a job of the daemon until the job begins its search.

A job writes ``reserved.json`` into the folder, and a search writes ``study.yaml``. Each writes its own file first and
looks for the other's afterwards, so at least one of two that come at the same moment sees the other, and gives way
before it has acknowledged or measured anything. This needs no lock, and so works on network file systems too.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from autotune.base.errors import MachineError, UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.records import Record


class Reservation(Record):
    """For which job a folder is kept.

    Attributes:
        job: the job's number.
        mark: mark of the study that the job will make.
        daemon: the daemon's state folder.
    """

    job: int
    mark: str
    daemon: str


def reserve(files: StudyFiles, reservation: Reservation) -> None:
    """Keep a folder for a job. The folder is made if it does not exist.

    Raises:
        UsageError: the folder holds a study.
        MachineError: the folder cannot be made or written.
    """
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"cannot make {files.folder}: {error.strerror}", advice="--studies-dir names another folder."
        ) from error
    write_atomic(files.reservation, reservation.model_dump_json())
    if files.request.exists():
        files.reservation.unlink(missing_ok=True)
        raise UsageError(f"study {files.name!r} exists already", advice="another --study starts a new one.")


def reservation_of(files: StudyFiles) -> Reservation | None:
    """Return the reservation of a folder; ``None`` if there is none.

    Raises:
        UsageError: the file is none of ours.
    """
    try:
        return Reservation.model_validate_json(files.reservation.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{files.reservation} cannot be read", advice="another --study starts a new study; or remove the file."
        ) from error


def refuse_reserved(files: StudyFiles, mark: str) -> None:
    """Refuse a study in a folder that is kept for another one.

    Raises:
        UsageError: the folder is kept for another study.
    """
    found = reservation_of(files)
    if found is not None and found.mark != mark:
        raise UsageError(
            f"study {files.name!r} is kept for job {found.job} of the daemon",
            advice=f"another --study starts a new one; `autotune jobs show {found.job}` says when the job runs.",
        )


def release(files: StudyFiles, mark: str) -> None:
    """Give up the reservation of a study, and remove its folder if nothing else is in it. Never raises."""
    with contextlib.suppress(OSError, UsageError):
        found = reservation_of(files)
        if found is not None and found.mark == mark:
            files.reservation.unlink(missing_ok=True)
        Path(files.folder).rmdir()
