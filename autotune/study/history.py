"""What a study remembers: a plain Optuna study, and our own tables beside it.

Optuna's trials, with one user attribute each, hold all that a resume needs. The tables ``autotune_launches`` and
``autotune_settings`` are a view for people; they can be rebuilt from the launches' folders at any time.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from typing import Any

import optuna
import sqlite_utils
from optuna.trial import TrialState

from autotune.errors import MachineError, ResumeRefusedError
from autotune.files import FREE_SOME_SPACE, write_atomic
from autotune.layout import LaunchFiles, StudyFiles
from autotune.records import Fingerprint, Measurement, Trial, TrialResult, TrialSpec, TrialStatus, Value
from autotune.search.translate import suggest, tell
from autotune.space import Space, key, spell

_ATTRIBUTE = "autotune"
_FINGERPRINT = "autotune_fingerprint"
_SPACE = "autotune_space"
#: Per-step numbers stay in the launch's folder; the database keeps what is compared.
_PER_STEP = ("windows", "step_s", "wait_s", "device_s", "losses", "first_losses")
#: How often a configuration is launched that fails in ways which say nothing about it.
ATTEMPTS = 3


def slim(result: TrialResult) -> TrialResult:
    """A result without the numbers of single steps."""
    measurement: Measurement | None = result.measurement
    if measurement is not None:
        measurement = measurement.model_copy(update=dict.fromkeys(_PER_STEP, ()))
    return result.model_copy(update={"measurement": measurement})


class History:
    """The trials of one study, durable one by one.

    Held by one process at a time (the study's lock). `record` returns only when the trial is on disk; killed
    at any point, `recover` of the next run finds either the trial finished, or its result in its folder, or a
    trial left running.

    Raises:
        MachineError: ``study.db`` cannot be opened or is no database; from every method: it cannot be written. What
            was recorded before stays.
    """

    def __init__(self, files: StudyFiles, space: Space) -> None:
        self._files = files
        self._space = space
        # Its own log lines would run through the panel.
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            storage = optuna.storages.RDBStorage(files.storage_url)
            self.optuna = optuna.create_study(
                study_name=files.name, storage=storage, direction="maximize", load_if_exists=True
            )
        except Exception as error:  # SQLAlchemy's and sqlite3's errors have no common base
            refused = _refusal(error)
            if refused is not None and _is_full(refused):
                raise _cannot_write(files, refused) from error
            raise MachineError(
                f"{files.database} cannot be opened: {error}".splitlines()[0],
                advice="if it is damaged, move it away; the trial folders beside it hold every measurement.",
            ) from error
        self.trials: list[Trial] = finished(self.optuna.get_trials(deepcopy=False))
        self._tried = _tried(self.trials)
        #: Trials asked for (or found running) and not told yet.
        self._pending: dict[int, optuna.Trial] = {}

    def bind(self, fingerprint: Fingerprint) -> None:
        """Tie the study to a machine and a space; on a resume, check that both are the same.

        Raises:
            ResumeRefusedError: with a row for everything that differs.
        """
        attributes = self.optuna.user_attrs
        space = {name: [spell(v) for v in self._space.legal(name)] for name in self._space.choices}
        space["baseline"] = [f"{n}={spell(v)}" for n, v in self._space.baseline.items()]
        if _FINGERPRINT not in attributes:
            with _writing(self._files):
                self.optuna.set_user_attr(_SPACE, space)
                self.optuna.set_user_attr(_FINGERPRINT, fingerprint.model_dump())
            return
        then = Fingerprint.model_validate(attributes[_FINGERPRINT])
        rows = then.differences(fingerprint)
        old_space: dict[str, list[str]] = attributes.get(_SPACE, {})
        rows += [
            (f"choices of {name}", ", ".join(old_space.get(name, ["absent"])), ", ".join(space.get(name, ["absent"])))
            for name in sorted(space.keys() | old_space.keys())
            if space.get(name) != old_space.get(name)
        ]
        if rows:
            raise ResumeRefusedError(
                f"study {self._files.name!r} was made under other conditions; its numbers would not compare",
                rows,
                advice="restore the conditions, or start a new study with `autotune search`.",
            )

    def recover(self) -> list[Trial]:
        """Trials that an earlier run left running, each with the result its child had already reported, or else
        as interrupted. The caller scores them and passes them to `record`.
        """
        found = []
        for frozen in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = optuna.Trial(self.optuna, frozen._trial_id)
            files = self._files.trial(frozen.number)
            spec, result = read_launch(files)
            # Killed while the sampler was suggesting, it has only some of its parameters: nothing to repeat.
            config = spec.config if spec else dict(frozen.system_attrs.get("fixed_params", {}))
            if result is None:
                result = TrialResult(
                    launch=files.folder.name,
                    status=TrialStatus.INTERRUPTED,
                    cause="the search was killed while it ran",
                )
                write_result(files, result)
            repeats = frozen.user_attrs.get("repeats")
            found.append(Trial(number=frozen.number, config=config, result=result, repeats=repeats))
            self._pending[frozen.number] = trial
        return found

    @property
    def tried(self) -> frozenset[str]:
        """Keys of the configurations that need no launch any more: known, or failed in passing `ATTEMPTS` times."""
        return self._tried

    @property
    def unfinished(self) -> list[Trial]:
        """Trials that ended without a word about their configuration and have not been repeated, though they may be.

        An interruption by the user, or by a kill of the whole search, does not count as an attempt.
        """
        repeated = {t.repeats for t in self.trials}
        return [
            t
            for t in self.trials
            # Killed while the sampler was suggesting, it has no configuration.
            if t.config and t.number not in repeated and key(t.config) not in self._tried and not _is_known(t.result)
        ]

    def enqueue(self, config: dict[str, Value], *, repeats: int | None = None) -> None:
        """Have the next `ask` give this configuration."""
        with _writing(self._files):
            self.optuna.enqueue_trial(dict(config), user_attrs={"repeats": repeats})

    @property
    def waiting(self) -> bool:
        """Whether `ask` would give an enqueued configuration."""
        return bool(self.optuna.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def ask(self) -> tuple[int, dict[str, Value], int | None]:
        """A new trial: its number, its configuration, and the number of the trial it repeats, if any."""
        with _writing(self._files):
            trial = self.optuna.ask()
            config = suggest(trial, self._space)
        self._pending[trial.number] = trial
        return trial.number, config, trial.user_attrs.get("repeats")

    def record(self, trial: Trial) -> Trial:
        """Make a finished trial durable, then tell Optuna. Returns it as remembered."""
        remembered = trial.model_copy(update={"result": slim(trial.result)})
        asked = self._pending[trial.number]
        with _writing(self._files):
            asked.set_user_attr(_ATTRIBUTE, remembered.model_dump(mode="json"))
            tell(
                self.optuna,
                asked,
                trial.result.status,
                score=trial.score,
                rate_seen_per_s=trial.rate_per_s,
            )
        del self._pending[trial.number]
        self.trials.append(remembered)
        self.trials.sort(key=lambda t: t.number)
        self._tried = _tried(self.trials)
        return remembered


def _is_known(result: TrialResult) -> bool:
    return result.status is not TrialStatus.INTERRUPTED and not result.transient


def _tried(trials: list[Trial]) -> frozenset[str]:
    failures = Counter(key(t.config) for t in trials if t.result.transient)
    known = {key(t.config) for t in trials if _is_known(t.result)}
    return frozenset(known | {found for found, count in failures.items() if count >= ATTEMPTS})


@contextlib.contextmanager
def _writing(files: StudyFiles) -> Iterator[None]:
    """Make the machine's fault of it when SQLite refuses to write."""
    try:
        yield
    except Exception as error:
        refused = _refusal(error)
        if refused is None:
            raise
        raise _cannot_write(files, refused) from error


def _refusal(error: BaseException) -> sqlite3.OperationalError | None:
    """SQLite's own error, however Optuna and SQLAlchemy have wrapped it."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, sqlite3.OperationalError):
        link = link.__cause__ or link.__context__
    return link


def _cannot_write(files: StudyFiles, refused: sqlite3.OperationalError) -> MachineError:
    full = _is_full(refused)
    return MachineError(
        f"cannot write {files.database}: {'the disk is full' if full else refused}",
        advice=FREE_SOME_SPACE if full else "nothing is lost; `autotune resume` goes on once it can be written.",
    )


def _is_full(refused: sqlite3.OperationalError) -> bool:
    # Errors of the module itself have no code.
    return getattr(refused, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def read_trials(files: StudyFiles) -> list[Trial]:
    """The finished trials of a study, without opening it for writing; in order of their numbers.

    Raises:
        MachineError: ``study.db`` cannot be read.
    """
    if not files.database.exists():
        return []
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        # Plainly opened, it would make the tables that are not there yet, beside the search that is making them.
        storage = optuna.storages.RDBStorage(files.storage_url, skip_table_creation=True, skip_compatibility_check=True)
        found = optuna.load_study(study_name=files.name, storage=storage).get_trials(deepcopy=False)
    except KeyError:
        return []  # killed before the first trial
    except Exception as error:  # SQLAlchemy's and sqlite3's errors have no common base
        refused = _refusal(error)
        if refused is not None and str(refused).startswith("no such table"):
            return []  # the search is just being made, or was killed while it was
        raise MachineError(f"{files.database} cannot be read: {error}".splitlines()[0]) from error
    return finished(found)


def finished(trials: list[optuna.trial.FrozenTrial]) -> list[Trial]:
    """Our records of Optuna's finished trials, in order of their numbers."""
    found = [
        Trial.model_validate(t.user_attrs[_ATTRIBUTE])
        for t in trials
        if t.state.is_finished() and _ATTRIBUTE in t.user_attrs
    ]
    return sorted(found, key=lambda t: t.number)


def read_launch(files: LaunchFiles) -> tuple[TrialSpec | None, TrialResult | None]:
    """What a launch's folder holds: its spec and its result, each ``None`` where there is none to be read."""
    spec: TrialSpec | None = None
    result: TrialResult | None = None
    with contextlib.suppress(OSError, ValueError):
        spec = TrialSpec.model_validate_json(files.spec.read_text())
        result = TrialResult.model_validate_json(files.result.read_text())
    return spec, result


def read_launches(files: StudyFiles) -> Iterator[tuple[TrialSpec, TrialResult]]:
    """Every launch of a study whose folder can be read: its trials in order, then those outside the search."""
    for folder in (*sorted(files.trials.glob("*")), *sorted(files.launches.glob("*"))):
        spec, result = read_launch(LaunchFiles(folder))
        if spec is not None and result is not None:
            yield spec, result


class Ledger:
    """Our tables in ``study.db``: every launch a row, every setting of it a row."""

    def __init__(self, files: StudyFiles) -> None:
        self._files = files

    def add(self, spec: TrialSpec, result: TrialResult) -> None:
        """Enter a launch; entering it again replaces it."""
        measurement = result.measurement
        row: dict[str, Any] = {
            "launch": spec.launch,
            "kind": spec.kind.value,
            "trial": spec.number,
            "repeats": spec.repeats,
            "status": result.status.value,
            "phase": result.phase.value if result.phase else None,
            "cause": result.cause,
            "samples_per_s": measurement.samples_per_s if measurement else result.rate_seen_per_s,
            "ci95_low_per_s": measurement.ci95_per_s[0] if measurement else None,
            "ci95_high_per_s": measurement.ci95_per_s[1] if measurement else None,
            "loader_wait_fraction": measurement.loader_wait_fraction if measurement else None,
            "peak_memory_bytes": measurement.peak_allocated_bytes if measurement else result.peak_bytes,
            "compile_s": measurement.compile_s if measurement else None,
            "measured_s": measurement.measured_s if measurement else None,
            "wall_s": result.wall_s,
            "waited_s": result.waited_s,
            "exit_code": result.exit_code,
            "config": json.dumps(spec.config),
        }
        settings = [{"launch": spec.launch, "knob": n, "value": spell(v)} for n, v in spec.config.items()]
        with (
            _writing(self._files),
            contextlib.closing(sqlite3.connect(self._files.database, timeout=30)) as connection,
        ):
            database = sqlite_utils.Database(connection)
            launches = database["autotune_launches"]
            launches.insert(row, pk="launch", replace=True, alter=True)  # type: ignore[union-attr, unused-ignore]
            if settings:
                database["autotune_settings"].insert_all(  # type: ignore[union-attr, unused-ignore]
                    settings, pk=("launch", "knob"), replace=True
                )
            connection.commit()

    def measured_s(self) -> float:
        """Seconds inside kept windows, over all launches of the study."""
        with contextlib.closing(sqlite3.connect(self._files.database, timeout=30)) as connection:
            (total,) = connection.execute("select total(measured_s) from autotune_launches").fetchone()
        return float(total)

    def rebuild(self) -> int:
        """Enter every launch found in the folders; returns how many."""
        count = 0
        for spec, result in read_launches(self._files):
            self.add(spec, result)
            count += 1
        return count


def write_result(files: LaunchFiles, result: TrialResult) -> None:
    """Leave a result in the folder of a launch that could not write its own."""
    files.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(files.result, result.model_dump_json())
