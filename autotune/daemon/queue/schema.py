"""The tables of ``queue.db``, as the steps from one version to the next."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from sqlite_utils import Database
from sqlite_utils.db import DescIndex

from autotune.errors import MachineError


def _first(database: Database) -> None:
    jobs: Any = database["jobs"]
    columns = {
        "id": int,
        "state": str,
        "priority": int,
        "mark": str,
        "study": str,
        "not_before": float,
        "opens": int,
        "closes": int,
        "after": int,
        "notice": str,
        "job": str,
        "sum": str,
    }
    jobs.create(columns, pk="id", not_null={"state", "priority", "mark", "study", "notice", "job", "sum"})
    jobs.create_index(["study"], unique=True)
    jobs.create_index(["mark"], unique=True)
    # All that decides whose turn it is, so that ten thousand waiting jobs are looked through without being read.
    jobs.create_index(["state", DescIndex("priority"), "id", "not_before", "opens", "closes", "after", "notice"])


#: What leads from each version to the next; a step that has shipped never changes.
MIGRATIONS: tuple[Callable[[Database], None], ...] = (_first,)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the tables to this version, each step whole or not at all.

    Raises:
        MachineError: the file was written by a newer autotune.
    """
    version = version_of(connection)
    if version > len(MIGRATIONS):
        raise newer(version)
    for number in range(version, len(MIGRATIONS)):
        connection.execute("begin immediate")
        MIGRATIONS[number](Database(connection))
        connection.execute(f"pragma user_version = {number + 1}")
        connection.execute("commit")


def version_of(connection: sqlite3.Connection) -> int:
    """How many steps were taken; 0: there is no table."""
    return int(connection.execute("pragma user_version").fetchone()[0])


def newer(version: int) -> MachineError:
    """The error for tables that only a later version knows."""
    return MachineError(
        f"the queue was written by a newer autotune (version {version} of its tables)", advice="upgrade autotune."
    )
