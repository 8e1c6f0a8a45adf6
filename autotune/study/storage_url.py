"""The address of a database that several machines share, and the credentials for it, which are kept apart.

An address is a URL as SQLAlchemy takes it, without a password. Only addresses are stored and shown. A password comes
from the environment: a driver finds it there by itself (libpq: PGPASSWORD, PGPASSFILE, ``~/.pgpass``), or the variable
`STORAGE_URL` holds the whole URL.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.base.errors import UsageError
from autotune.base.layout import STORAGE_URL

if TYPE_CHECKING:
    import sqlalchemy

#: Drivers, by kind of database. MySQL has never been tried.
DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql"}
#: Variables that hold a password.
SECRET_VARIABLES = (STORAGE_URL, "PGPASSWORD")
_HOW = "write it as postgresql://USER@HOST/DATABASE."
_WHERE = f"a password belongs into PGPASSWORD or a file (PGPASSFILE), or the whole URL into {STORAGE_URL}."
#: Parameters of a URL's query whose names contain one of these are secret; the names of files are not.
_SECRET, _FILE = ("password", "passwd"), "passfile"


@dataclass(frozen=True)
class StorageUrl:
    """A URL split into its public and secret parts.

    Attributes:
        address: the URL without anything secret. secrets: the secret parts, as arguments of the driver.
    """

    address: str
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def database(self) -> str:
        """The kind of database, one of `DRIVERS`."""
        return self.address.partition(":")[0].partition("+")[0]

    def for_driver(self) -> sqlalchemy.URL:
        """Return the address with autotune's driver for it."""
        from sqlalchemy import make_url

        return make_url(self.address).set(drivername=f"{self.database}+{DRIVERS[self.database]}")


def typed_address(text: str, flag: str) -> str:
    """Return an address as typed.

    Raises:
        UsageError: it is not an address, or has a password. The message repeats neither.
    """
    url = _taken_apart(text, flag)
    if url.secrets:
        raise UsageError(f"{flag} has a password, which everybody could read in the list of processes", advice=_WHERE)
    return url.address


def url_of_environment() -> StorageUrl | None:
    """Return the URL in the environment; ``None`` if there is none.

    Raises:
        UsageError: it is not a URL of a database.
    """
    text = os.environ.get(STORAGE_URL)
    return _taken_apart(text, STORAGE_URL) if text else None


def with_credentials(address: str) -> StorageUrl:
    """Return an address with the credentials that the environment has for it, if any."""
    url = url_of_environment()
    return url if url is not None and url.address == address else StorageUrl(address)


def _taken_apart(text: str, name: str) -> StorageUrl:
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # The messages of these errors contain the text.
        raise UsageError(f"{name} is not the URL of a database", advice=_HOW) from None
    if url.get_backend_name() not in DRIVERS:
        raise UsageError(
            f"{name} names a database of another kind: {url.get_backend_name()}",
            advice=f"{' and '.join(DRIVERS)} are shared; without it a study is in a file in its folder.",
        )
    driver = url.drivername.partition("+")[2]
    if driver not in ("", DRIVERS[url.get_backend_name()]):
        raise UsageError(f"{name} names another driver than is used here: {driver}", advice=f"leave it out: {_HOW}")
    if not url.database:
        raise UsageError(f"{name} names no database", advice=_HOW)
    query: dict[str, Any] = dict(url.query)
    names = [n for n in query if any(part in n.lower() for part in _SECRET) and n.lower() != _FILE]
    secrets = {n: str(query.pop(n)) for n in names}
    if url.password is not None:
        secrets["password"] = str(url.password)
    # `URL.set` keeps the old value of whatever is given as None.
    bare = url.create(url.drivername, url.username, None, url.host, url.port, url.database, query)
    return StorageUrl(bare.render_as_string(hide_password=False), secrets)
