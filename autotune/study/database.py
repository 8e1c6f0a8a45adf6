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
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection
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

# Patience with a database whose server is restarted, or unreachable for a while, in the middle of a search.
#
# The last operation may have been carried out although no answer came. So every operation that is retried is either
# idempotent, or first checks whether it has been carried out.

#: How long a search waits for an answer: servers are restarted, or stand-ins take over, within minutes.
PATIENCE_S = 300.0
#: Seconds between two attempts: initially, and at most.
_SOON_S, _LATER_S = 0.2, 5.0
#: Attribute of a trial that identifies its creation.
_CREATION = "autotune_creation"

_T = TypeVar("_T")
_E = TypeVar("_E", bound=BaseException)


class LostConnection(Exception):
    """The server did not answer. It may or may not have carried out the operation."""


@dataclass(frozen=True)
class Patience:
    """Retries a database operation until it is answered, for a limited time, which the budget does not count.

    Launches that are running meanwhile continue, and their results are in their folders.

    Attributes:
        budget: budget of the search; ``None`` if nothing is counted.
        says: receives one sentence when the waiting begins.
        stop: returns the number of a signal that ends the waiting, or ``None``.
        who: who is waiting, for messages. advice: what to do after too long a wait, for messages.
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
        """Call ``ask`` until it raises no `LostConnection`; return its result.

        Args:
            ask: its argument tells whether it has been called before, and so may already have succeeded.

        Raises:
            MachineError: the time is up. Measurements are in the launches' folders, where a resume finds them.
            InterruptedSearch: a signal arrived; the same applies.
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


def _repeated(name: str) -> Any:
    """Return a method that retries an idempotent operation of the storage: one that reads, or sets something to a
    value."""

    def operation(storage: PatientStorage, *args: Any, **named: Any) -> Any:
        operate = getattr(storage._storage, name)
        return storage._patience.until_answered(lambda _again: operate(*args, **named))

    return operation


class PatientStorage(BaseStorage):
    """An Optuna storage that retries after a lost connection, for use by one search at a time.

    Args:
        storage: raises `LostConnection`.
    """

    def __init__(self, storage: BaseStorage, patience: Patience) -> None:
        self._storage = storage
        self._patience = patience

    delete_study = _repeated("delete_study")
    set_study_user_attr = _repeated("set_study_user_attr")
    set_study_system_attr = _repeated("set_study_system_attr")
    get_study_id_from_name = _repeated("get_study_id_from_name")
    get_study_name_from_id = _repeated("get_study_name_from_id")
    get_study_directions = _repeated("get_study_directions")
    get_study_user_attrs = _repeated("get_study_user_attrs")
    get_study_system_attrs = _repeated("get_study_system_attrs")
    get_all_studies = _repeated("get_all_studies")
    set_trial_param = _repeated("set_trial_param")
    set_trial_intermediate_value = _repeated("set_trial_intermediate_value")
    set_trial_user_attr = _repeated("set_trial_user_attr")
    set_trial_system_attr = _repeated("set_trial_system_attr")
    get_trial_id_from_study_id_trial_number = _repeated("get_trial_id_from_study_id_trial_number")
    get_trial = _repeated("get_trial")
    get_all_trials = _repeated("get_all_trials")
    get_best_trial = _repeated("get_best_trial")

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

    def remove_session(self) -> None:
        self._storage.remove_session()


# A study in a database that several machines share: Optuna's tables and autotune's, which also hold other studies.

#: Seconds to wait for a server that does not answer at all: when connecting, and before it is considered gone.
_CONNECT_S, _GONE_S = 10, 30
#: Seconds that a command that only reads waits for a server that has gone away.
_READING_S = 10.0
#: The last of Optuna's tables to be created.
_MADE_LAST = "alembic_version"
#: What to install for a driver, if that is not the driver itself.
_EXTRAS = {"postgresql": "'autotune[postgresql]'"}
UPGRADE = "`autotune storage --upgrade` brings it up to date, once every machine that uses it has this version."


