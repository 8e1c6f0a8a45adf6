"""Where a study is stored."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from autotune.base.clock import Clock, SystemClock
from autotune.base.errors import AutotuneError, InterruptedSearch, MachineError, UsageError
from autotune.base.files import FREE_SOME_SPACE
from autotune.base.layout import STORAGE_URL, StudyFiles
from autotune.base.records import StudySpec
from autotune.space.formatting import seconds_text
from autotune.study.budget import Budget
from autotune.study.request import read_request
from autotune.study.storage_url import DRIVERS, StorageUrl, with_credentials

if TYPE_CHECKING:
    import sqlalchemy

# Patience with a database whose server is restarted, or out of reach for a while, in the middle of a search.
#
# What was asked last may have been done although no answer came. So whatever is asked again is something that may be
# done twice, or first looks whether it has been done.

#: A search waits for so long for an answer: servers are restarted, and stand-ins take over, within minutes.
PATIENCE_S = 300.0
#: Seconds between two attempts, at first and at most.
_SOON_S, _LATER_S = 0.2, 5.0
#: Attribute of a trial by which its creation is known again.
_CREATION = "autotune_creation"

_T = TypeVar("_T")


class LostConnection(Exception):
    """The server did not answer. It may have done what it was asked, or not."""


@dataclass(frozen=True)
class Patience:
    """Asks a database until it answers, for a limited time, which the budget does not count.

    Launches that run meanwhile run on, and what they have shown is in their folders.

    Attributes:
        address: of the database.
        budget: of the search; ``None`` if nothing is counted.
        says: receives one sentence when the waiting begins.
        stop: returns the number of a signal that ends the waiting, or ``None``.
        who: waits, for people. advice: what they can do once it has waited too long.
    """

    address: str
    clock: Clock
    budget: Budget | None = None
    says: Callable[[str], None] = lambda sentence: None
    stop: Callable[[], int | None] = lambda: None
    who: str = "the search"
    advice: str = "try again once it answers."
    limit_s: float = PATIENCE_S

    def until_answered(self, ask: Callable[[bool], _T]) -> _T:
        """Call ``ask`` until it raises no `LostConnection`; return what it returns.

        Args:
            ask: is told whether it has been called before, and may then have been successful.

        Raises:
            MachineError: the time is over. What is measured is in the launches' folders, where a resume finds it.
            InterruptedSearch: a signal came; the same holds.
        """
        try:
            return ask(False)
        except LostConnection:
            began_s = self.clock.now()
            self.says(f"{self.address} does not answer; {self.who} waits for it, {seconds_text(self.limit_s)} at most")
        pause_s = _SOON_S
        try:
            while True:
                self.clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _LATER_S)
                number = self.stop()
                if number is not None:
                    raise InterruptedSearch(number)
                try:
                    return ask(True)
                except LostConnection as lost:
                    if self.clock.now() - began_s > self.limit_s:
                        raise MachineError(
                            f"{self.address} has not answered for {seconds_text(self.limit_s)}: {lost}",
                            advice=self.advice,
                        ) from lost
        finally:
            if self.budget is not None:
                self.budget.leave_out(self.clock.now() - began_s)


class PatientStorage(BaseStorage):
    """An Optuna storage that is asked again after a lost connection, and by one search at a time.

    Args:
        storage: raises `LostConnection`.
    """

    def __init__(self, storage: BaseStorage, patience: Patience) -> None:
        self._storage = storage
        self._patience = patience

    def _repeatedly(self, ask: Callable[[], _T]) -> _T:
        """Ask something that may be asked twice: it reads, or sets something to a value."""
        return self._patience.until_answered(lambda _again: ask())

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        def create(again: bool) -> int:
            try:
                return self._storage.create_new_study(directions, study_name)
            except optuna.exceptions.DuplicatedStudyError:
                if not again or study_name is None:
                    raise
                return self._storage.get_study_id_from_name(study_name)

        return self._patience.until_answered(create)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        creation = uuid4().hex
        template = template_trial or optuna.trial.create_trial(state=TrialState.RUNNING)
        template.system_attrs = {**template.system_attrs, _CREATION: creation}

        def create(again: bool) -> int:
            for trial in self._storage.get_all_trials(study_id, deepcopy=False) if again else ():
                if trial.system_attrs.get(_CREATION) == creation:
                    return trial._trial_id
            return self._storage.create_new_trial(study_id, template)

        return self._patience.until_answered(create)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        def put(again: bool) -> bool:
            if again and self._storage.get_trial(trial_id).state == state:
                return True
            return self._storage.set_trial_state_values(trial_id, state, values)

        return self._patience.until_answered(put)

    def delete_study(self, study_id: int) -> None:
        self._repeatedly(lambda: self._storage.delete_study(study_id))

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._repeatedly(lambda: self._storage.set_study_user_attr(study_id, key, value))

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._repeatedly(lambda: self._storage.set_study_system_attr(study_id, key, value))

    def get_study_id_from_name(self, study_name: str) -> int:
        return self._repeatedly(lambda: self._storage.get_study_id_from_name(study_name))

    def get_study_name_from_id(self, study_id: int) -> str:
        return self._repeatedly(lambda: self._storage.get_study_name_from_id(study_id))

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return self._repeatedly(lambda: self._storage.get_study_directions(study_id))

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return self._repeatedly(lambda: self._storage.get_study_user_attrs(study_id))

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return self._repeatedly(lambda: self._storage.get_study_system_attrs(study_id))

    def get_all_studies(self) -> list[FrozenStudy]:
        return self._repeatedly(self._storage.get_all_studies)

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        self._repeatedly(
            lambda: self._storage.set_trial_param(trial_id, param_name, param_value_internal, distribution)
        )

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self._repeatedly(lambda: self._storage.set_trial_intermediate_value(trial_id, step, intermediate_value))

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._repeatedly(lambda: self._storage.set_trial_user_attr(trial_id, key, value))

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._repeatedly(lambda: self._storage.set_trial_system_attr(trial_id, key, value))

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        return self._repeatedly(lambda: self._storage.get_trial_id_from_study_id_trial_number(study_id, trial_number))

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self._repeatedly(lambda: self._storage.get_trial(trial_id))

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
        return self._repeatedly(lambda: self._storage.get_all_trials(study_id, deepcopy=deepcopy, states=states))

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        return self._repeatedly(lambda: self._storage.get_best_trial(study_id))

    def remove_session(self) -> None:
        self._storage.remove_session()


# A study in a database that several machines share: Optuna's tables and ours, beside those of other studies.

#: Seconds to wait for a server that does not answer at all: to connect to it, and to notice that it has gone.
_CONNECT_S, _GONE_S = 10, 30
#: How long a command that only reads waits for a server that has gone away.
_READING_S = 10.0
#: The last one of Optuna's tables to be made.
_MADE_LAST = "alembic_version"
UPGRADE = "`autotune storage --upgrade` brings it up to date, once every machine that uses it has this version."


class SharedDatabase:
    """An open database, whose tables have the versions of this autotune and its Optuna.

    Args:
        make: make the tables if there are none. keep: keep a connection for what is asked next, until `close`.
        upgrade: bring older tables up to date.

    Raises:
        MachineError: the driver is missing, the server cannot be reached or refuses, or the tables have another
            version. Nothing was written then.
    """

    def __init__(self, url: StorageUrl, *, make: bool, keep: bool = False, upgrade: bool = False) -> None:
        self.address = url.address
        self._url = url
        self._make = make
        self._keep = keep
        self._upgrade = upgrade
        #: Whether there are Optuna's tables, and ours.
        self._has_studies, self._has_ours = _twice(self._prepare) if make else self._prepare()
        if make:
            # A search that fails before it needs Optuna's must not leave ours without them.
            _ = self._rdb
            self._has_studies = True

    @property
    def is_made(self) -> bool:
        """Whether there are tables. They may be made at any time, by another process."""
        if not (self._has_studies and self._has_ours):
            self._has_studies, self._has_ours = self._prepare()
        return self._has_studies and self._has_ours

    @cached_property
    def optuna(self) -> BaseStorage:
        """Optuna's storage, which raises `LostConnection`."""
        return optuna.storages.get_storage(self._rdb)

    @property
    def engine(self) -> sqlalchemy.Engine:
        """The connections to it, which raise `LostConnection`, too."""
        engine: sqlalchemy.Engine = self._rdb.engine
        return engine

    def names(self) -> set[str]:
        """Return the names of all studies in it, also of those that autotune did not make."""
        from sqlalchemy import text

        if not self.is_made and not self._has_studies:
            return set()

        def ask(_again: bool) -> set[str]:
            with self.engine.connect() as connection:
                return set(connection.execute(text("select study_name from studies")).scalars())

        return Patience(self.address, SystemClock(), limit_s=_READING_S).until_answered(ask)

    def close(self) -> None:
        """Close the connections that are kept open for what is asked next."""
        if "_rdb" in vars(self):
            self.engine.dispose()

    def _prepare(self) -> tuple[bool, bool]:
        """Make our tables if they are to be made; return whether there are Optuna's, and ours."""
        from sqlalchemy import NullPool, create_engine, inspect
        from sqlalchemy.exc import DBAPIError, NoSuchModuleError

        from autotune.study import schema

        try:
            engine = create_engine(self._url.for_driver(), poolclass=NullPool, connect_args=self._arguments)
            with engine.begin() as connection:
                if self._make:
                    schema.prepare(connection, upgrade=self._upgrade)
                found = schema.version(connection)
                has_studies = inspect(connection).has_table(_MADE_LAST)
        except (ImportError, NoSuchModuleError) as error:
            raise _without_driver(self._url) from error
        except schema.OtherSchema as other:
            raise self._other("autotune", f"schema {other.found}", is_newer=other.is_newer) from None
        except DBAPIError as error:
            raise _refused(self.address, error) from error
        if found is not None and found != schema.VERSION:
            raise self._other("autotune", f"schema {found}", is_newer=found > schema.VERSION)
        return has_studies, found is not None

    @cached_property
    def _rdb(self) -> RDBStorage:
        from sqlalchemy import NullPool, event
        from sqlalchemy.exc import DBAPIError

        # Optuna's log lines would break up the live panel.
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        # One connection, and more only while they are needed: a server has a hundred for all its users.
        kept = {"pool_size": 1, "max_overflow": 4, "pool_pre_ping": True}
        pool = kept if self._keep else {"poolclass": NullPool}

        url = self._url.for_driver()
        if self._upgrade:
            # Optuna upgrades on a connection of its own, to which it gives nothing but the URL.
            url = url.set(password=self._url.secrets.get("password"))

        def opened() -> RDBStorage:
            return RDBStorage(
                # Optuna fills in what stands in braces.
                url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}"),
                {"connect_args": self._arguments, **pool},
                skip_compatibility_check=True,
                skip_table_creation=not self._make,
            )

        try:
            storage = _twice(opened) if self._make else opened()
            current, newest = storage.get_current_version(), storage.get_head_version()
            is_older = current != newest and current in storage.get_all_versions()
            if is_older and self._upgrade:
                storage.upgrade()
            elif current != newest:
                raise self._other("Optuna", f"its tables are those of {current}", is_newer=not is_older)
        except DBAPIError as error:
            raise _refused(self.address, error) from error
        except optuna.exceptions.StorageInternalError as error:
            raise _refused(self.address, error.__cause__ or error) from error
        event.listen(storage.engine, "handle_error", _lost)
        return storage

    @property
    def _arguments(self) -> dict[str, Any]:
        """Arguments of the driver. A password among them is in no URL, and so in no message."""
        given = self._url.for_driver().query
        ours: dict[str, Any] = {"connect_timeout": _CONNECT_S}
        if self._url.database == "postgresql":
            ours |= {"application_name": "autotune", "keepalives_idle": _GONE_S, "tcp_user_timeout": 1000 * _GONE_S}
        return {**{name: value for name, value in ours.items() if name not in given}, **self._url.secrets}

    def _other(self, whose: str, found: str, *, is_newer: bool) -> MachineError:
        age = "a newer" if is_newer else "an older"
        advice = f"upgrade {whose.lower()} on this machine; nothing was written." if is_newer else UPGRADE
        return MachineError(f"{self.address} was made by {age} {whose} ({found})", advice=advice)


