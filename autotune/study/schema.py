"""Autotune's tables next to Optuna's, the same in a study's own SQLite file and in a database that machines share.

A file holds one study, and a shared database many, so every row names its study as Optuna does. The tables have a
version, and a list of steps brings older ones up to date. Imported on first use, because it imports SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    insert,
    inspect,
    literal,
    select,
    text,
    update,
)

#: Type of the names of studies, launches and knobs. MySQL allows no keys of unlimited text.
_NAME = String(200)
_METADATA = MetaData()
_VERSION = Table("autotune_schema", _METADATA, Column("version", Integer, primary_key=True, autoincrement=False))
#: The requests, identified by the study's mark: folders are renamed, and names may be taken.
STUDIES = Table(
    "autotune_studies",
    _METADATA,
    Column("study", _NAME, primary_key=True),
    Column("mark", String(64), nullable=False, unique=True),
    Column("request", Text, nullable=False),
)
LAUNCHES = Table(
    "autotune_launches",
    _METADATA,
    Column("study", _NAME, primary_key=True),
    Column("launch", _NAME, primary_key=True),
    Column("kind", String(32)),
    Column("trial", BigInteger),
    Column("repeats", BigInteger),
    Column("status", String(32)),
    Column("phase", String(32)),
    Column("cause", Text),
    Column("samples_per_s", Double),
    Column("ci95_low_per_s", Double),
    Column("ci95_high_per_s", Double),
    Column("loader_wait_fraction", Double),
    Column("peak_memory_bytes", BigInteger),
    Column("compile_s", Double),
    Column("measured_s", Double),
    Column("device", Text),
    Column("began_s", Double),
    Column("wall_s", Double),
    Column("waited_s", Double),
    Column("exit_code", Integer),
    Column("config", Text),
)
SETTINGS = Table(
    "autotune_settings",
    _METADATA,
    Column("study", _NAME, primary_key=True),
    Column("launch", _NAME, primary_key=True),
    Column("knob", _NAME, primary_key=True),
    Column("value", Text),
)
ENTRANTS = Table(
    "autotune_entrants",
    _METADATA,
    Column("study", _NAME, primary_key=True),
    Column("launch", _NAME, primary_key=True),
    Column("entrant", Integer, primary_key=True, autoincrement=False),
    Column("side", String(32)),
    Column("status", String(32)),
    Column("cause", Text),
    Column("ratio", Double),
    Column("ci95_low", Double),
    Column("ci95_high", Double),
    Column("turns", Integer),
    Column("first_step_s", Double),
    Column("peak_memory_bytes", BigInteger),
    Column("config", Text),
)
#: Tables with one or more rows for each launch.
OF_LAUNCHES = (LAUNCHES, SETTINGS, ENTRANTS)


class OtherSchema(Exception):
    """The tables have another version than this autotune's: ``found``."""

    def __init__(self, found: int) -> None:
        super().__init__(f"schema {found}")
        self.found = found

    @property
    def is_newer(self) -> bool:
        return self.found > VERSION


def prepare(connection: Connection, *, upgrade: bool) -> None:
    """Create the tables if there are none, within the connection's transaction.

    Args:
        upgrade: bring older tables up to date.

    Raises:
        OtherSchema: the tables are newer, or older and not to be upgraded. Nothing was changed.
    """
    current = version(connection)
    if current is None:
        _METADATA.create_all(connection)
        connection.execute(insert(_VERSION).values(version=VERSION))
    elif current > VERSION or (current < VERSION and not upgrade):
        raise OtherSchema(current)
    elif current < VERSION:
        for step in _STEPS[current:]:
            step(connection)
        connection.execute(update(_VERSION).values(version=VERSION))


def version(connection: Connection) -> int | None:
    """Return the version of the tables; ``None`` if there are none."""
    inspector = inspect(connection)
    if inspector.has_table(_VERSION.name):
        return int(connection.execute(select(_VERSION.c.version)).scalar_one())
    return 0 if inspector.has_table(LAUNCHES.name) else None


def _name_studies(connection: Connection) -> None:
    """Upgrade from version 0, which existed only in SQLite files and had no version, and no study in each row."""
    inspector = inspect(connection)
    columns_before = {
        table: [c["name"] for c in inspector.get_columns(table.name)]
        for table in OF_LAUNCHES
        if inspector.has_table(table.name)
    }
    for table in columns_before:
        connection.execute(text(f"alter table {table.name} rename to {table.name}_before"))
    _METADATA.create_all(connection, [_VERSION, STUDIES, *OF_LAUNCHES])
    study = study_in_file(connection)
    for table, names in columns_before.items():
        columns = [table.c[name] for name in names if name in table.c]
        old = Table(f"{table.name}_before", MetaData(), *(Column(c.name, c.type) for c in columns))
        rows = select(literal(study).label("study"), *(old.c[c.name] for c in columns))
        connection.execute(insert(table).from_select(["study", *(c.name for c in columns)], rows))
        connection.execute(text(f"drop table {table.name}_before"))
    connection.execute(insert(_VERSION).values(version=1))


def _unchanged(connection: Connection) -> None:
    """Upgrade from version 1. Version 2 added tables for workers on other machines, which nothing uses any more;
    existing ones stay."""


#: Step N leads from version N to version N + 1.
_STEPS: Sequence[Callable[[Connection], None]] = (_name_studies, _unchanged)
#: The version of the tables that this autotune reads and writes.
VERSION = len(_STEPS)


def study_in_file(connection: Connection) -> str:
    """Return Optuna's name of the study in a SQLite file."""
    return str(connection.execute(text("select study_name from studies order by study_id")).scalars().first())