class SharedDatabase:
    """An open database, whose tables have the versions of this autotune and its Optuna.

    Args:
        make: create the tables if there are none. keep: keep a connection open for later requests, until `close`.
        upgrade: bring older tables up to date.

    Raises:
        MachineError: the driver is missing, the server cannot be reached or refuses, or the tables have another
            version. Nothing was written in that case.
    """

    def __init__(self, url: StorageUrl, *, make: bool, keep: bool = False, upgrade: bool = False) -> None:
        self.address = url.address
        self._url = url
        self._make = make
        self._keep = keep
        self._upgrade = upgrade
        #: Whether Optuna's tables exist, and autotune's.
        self._has_studies, self._has_ours = _twice(self._prepare) if make else self._prepare()
        if make:
            # A search that fails before it needs Optuna's tables must not leave autotune's without them.
            _ = self._rdb
            self._has_studies = True

    @property
    def is_made(self) -> bool:
        """Whether the tables exist. Another process may create them at any time."""
        if not (self._has_studies and self._has_ours):
            self._has_studies, self._has_ours = self._prepare()
        return self._has_studies and self._has_ours

    @cached_property
    def optuna(self) -> BaseStorage:
        """Optuna's storage, which raises `LostConnection`."""
        return optuna.storages.get_storage(self._rdb)

    @property
    def engine(self) -> sqlalchemy.Engine:
        """The connections to the database, which also raise `LostConnection`."""
        engine: sqlalchemy.Engine = self._rdb.engine
        return engine

    def names(self) -> set[str]:
        """Return the names of all studies in it, including those that autotune did not make."""
        from sqlalchemy import text

        if not self.is_made and not self._has_studies:
            return set()

        def ask(_again: bool) -> set[str]:
            with self.engine.connect() as connection:
                return set(connection.execute(text("select study_name from studies")).scalars())

        return Patience(self.address, SystemClock(), limit_s=_READING_S).until_answered(ask)

    def close(self) -> None:
        """Close the connections that are kept open for later requests."""
        if "_rdb" in vars(self):
            self.engine.dispose()

    def _prepare(self) -> tuple[bool, bool]:
        """Create autotune's tables if requested; return whether Optuna's tables exist, and autotune's."""
        from sqlalchemy import NullPool, create_engine, inspect
        from sqlalchemy.exc import DBAPIError, NoSuchModuleError

        from autotune.study import schema

        try:
            engine = create_engine(self._url.for_driver(), poolclass=NullPool, connect_args=self._arguments)
            with engine.begin() as connection:
                if self._make:
                    schema.prepare(connection, upgrade=self._upgrade)
                version = schema.version(connection)
                has_studies = inspect(connection).has_table(_MADE_LAST)
        except (ImportError, NoSuchModuleError) as error:
            database, driver = self._url.database, DRIVERS[self._url.database]
            raise MachineError(
                f"{driver} is not installed, by which {database} is spoken to",
                advice=f"install it: pip install {_EXTRAS.get(database, driver)}",
            ) from error
        except schema.OtherSchema as other:
            raise self._other("autotune", f"schema {other.found}", is_newer=other.is_newer) from None
        except DBAPIError as error:
            raise _refused(self.address, error) from error
        if version is not None and version != schema.VERSION:
            raise self._other("autotune", f"schema {version}", is_newer=version > schema.VERSION)
        return has_studies, version is not None

    @cached_property
    def _rdb(self) -> RDBStorage:
        from sqlalchemy import NullPool, event
        from sqlalchemy.exc import DBAPIError

        # Optuna's log lines would break up the live panel.
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        # One connection, and more only while needed: a server has a hundred for all its users.
        pool_options = {"pool_size": 1, "max_overflow": 4, "pool_pre_ping": True}
        pool = pool_options if self._keep else {"poolclass": NullPool}

        url = self._url.for_driver()
        if self._upgrade:
            # Optuna upgrades on a connection of its own, to which it passes nothing but the URL.
            url = url.set(password=self._url.secrets.get("password"))

        def opened() -> RDBStorage:
            return RDBStorage(
                # Optuna substitutes whatever is in braces.
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
        """Arguments of the driver. A password among them is in no URL, and therefore in no message."""
        query = self._url.for_driver().query
        defaults: dict[str, Any] = {"connect_timeout": _CONNECT_S}
        if self._url.database == "postgresql":
            defaults |= {"application_name": "autotune", "keepalives_idle": _GONE_S, "tcp_user_timeout": 1000 * _GONE_S}
        return {**{name: value for name, value in defaults.items() if name not in query}, **self._url.secrets}

    def _other(self, whose: str, found: str, *, is_newer: bool) -> MachineError:
        age = "a newer" if is_newer else "an older"
        advice = f"upgrade {whose.lower()} on this machine; nothing was written." if is_newer else UPGRADE
        return MachineError(f"{self.address} was made by {age} {whose} ({found})", advice=advice)


@cache
def open_to_read(address: str) -> SharedDatabase:
    """Open a database with the credentials of the environment, once per process, without creating anything in it.

    Raises:
        MachineError: see `SharedDatabase`.
    """
    return SharedDatabase(with_credentials(address), make=False)


class SharedStudy:
    """One study in a shared database.

    Args:
        mark: mark of the study's request, which identifies it: folders are renamed, and names are not unique across
            machines.
    """

    def __init__(self, database: SharedDatabase, mark: str, patience: Patience | None = None) -> None:
        self.database = database
        self._mark = mark
        self._patience = patience or Patience(database.address, SystemClock(), limit_s=_READING_S)
        self._name: str | None = None

    @cached_property
    def optuna(self) -> PatientStorage:
        """Optuna's storage, which retries with `Patience`."""
        return PatientStorage(self.database.optuna, self._patience)

    @property
    def is_entered(self) -> bool:
        return self.name is not None

    @property
    def name(self) -> str | None:
        """Its name in the database; ``None`` if the database does not have it."""
        if self._name is None and self.database.is_made:
            from sqlalchemy import select

            from autotune.study.schema import STUDIES

            named = select(STUDIES.c.study).where(STUDIES.c.mark == self._mark)
            self._name = self._transaction(lambda connection: connection.execute(named).scalar_one_or_none())
        return self._name

    def enter(self, spec: StudySpec) -> str:
        """Enter the study if the database does not have it yet; return its name there.

        Raises:
            UsageError: the name belongs to another study, of autotune or of someone else.
        """
        from sqlalchemy import insert, text
        from sqlalchemy.exc import IntegrityError

        from autotune.study.schema import STUDIES

        if self.name is None:
            row = {"study": spec.name, "mark": self._mark, "request": spec.model_dump_json()}

            def enter(connection: sqlalchemy.Connection) -> None:
                # Optuna has an autotune study only after it has been entered here.
                query = text("select study_id from studies where study_name = :name")
                if connection.execute(query, {"name": spec.name}).first() is not None:
                    raise name_taken(spec.name, self.database.address)
                connection.execute(insert(STUDIES).values(row))

            try:
                self._transaction(enter)
            except IntegrityError:
                # It may have been entered after all if the answer was lost.
                if self.name is None:
                    raise name_taken(spec.name, self.database.address) from None
        assert self.name is not None
        return self.name

    def transaction(self, act: Callable[[sqlalchemy.Connection, str], _T]) -> _T:
        """Ask for or change something of the study; ``act`` may be called several times, and succeed twice."""
        name = self.name
        assert name is not None
        return self._transaction(lambda connection: act(connection, name))

    def _transaction(self, act: Callable[[sqlalchemy.Connection], _T]) -> _T:
        def once(_again: bool) -> _T:
            with self.database.engine.begin() as connection:
                return act(connection)

        return self._patience.until_answered(once)


def name_taken(name: str, address: str) -> UsageError:
    return UsageError(f"{address} has another study {name!r}", advice="another --study starts a new one.")


def _twice(act: Callable[[], _T]) -> _T:
    """Create tables. If two processes do so at the same moment, one fails and finds them when it tries again."""
    try:
        return act()
    except Exception as error:  # ours and Optuna's, from SQLAlchemy's
        from sqlalchemy.exc import IntegrityError, ProgrammingError

        if _wrapped(error, (IntegrityError, ProgrammingError)) is None:
            raise
    return act()


def _wrapped(error: BaseException, kinds: tuple[type[_E], ...]) -> _E | None:
    """Return the error of one of some kinds that others have wrapped; ``None`` if there is none."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, kinds):
        link = link.__cause__ or link.__context__
    return link


def _lost(context: sqlalchemy.ExceptionContext) -> None:
    """Raise `LostConnection` for an error that says nothing about the operation itself."""
    from sqlalchemy.exc import InterfaceError, OperationalError

    # Checking whether a connection from the pool is alive is the pool's own business.
    if not context.is_pre_ping and isinstance(context.sqlalchemy_exception, InterfaceError | OperationalError):
        raise LostConnection(_words(context.original_exception)) from context.original_exception


def _words(error: BaseException) -> str:
    """Return the message of a server or its driver, in one line."""
    lines = [line.strip() for line in str(getattr(error, "orig", None) or error).splitlines() if line.strip()]
    # libpq reports each address that it has tried; the server's own message follows this word.
    message = next((line for line in reversed(lines) if "FATAL:" in line or line.startswith("- ")), None)
    words = message or next(iter(lines), type(error).__name__)
    return words.removeprefix("- ").removeprefix("connection failed: ")


def _refused(address: str, error: BaseException) -> MachineError:
    return MachineError(
        f"{address} cannot be used: {_words(error)}",
        advice="see that the server runs, and that it has this database for this user with this password (PGPASSWORD, "
        f"PGPASSFILE, or the whole URL in {STORAGE_URL}).",
    )


# Opens a study in its own file, and translates SQLite's errors on writing it to `autotune.base.errors`.

#: Prefix of the names of autotune's attributes of an Optuna study.
OURS = "autotune_"
#: Attribute with the folder of a study in a shared database, as of its last search.
_FOLDER = f"{OURS}folder"

IF_DAMAGED = "if it is damaged, move it away; `autotune resume` reads the trials again from their folders."


def open_study(files: StudyFiles, *, objectives: int = 1) -> optuna.Study:
    """Open the study in the database for writing. It is created if it does not exist.

    Args:
        objectives: number of objectives of a study that is created.

    Raises:
        MachineError: the file is not a database that this version can use, holds someone else's study, or cannot be
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
            # A RuntimeError is raised for tables of another version; its message says what to do.
            advice=None if isinstance(error, RuntimeError) else IF_DAMAGED,
        ) from error