@cache
def open_to_read(address: str) -> SharedDatabase:
    """Open a database with the credentials of the environment, once in a process, and make nothing in it.

    Raises:
        MachineError: see `SharedDatabase`.
    """
    return SharedDatabase(with_credentials(address), make=False)


class SharedStudy:
    """One study in a shared database.

    Args:
        mark: of the study's request, by which it is found: folders are renamed, and names are not unique on all
            machines.
    """

    def __init__(self, database: SharedDatabase, mark: str, patience: Patience | None = None) -> None:
        self.database = database
        self._mark = mark
        self._patience = patience or Patience(database.address, SystemClock(), limit_s=_READING_S)
        self._name: str | None = None

    @cached_property
    def optuna(self) -> PatientStorage:
        """Optuna's storage, asked with patience."""
        return PatientStorage(self.database.optuna, self._patience)

    @property
    def is_entered(self) -> bool:
        """Whether the database has the study."""
        return self.name is not None

    @property
    def name(self) -> str | None:
        """What it is called there; ``None`` if the database does not have it."""
        if self._name is None and self.database.is_made:
            self._name = self._transaction(lambda connection: connection.execute(self._named).scalar_one_or_none())
        return self._name

    @property
    def _named(self) -> sqlalchemy.Select[Any]:
        from sqlalchemy import select

        from autotune.study.schema import STUDIES

        return select(STUDIES.c.study).where(STUDIES.c.mark == self._mark)

    def enter(self, spec: StudySpec) -> str:
        """Enter the study if the database does not have it yet; return what it is called there.

        Raises:
            UsageError: the name belongs to another study, of autotune or of somebody else.
        """
        from sqlalchemy import insert, text
        from sqlalchemy.exc import IntegrityError

        from autotune.study.schema import STUDIES

        if self.name is None:
            row = {"study": spec.name, "mark": self._mark, "request": spec.model_dump_json()}

            def enter(connection: sqlalchemy.Connection) -> None:
                # Optuna has a study of ours only after it has been entered.
                asked = text("select study_id from studies where study_name = :name")
                if connection.execute(asked, {"name": spec.name}).first() is not None:
                    raise name_taken(spec.name, self.database.address)
                connection.execute(insert(STUDIES).values(row))

            try:
                self._transaction(enter)
            except IntegrityError:
                # Entered after all, if the answer was lost.
                if self.name is None:
                    raise name_taken(spec.name, self.database.address) from None
        assert self.name is not None
        return self.name

    def write(self, act: Callable[[sqlalchemy.Connection, str], None]) -> None:
        """Change something in a transaction; ``act`` may be called several times, and be successful twice."""
        name = self.name
        assert name is not None
        self._transaction(lambda connection: act(connection, name))

    def read(self, ask: Callable[[sqlalchemy.Connection, str], _T]) -> _T:
        """Return what a question about the study is answered."""
        name = self.name
        assert name is not None
        return self._transaction(lambda connection: ask(connection, name))

    def _transaction(self, act: Callable[[sqlalchemy.Connection], _T]) -> _T:
        def once(_again: bool) -> _T:
            with self.database.engine.begin() as connection:
                return act(connection)

        return self._patience.until_answered(once)


