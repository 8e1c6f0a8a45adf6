"""``study.db`` as a file of the machine: what SQLite refuses, in the words of `autotune.errors`."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from autotune.errors import MachineError
from autotune.files import FREE_SOME_SPACE
from autotune.layout import StudyFiles


@contextlib.contextmanager
def writing(files: StudyFiles) -> Iterator[None]:
    """Make the machine's fault of it when SQLite refuses to write."""
    try:
        yield
    except Exception as error:
        refused = refusal(error)
        if refused is None:
            raise
        raise cannot_write(files, refused) from error


def refusal(error: BaseException) -> sqlite3.OperationalError | None:
    """SQLite's own error, however Optuna and SQLAlchemy have wrapped it."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, sqlite3.OperationalError):
        link = link.__cause__ or link.__context__
    return link


def cannot_write(files: StudyFiles, refused: sqlite3.OperationalError) -> MachineError:
    """The error for that."""
    full = is_full(refused)
    return MachineError(
        f"cannot write {files.database}: {'the disk is full' if full else refused}",
        advice=FREE_SOME_SPACE if full else "nothing is lost; `autotune resume` goes on once it can be written.",
    )


def is_full(refused: sqlite3.OperationalError) -> bool:
    """Whether the disk is."""
    # Errors of the module itself have no code.
    return getattr(refused, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