def open_shared(shared: SharedStudy, spec: StudySpec, files: StudyFiles) -> optuna.Study:
    """Open the study in a database that several machines share for writing. It is created if it does not exist.

    Raises:
        UsageError: its name belongs to another study there, or the folder is a copy of the study's own.
        MachineError: the database does not answer.
    """
    name = shared.enter(spec)
    directions = [StudyDirection.MAXIMIZE] * len(spec.objectives)
    study = optuna.create_study(study_name=name, storage=shared.optuna, directions=directions, load_if_exists=True)
    stored_folder, folder = study.user_attrs.get(_FOLDER), str(files.folder.resolve())
    if stored_folder is not None and _is_copy(files, StudyFiles(Path(stored_folder)), spec):
        raise UsageError(
            f"{files.folder} is a copy of {stored_folder}, and both have the same trials in {shared.database.address}",
            advice="resume that one, or start a new study from this one with `autotune resume --fork`.",
        )
    if stored_folder != folder:
        study.set_user_attr(_FOLDER, folder)
    return study


def _is_copy(files: StudyFiles, other: StudyFiles, spec: StudySpec) -> bool:
    """Return whether both folders have the same study. A renamed or moved folder is no longer where it was."""
    try:
        return not files.folder.samefile(other.folder) and read_request(other).mark == spec.mark
    except (OSError, UsageError):
        return False


