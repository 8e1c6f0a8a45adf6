"""Our tables next to Optuna's: for people; they can be rebuilt from the launches' folders."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autotune.base.errors import MachineError
from autotune.knobs import spell
from autotune.base.layout import StudyFiles
from autotune.base.records import TrialResult, TrialSpec
from autotune.study.database import writing
from autotune.study.launch_files import read_launches
from autotune.study.shared import SharedStudy

if TYPE_CHECKING:
    import sqlalchemy

#: Seconds for which a writer waits for another one of a SQLite file.
_BUSY_S = 30


class LaunchTables:
    """Our tables of a study: one row per launch, per setting of a launch, and per entrant of a heat.

    Args:
        shared: the study in a database that several machines share; ``None`` for its own ``study.db``.

    Every method but `rebuild` of an empty study raises `MachineError` if the database cannot be written.
    """

    def __init__(self, files: StudyFiles, shared: SharedStudy | None = None) -> None:
        self._files = files
        self._shared = shared
        self._is_prepared = False

    @property
    def exist(self) -> bool:
        """Whether there is a study for them to stand beside: the first probes run before there is."""
        return self._files.database.exists() if self._shared is None else self._shared.is_entered

    def add(self, spec: TrialSpec, result: TrialResult) -> None:
        """Insert a launch, replacing earlier rows of the same name: doing it twice is the same as doing it once."""
        from autotune.study import schema

        rows = {
            schema.LAUNCHES: [_launch(spec, result)],
            schema.SETTINGS: [{"knob": n, "value": spell(v)} for n, v in spec.config.items()],
            schema.ENTRANTS: _entrants(result),
        }

        def insert(connection: sqlalchemy.Connection, study: str) -> None:
            for table, values in rows.items():
                of_launch = (table.c.study == study) & (table.c.launch == spec.launch)
                connection.execute(table.delete().where(of_launch))
                if values:
                    key = {"study": study, "launch": spec.launch}
                    connection.execute(table.insert(), [{**key, **value} for value in values])

        if self._shared is not None:
            self._shared.write(insert)
        else:
            with self._file() as connection:
                insert(connection, schema.study_in_file(connection))

    def measured_s(self) -> float:
        """Return the seconds inside kept windows, over all launches of the study."""
        from sqlalchemy import func, select

        from autotune.study.schema import LAUNCHES

        total = select(func.coalesce(func.sum(LAUNCHES.c.measured_s), 0.0))
        if self._shared is not None:
            return float(
                self._shared.read(lambda c, study: c.execute(total.where(LAUNCHES.c.study == study)).scalar_one())
            )
        with self._file() as connection:
            return float(connection.execute(total).scalar_one())

    def rebuild(self) -> int:
        """Insert every launch found in the folders; return their number."""
        count = 0
        for spec, result in read_launches(self._files):
            self.add(spec, result)
            count += 1
        return count

    @contextlib.contextmanager
    def _file(self) -> Iterator[sqlalchemy.Connection]:
        """A transaction on the study's own file, in which our tables are those of this version."""
        from autotune.study.schema import OtherSchema, prepare

        with writing(self._files), self._engine.begin() as connection:
            # Python's SQLite begins no transaction before it changes tables.
            connection.exec_driver_sql("begin immediate")
            if not self._is_prepared:
                try:
                    prepare(connection, upgrade=True)
                except OtherSchema as other:
                    raise MachineError(
                        f"{self._files.database} was written by a newer autotune (schema {other.found})",
                        advice="upgrade autotune; nothing was written to it.",
                    ) from None
            yield connection
        self._is_prepared = True

    @cached_property
    def _engine(self) -> sqlalchemy.Engine:
        from sqlalchemy import NullPool, create_engine

        # The file may be moved away at any time, so it is not kept open.
        return create_engine(self._files.storage_url, poolclass=NullPool, connect_args={"timeout": _BUSY_S})


def _launch(spec: TrialSpec, result: TrialResult) -> dict[str, Any]:
    measurement = result.measurement
    return {
        "kind": spec.kind.value,
        "trial": spec.number,
        "repeats": spec.repeats,
        "status": result.status.value,
        "phase": result.phase.value if result.phase else None,
        "cause": _storable(result.cause),
        "samples_per_s": measurement.samples_per_s if measurement else result.rate_seen_per_s,
        "ci95_low_per_s": measurement.ci95_per_s[0] if measurement else None,
        "ci95_high_per_s": measurement.ci95_per_s[1] if measurement else None,
        "loader_wait_fraction": measurement.loader_wait_fraction if measurement else None,
        "peak_memory_bytes": measurement.peak_bytes if measurement else result.peak_bytes,
        "compile_s": measurement.compile_s if measurement else None,
        "measured_s": measurement.measured_s if measurement else result.heat and result.heat.measured_s,
        "device": ",".join([*spec.devices, *map(str, spec.cores)]),
        "began_s": result.began_s,
        "wall_s": result.wall_s,
        "waited_s": result.waited_s,
        "exit_code": result.exit_code,
        "config": json.dumps(spec.config),
    }


def _entrants(result: TrialResult) -> list[dict[str, Any]]:
    """Return one row for each entrant of a heat."""
    if result.heat is None:
        return []
    return [
        {
            "entrant": number,
            "side": result.heat.side,
            "status": entrant.status.value,
            "cause": _storable(entrant.cause),
            "ratio": entrant.ratio,
            "ci95_low": entrant.ratio_ci95 and entrant.ratio_ci95[0],
            "ci95_high": entrant.ratio_ci95 and entrant.ratio_ci95[1],
            "turns": sum(turn is not None for turn in entrant.turns),
            "first_step_s": entrant.first_step_s,
            "peak_memory_bytes": entrant.peak_bytes,
            "config": json.dumps(entrant.config),
        }
        for number, entrant in enumerate(result.heat.entrants)
    ]


def _storable(text: str | None) -> str | None:
    # PostgreSQL stores every character but this one, which a program's last words may have.
    return None if text is None else text.replace("\0", "�")
