"""The schema of ``queue.db`` as a list of migrations."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from sqlite_utils import Database
from sqlite_utils.db import DescIndex

from autotune.base.errors import MachineError


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
    # A covering index for scheduling, so that ten thousand queued jobs are scanned without reading their rows.
    jobs.create_index(["state", DescIndex("priority"), "id", "not_before", "opens", "closes", "after", "notice"])


#: The step from each version to the next. A released step never changes.
MIGRATIONS: tuple[Callable[[Database], None], ...] = (_first,)


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate the tables to the current version. Each step is a transaction.

    Raises:
        MachineError: a newer autotune wrote the file.
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
    """Return the number of migrations applied; 0 if there are no tables."""
    return int(connection.execute("pragma user_version").fetchone()[0])


def newer(version: int) -> MachineError:
    """Return the error for a schema that is newer than this version."""
    return MachineError(
        f"the queue was written by a newer autotune (version {version} of its tables)", advice="upgrade autotune."
    )