def name_taken(name: str, address: str) -> UsageError:
    """Return the error for a study whose name another one has in a shared database."""
    return UsageError(f"{address} has another study {name!r}", advice="another --study starts a new one.")


def _twice(act: Callable[[], _T]) -> _T:
    """Make tables. Of two that make them at the same moment one fails, and finds them made when it tries again."""
    try:
        return act()
    except Exception as error:  # ours and Optuna's, from SQLAlchemy's
        if not _is_double(error):
            raise
    return act()


def _is_double(error: BaseException) -> bool:
    from sqlalchemy.exc import IntegrityError, ProgrammingError

    link: BaseException | None = error
    while link is not None and not isinstance(link, IntegrityError | ProgrammingError):
        link = link.__cause__ or link.__context__
    return link is not None


def _lost(context: sqlalchemy.ExceptionContext) -> None:
    """Raise `LostConnection` for an error that says nothing about what was asked."""
    from sqlalchemy.exc import InterfaceError, OperationalError

    # A look whether a connection from the pool is alive is the pool's own affair.
    if not context.is_pre_ping and isinstance(context.sqlalchemy_exception, InterfaceError | OperationalError):
        raise LostConnection(_words(context.original_exception)) from context.original_exception


def _words(error: BaseException) -> str:
    """Return what a server or its driver says, in one line."""
    lines = [line.strip() for line in str(getattr(error, "orig", None) or error).splitlines() if line.strip()]
    # libpq tells of each address that it has tried; what the server itself says follows this word.
    said = next((line for line in reversed(lines) if "FATAL:" in line or line.startswith("- ")), None)
    words = said or next(iter(lines), type(error).__name__)
    return words.removeprefix("- ").removeprefix("connection failed: ")


def _refused(address: str, error: BaseException) -> MachineError:
    return MachineError(
        f"{address} cannot be used: {_words(error)}",
        advice="see that the server runs, and that it has this database for this user with this password (PGPASSWORD, "
        f"PGPASSFILE, or the whole URL in {STORAGE_URL}).",
    )


def _without_driver(url: StorageUrl) -> MachineError:
    driver = DRIVERS[url.database]
    extra = "'autotune[postgresql]'" if url.database == "postgresql" else driver
    return MachineError(
        f"{driver} is not installed, by which {url.database} is spoken to", advice=f"install it: pip install {extra}"
    )


# Opens a study in its own file, and translates SQLite's errors on writing it to `autotune.base.errors`.

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
