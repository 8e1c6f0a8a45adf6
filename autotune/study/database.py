"""Opens a study in its own file, and translates SQLite's errors on writing it to `autotune.base.errors`."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection

from autotune.base.errors import AutotuneError, MachineError, UsageError
from autotune.base.files import FREE_SOME_SPACE
from autotune.base.layout import StudyFiles
from autotune.base.records import StudySpec
from autotune.study.request import read_request
from autotune.study.shared import SharedStudy

#: First letters of the names of our attributes of an Optuna study.
OURS = "autotune_"
#: The folder of a study in a shared database, as its last search has seen it.
_FOLDER = f"{OURS}folder"

IF_DAMAGED = "if it is damaged, move it away; `autotune resume` reads the trials again from their folders."


def open_study(files: StudyFiles, *, objectives: int = 1) -> optuna.Study:
    """Open the study in the database, to write to it. It is made if it does not exist.

    Args:
        objectives: their number in a study that is made.

    Raises:
        MachineError: the file is not a database that this version can use, holds somebody else's study, or cannot be
            written.
    """
    # Optuna's log lines would break up the live panel.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        storage = optuna.storages.RDBStorage(files.storage_url)
        name = name_in(storage, files) or files.name
        study = optuna.create_study(
            study_name=name, storage=storage, directions=["maximize"] * objectives, load_if_exists=True
        )
        if not study.user_attrs:
            study.set_user_attr(f"{OURS}study", name)
        return study
    except AutotuneError:
        raise
    except Exception as error:  # SQLAlchemy's and sqlite3's errors have no common base
        refused = refusal(error)
        if refused is not None and is_full(refused):
            raise cannot_write(files, refused) from error
        raise MachineError(
            f"{files.database} cannot be opened: {error}".splitlines()[0],
            # Raised for tables of another version; the message says what to do.
            advice=None if isinstance(error, RuntimeError) else IF_DAMAGED,
        ) from error


def open_shared(shared: SharedStudy, spec: StudySpec, files: StudyFiles) -> optuna.Study:
    """Open the study in a database that several machines share, to write to it. It is made if it does not exist.

    Raises:
        UsageError: its name belongs to another study there, or the folder is a copy of the one that has it.
        MachineError: the database does not answer.
    """
    name = shared.enter(spec)
    directions = [StudyDirection.MAXIMIZE] * len(spec.objectives)
    study = optuna.create_study(study_name=name, storage=shared.optuna, directions=directions, load_if_exists=True)
    before, now = study.user_attrs.get(_FOLDER), str(files.folder.resolve())
    if before is not None and _is_copy(files, StudyFiles(Path(before)), spec):
        raise UsageError(
            f"{files.folder} is a copy of {before}, and both have the same trials in {shared.database.address}",
            advice="resume that one, or start a new study from this one with `autotune resume --fork`.",
        )
    if before != now:
        study.set_user_attr(_FOLDER, now)
    return study


def _is_copy(files: StudyFiles, other: StudyFiles, spec: StudySpec) -> bool:
    """Return whether both folders have the same study. One that was renamed or moved is not where it was."""
    try:
        return not files.folder.samefile(other.folder) and read_request(other).mark == spec.mark
    except (OSError, UsageError):
        return False


def in_memory() -> optuna.Study:
    """Return a study of one objective that is stored nowhere."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(direction="maximize")


def name_in(storage: BaseStorage, files: StudyFiles) -> str | None:
    """Return the name under which the database has this study; ``None`` if it has none yet.

    A study keeps the name that its folder had when it was created, because folders are renamed and copied.

    Raises:
        MachineError: the database holds a study of somebody else's.
    """
    there = storage.get_all_studies()
    ours = [s.study_name for s in there if any(name.startswith(OURS) for name in s.user_attrs)]
    if not ours:
        # A search that was killed while it created its study leaves one without attributes and without trials.
        ours = [s.study_name for s in there if storage.get_n_trials(s._study_id) == 0]
    if there and not ours:
        raise MachineError(
            f"{files.database} holds {there[0].study_name!r}, a study that autotune did not make",
            advice="move that file to another folder; nothing was written to it.",
        )
    return files.name if files.name in ours else next(iter(ours), None)


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
