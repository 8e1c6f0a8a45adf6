"""``autotune storage``: look at the database in which several machines store studies, and bring it up to date."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from autotune.base.errors import UsageError
from autotune.base.layout import STORAGE_URL
from autotune.base.records import SCHEMA_VERSION
from autotune.cli.options import Json
from autotune.cli.output import print_json
from autotune.space.formatting import count
from autotune.study.database import SharedDatabase
from autotune.study.storage_url import typed_address, url_of_environment, with_credentials


def command(
    storage: Annotated[
        str | None,
        typer.Option("--storage", help="postgresql://USER@HOST/DATABASE.  [default: $AUTOTUNE_STORAGE]", metavar="URL"),
    ] = None,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Bring older tables up to date.")] = False,
    as_json: Json = False,
) -> None:
    """Look at a database in which several machines store studies, or bring it up to date."""
    database = SharedDatabase(with_credentials(address_of(storage)), make=upgrade, upgrade=upgrade)
    with contextlib.closing(database):
        names = sorted(database.names())
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "storage": database.address, "studies": names})
    else:
        typer.echo(f"{database.address}: {count(len(names), 'study', 'studies')}" + "".join(f"\n{n}" for n in names))


def address_of(typed: str | None) -> str:
    """Return the address of the database named on the command line, or else in the environment.

    Raises:
        UsageError: none is named, or the name is not a database's address.
    """
    if typed is not None:
        return typed_address(typed, "--storage")
    url = url_of_environment()
    if url is None:
        raise UsageError("no database is named", advice=f"--storage URL names one, or {STORAGE_URL}.")
    return url.address