def in_memory() -> optuna.Study:
    """Return a study with one objective that is stored nowhere."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(direction="maximize")


def name_in(storage: BaseStorage, files: StudyFiles) -> str | None:
    """Return the name under which the database has this study; ``None`` if it has none yet.

    A study keeps the name that its folder had when it was created, because folders are renamed and copied.

    Raises:
        MachineError: the database holds someone else's study.
    """
    studies = storage.get_all_studies()
    names = [s.study_name for s in studies if any(name.startswith(OURS) for name in s.user_attrs)]
    if not names:
        # A search that was killed while it created its study leaves one without attributes and without trials.
        names = [s.study_name for s in studies if storage.get_n_trials(s._study_id) == 0]
    if studies and not names:
        raise MachineError(
            f"{files.database} holds {studies[0].study_name!r}, a study that autotune did not make",
            advice="move that file to another folder; nothing was written to it.",
        )
    return files.name if files.name in names else next(iter(names), None)


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
    return _wrapped(error, (sqlite3.OperationalError,))


def cannot_write(files: StudyFiles, refused: sqlite3.OperationalError) -> MachineError:
    disk_is_full = is_full(refused)
    return MachineError(
        f"cannot write {files.database}: {'the disk is full' if disk_is_full else refused}",
        advice=FREE_SOME_SPACE
        if disk_is_full
        else "nothing is lost; `autotune resume` goes on once it can be written.",
    )


def is_full(refused: sqlite3.OperationalError) -> bool:
    # Errors raised by the sqlite3 module itself have no code.
    return getattr(refused, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
