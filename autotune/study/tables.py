"""A study's tables for people and SQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import optuna

from autotune.base.errors import AutotuneError, MachineError, UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import StudyHeat, Trial, TrialResult, TrialSpec
from autotune.knobs import spell
from autotune.samplers.sampler import heats_of
from autotune.study.database import IF_DAMAGED, SharedStudy, name_in, open_to_read, refusal, writing
from autotune.study.history import BASELINE, SPACE, begun_launches, finished, read_launches, slim
from autotune.study.request import read_request

if TYPE_CHECKING:
    import sqlalchemy

# Autotune's tables next to Optuna's are for people; they can be rebuilt from the launches' folders.

_T = TypeVar("_T")
#: Seconds that a writer of a SQLite file waits for another writer.
_BUSY_S = 30


class LaunchTables:
    """Autotune's tables of a study: one row per launch, per setting of a launch, and per entrant of a heat.

    Args:
        shared: the study in a database that several machines share; ``None`` for its own ``study.db``.

    Every method except `rebuild` of an empty study raises `MachineError` if the database cannot be written.
    """

    def __init__(self, files: StudyFiles, shared: SharedStudy | None = None) -> None:
        self._files = files
        self._shared = shared
        self._is_prepared = False

    @property
    def exist(self) -> bool:
        """Whether the study that the tables belong to exists yet: the first probes run before it does."""
        return self._files.database.exists() if self._shared is None else self._shared.is_entered

    def add(self, spec: TrialSpec, result: TrialResult) -> None:
        """Insert a launch, replacing earlier rows of the same name. This is idempotent."""
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

        self._transaction(insert)

    def measured_s(self) -> float:
        """Return the seconds inside kept windows, over all launches of the study."""
        from sqlalchemy import func, select

        from autotune.study.schema import LAUNCHES

        total = select(func.coalesce(func.sum(LAUNCHES.c.measured_s), 0.0))
        return float(self._transaction(lambda c, name: c.execute(total.where(LAUNCHES.c.study == name)).scalar_one()))

    def rebuild(self) -> int:
        """Insert every launch found in the folders; return their number."""
        count = 0
        for spec, result in read_launches(self._files):
            self.add(spec, result)
            count += 1
        return count

    def _transaction(self, act: Callable[[sqlalchemy.Connection, str], _T]) -> _T:
        """Ask for or change something, given the study's name; in its own file, tables are brought up to date."""
        from autotune.study.schema import OtherSchema, prepare, study_in_file

        if self._shared is not None:
            return self._shared.transaction(act)
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
            result = act(connection, study_in_file(connection))
        self._is_prepared = True
        return result

    @cached_property
    def _engine(self) -> sqlalchemy.Engine:
        from sqlalchemy import NullPool, create_engine

        # The file may be moved away at any time, so it is not kept open.
        return create_engine(self._files.database_url, poolclass=NullPool, connect_args={"timeout": _BUSY_S})


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
    # PostgreSQL stores every character except this one, which may occur in a program's last output.
    return None if text is None else text.replace("\0", "�")


# Reads the stored trials and heats of a study, without opening it for writing.


def read_trials(files: StudyFiles) -> list[Trial]:
    """Return the finished trials of a study in order of their numbers, without opening the study for writing.

    If the database has been moved away, they are read from their folders, which do not hold their scores.

    Raises:
        MachineError: the study's database cannot be read.
    """
    study = _open_to_read(files)
    if study is not None:
        return finished(study.get_trials(deepcopy=False))
    return [
        Trial(number=spec.number, config=spec.config, result=slim(result), repeats=spec.repeats)
        for spec, result in read_launches(files)
        if spec.number is not None
    ]


def read_heats(files: StudyFiles) -> list[StudyHeat]:
    """Return the heats of a study in order; none if its database has been moved away. Raises as `read_trials`."""
    study = _open_to_read(files)
    return [] if study is None else heats_of(study)


def read_choices(files: StudyFiles) -> dict[str, list[str]]:
    """Return the values that a study may choose from, for each knob; empty before its first search. Raises as
    `read_trials`."""
    study = _open_to_read(files)
    choices: dict[str, list[str]] = {} if study is None else study.user_attrs.get(SPACE, {})
    return {name: values for name, values in choices.items() if name != BASELINE}


def _open_to_read(files: StudyFiles) -> optuna.Study | None:
    if not files.database.exists():
        return _shared(files)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        # A plain open would create missing tables, at the same time as the search that is creating them.
        storage = optuna.storages.RDBStorage(files.storage_url, skip_table_creation=True, skip_compatibility_check=True)
        name = name_in(storage, files)
        # Without a name, the search was killed before its first trial.
        return None if name is None else optuna.load_study(study_name=name, storage=storage)
    except AutotuneError:
        raise
    except Exception as error:  # SQLAlchemy's and sqlite3's errors have no common base
        refused = refusal(error)
        if refused is not None and str(refused).startswith("no such table"):
            return None  # the search is being created, or was killed at that point
        raise MachineError(f"{files.database} cannot be read: {error}".splitlines()[0], advice=IF_DAMAGED) from error


def _shared(files: StudyFiles) -> optuna.Study | None:
    """Return the study in the database that several machines share, if it is stored there."""
    try:
        spec = read_request(files)
    except UsageError:
        return None  # as without a database
    if spec.storage is None:
        return None
    shared = SharedStudy(open_to_read(spec.storage), spec.mark)
    # Without a name, the search was killed before its first trial.
    return None if shared.name is None else optuna.load_study(study_name=shared.name, storage=shared.optuna)


# The number of samples of its data set that a study's launches have read, one after another.

#: Batches that a launch without a result is assumed to have read, before any launch has reported a number.
GUESS_BATCHES = 64


class SamplesRead:
    """Counts samples over all launches of a study, including those of earlier runs.

    A launch that could not report its count (it was killed) is assumed to have read as many as the largest so far.
    """

    def __init__(self, files: StudyFiles) -> None:
        self._files = files
        self._samples: int | None = None
        self._most = 0

    @property
    def samples(self) -> int:
        """Samples read so far: the position in the study's order at which the next launch begins."""
        if self._samples is None:
            launches = list(begun_launches(self._files))
            # Launches are not listed in chronological order, and the largest count must be known first.
            self._most = max((r.samples_drawn or 0 for _, r in launches if r is not None), default=0)
            self._samples = max((spec.first_sample + self._of(spec, r) for spec, r in launches), default=0)
        return self._samples

    def after(self, running: Iterable[TrialSpec]) -> int:
        """Return the position at which the next launch begins while others still read: each of them is assumed to read
        as many samples as the largest count so far."""
        samples = self.samples
        return max([samples, *(spec.first_sample + self._of(spec, None) for spec in running)])

    def add(self, spec: TrialSpec, result: TrialResult) -> None:
        self._samples = max(self.samples, spec.first_sample + self._of(spec, result))

    def _of(self, spec: TrialSpec, result: TrialResult | None) -> int:
        if spec.command is not None:
            # A script reads in its own order.
            return 0
        if result is None or result.samples_drawn is None:
            return self._most or GUESS_BATCHES * spec.batch_size
        self._most = max(self._most, result.samples_drawn)
        return result.samples_drawn
