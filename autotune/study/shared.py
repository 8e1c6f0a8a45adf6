"""A study in a database that several machines share: Optuna's tables and ours, beside those of other studies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import optuna
from optuna.storages import BaseStorage, RDBStorage

from autotune.base.clock import SystemClock
from autotune.base.errors import MachineError, UsageError
from autotune.base.layout import STORAGE_URL
from autotune.base.records import StudySpec
from autotune.study.patience import LostConnection, Patience, PatientStorage
from autotune.study.storage_url import DRIVERS, StorageUrl, with_credentials

if TYPE_CHECKING:
    import sqlalchemy

#: Seconds to wait for a server that does not answer at all: to connect to it, and to notice that it has gone.
_CONNECT_S, _GONE_S = 10, 30
#: How long a command that only reads waits for a server that has gone away.
_READING_S = 10.0
#: The last one of Optuna's tables to be made.
_MADE_LAST = "alembic_version"
UPGRADE = "`autotune storage --upgrade` brings it up to date, once every machine that uses it has this version."

_T = TypeVar("_T")


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

    def is_there(self) -> bool:
        """Whether the database has the study, asked once.

        Raises:
            LostConnection: it does not answer.
        """
        if self._name is None:
            with self.database.engine.begin() as connection:
                self._name = connection.execute(self._named).scalar_one_or_none()
        return self._name is not None

    def at_once(self, act: Callable[[sqlalchemy.Connection, str], _T]) -> _T:
        """Do something in a transaction, asked once, where others are not to wait for an answer.

        Raises:
            LostConnection: the database does not answer. It may have been done.
        """
        assert self._name is not None
        with self.database.engine.begin() as connection:
            return act(connection, self._name)

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
