"""Translates SQLite's errors on writing ``study.db`` to `autotune.errors`."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from autotune.errors import MachineError
from autotune.files import FREE_SOME_SPACE
from autotune.layout import StudyFiles


@contextlib.contextmanager
def writing(files: StudyFiles) -> Iterator[None]:
    """Raise `MachineError` if SQLite refuses to write inside the context."""
    try:
        yield
    except Exception as error:
        refused = refusal(error)
        if refused is None:
            raise
        raise cannot_write(files, refused) from error


def refusal(error: BaseException) -> sqlite3.OperationalError | None:
    """Return the SQLite error that Optuna and SQLAlchemy have wrapped; ``None`` if there is none."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, sqlite3.OperationalError):
        link = link.__cause__ or link.__context__
    return link


def cannot_write(files: StudyFiles, refused: sqlite3.OperationalError) -> MachineError:
    """Return the error to raise when SQLite has refused to write."""
    full = is_full(refused)
    return MachineError(
        f"cannot write {files.database}: {'the disk is full' if full else refused}",
        advice=FREE_SOME_SPACE if full else "nothing is lost; `autotune resume` goes on once it can be written.",
    )


def is_full(refused: sqlite3.OperationalError) -> bool:
    """Return whether SQLite refused because the disk is full."""
    # Errors raised by the sqlite3 module itself have no code.
    return getattr(refused, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
