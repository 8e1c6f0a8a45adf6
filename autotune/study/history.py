"""What a study has done so far."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass

import optuna
from optuna.trial import TrialState

from autotune.base.errors import MachineError, ResumeRefusedError
from autotune.base.files import read_regular, write_atomic
from autotune.base.layout import LaunchFiles, StudyFiles
from autotune.base.records import (
    ATTEMPTS,
    SCHEMA_VERSION,
    Config,
    Fingerprint,
    Heat,
    HeatEntrant,
    HeatPlan,
    LaunchKind,
    LedgerRow,
    Measurement,
    Phase,
    Prediction,
    Record,
    StudyHeat,
    Trial,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Value,
)
from autotune.knobs import KNOBS, shares, spell
from autotune.launcher.result import MAX_RESULT_BYTES
from autotune.samplers.sampler import HEAT, PREDICTED, RECORD, distributions, heats_of, suggest, tell
from autotune.space import Space, key
from autotune.study.database import OURS, open_study, writing

# ``conditions.json``: the machine and the space that a study is tied to, in case its database has been moved away.

#: Key of the baseline in the stored space, next to the knobs' names.
BASELINE = "baseline"
#: Conditions take a few kilobytes.
MAX_BYTES = 2**20


class StudyConditions(Record):
    """What must not change between the runs of a study.

    Attributes:
        space: the values that each knob may have, and the settings of the `BASELINE`, as text.
    """

    schema_version: int = SCHEMA_VERSION
    fingerprint: Fingerprint
    space: dict[str, tuple[str, ...]]

    def differences(self, now: StudyConditions) -> list[tuple[str, str, str]]:
        """Return rows ``(name, then, now)`` for everything that differs."""
        rows = self.fingerprint.differences(now.fingerprint)
        absent = ("absent",)
        return rows + [
            (f"choices of {name}", ", ".join(self.space.get(name, absent)), ", ".join(now.space.get(name, absent)))
            for name in sorted(now.space.keys() | self.space.keys())
            if now.space.get(name) != self.space.get(name)
        ]


def unknown_knobs(files: StudyFiles, study: optuna.Study) -> frozenset[str]:
    """Return the knobs that the autotune with which a study was begun did not have.

    Raises:
        MachineError: a file of the study cannot be read.
    """
    stored: Mapping[str, object] | None = study.user_attrs.get(SPACE)
    if stored is None:
        then = read_conditions(files)
        stored = None if then is None else then.space
    return frozenset(name for name, knob in KNOBS.items() if knob.added and stored and name not in stored)


def read_conditions(files: StudyFiles) -> StudyConditions | None:
    """Return the conditions in ``conditions.json``; ``None`` if there is no such file, as in older studies.

    Raises:
        MachineError: the file cannot be read.
    """
    try:
        return StudyConditions.model_validate_json(read_regular(files.conditions, MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{files.conditions} cannot be read: {str(error).splitlines()[0]}",
            advice="start a new study: without this file nothing tells where this one was measured.",
        ) from error


# Heats of a study: configurations are compared in one process, whatever individual ones do to it.


def heat_steps(plan: HeatPlan) -> Generator[tuple[int, HeatPlan], TrialResult, Heat]:
    """Yield the number, counted from 1, and the plan of each launch of a heat; receive the launch's result; return what
    is known about each entrant, in the order of the plan.

    An entrant that ends the process (a crash, a hang, a time limit, and for the reference any failure) is charged with
    it. The others run again without it and without those that would be refused in the same way; ratios are then
    relative to the first of the remaining ones. A launch that was killed from outside is charged to no entrant and runs
    again, at most `ATTEMPTS` times. Entrants about which nothing is known after that have the status ``interrupted``.
    """
    entrants_by_index: dict[int, HeatEntrant] = {}
    remaining = list(range(len(plan.entrants)))
    number = blameless = 0
    last_heat: Heat | None = None
    cause = "the heat could not be run to its end"
    while len(remaining) > 1:
        number += 1
        result = yield number, plan.model_copy(update={"entrants": tuple(plan.entrants[i] for i in remaining)})
        if result.heat is not None and result.status is TrialStatus.COMPLETE:
            last_heat = result.heat
            entrants_by_index |= dict(zip(remaining, last_heat.entrants, strict=True))
            break
        cause = result.cause or cause
        if result.status is TrialStatus.INTERRUPTED:
            break
        if result.status is TrialStatus.KILLED or result.turn is None:
            blameless += 1
            if blameless == ATTEMPTS or (result.turn is None and not result.transient):
                break
            continue
        failed = remaining[result.turn]
        # Whatever refuses a value does so regardless of the other knobs.
        alike = [i for i in remaining if shares(result.refuses, plan.entrants[failed], plan.entrants[i])]
        # The reference has already run with its values.
        for charged in [failed] if 0 in alike or not alike else alike:
            remaining.remove(charged)
            entrants_by_index[charged] = HeatEntrant(
                config=dict(plan.entrants[charged]),
                status=result.status,
                phase=result.phase,
                cause=result.cause,
                advice=result.advice,
                cannot_compile=result.cannot_compile,
                refuses=result.refuses,
                peak_bytes=result.peak_bytes,
            )
    entrants = tuple(
        entrants_by_index.get(i, HeatEntrant(config=dict(config), status=TrialStatus.INTERRUPTED, cause=cause))
        for i, config in enumerate(plan.entrants)
    )
    if last_heat is None:
        return Heat(
            side=plan.side, entrants=entrants, noise_sd=0.0, startup_s=0.0, switch_s=0.0, measured_s=0.0, ended=cause
        )
    return last_heat.model_copy(update={"entrants": entrants})


def dealt(entrants: Sequence[Config], hands: int) -> list[tuple[Config, ...]]:
    """Deal the entrants of a heat out to several heats. The first one, the reference, takes part in all of them.

    Returns:
        at most ``hands`` heats, each with at least two entrants besides the reference, if there are that many.
    """
    reference, others = entrants[0], entrants[1:]
    count = max(1, min(hands, len(others) // 2))
    return [(reference, *others[first::count]) for first in range(count)]


# The files of launches: the request for each, and how it ended.


def read_launch(files: LaunchFiles) -> tuple[TrialSpec | None, TrialResult | None]:
    """Read the spec and the result in a launch's folder; each is ``None`` if it is missing or unreadable."""
    spec: TrialSpec | None = None
    result: TrialResult | None = None
    with contextlib.suppress(OSError, ValueError):
        spec = TrialSpec.model_validate_json(read_regular(files.spec, MAX_RESULT_BYTES))
        result = TrialResult.model_validate_json(read_regular(files.result, MAX_RESULT_BYTES))
    return spec, result


def begun_launches(files: StudyFiles) -> Iterator[tuple[TrialSpec, TrialResult | None]]:
    """Read every readable launch of a study: the trials in order, then the launches outside the search. One that was
    killed together with the search has no result."""
    for folder in (*sorted(files.trials.glob("*")), *sorted(files.launches.glob("*"))):
        spec, result = read_launch(LaunchFiles(folder))
        if spec is not None:
            yield spec, result


def read_launches(files: StudyFiles) -> Iterator[tuple[TrialSpec, TrialResult]]:
    """Read every readable launch of a study that has a result, in the order of `begun_launches`."""
    return ((spec, result) for spec, result in begun_launches(files) if result is not None)


def write_result(files: LaunchFiles, result: TrialResult) -> None:
    """Write a result to the folder of a launch that could not write its own."""
    files.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(files.result, result.model_dump_json())


# The stored trials of a study: a plain Optuna study, in ``study.db`` or in a database that several machines share.
#
# Optuna's trials, with one user attribute each, hold everything that a resume needs. The tables ``autotune_launches``
# and ``autotune_settings`` next to them are for people; they can be rebuilt from the launches' folders at any time.


FINGERPRINT = f"{OURS}fingerprint"
SPACE = f"{OURS}space"
_FIRST = f"{OURS}first"
_CAPACITY = f"{OURS}capacity_bytes"
_ENDED = f"{OURS}ended"
_ENDED_AT = f"{OURS}ended_at_s"
_CONTESTS = f"{OURS}contests"
#: Values per step stay in the launch's folder; the database keeps only what is compared.
_PER_STEP = ("windows", "step_s", "wait_s", "device_s", "losses", "first_losses")


def slim(result: TrialResult) -> TrialResult:
    """Return a copy of a result without its per-step values."""
    measurement: Measurement | None = result.measurement
    if measurement is not None:
        measurement = measurement.model_copy(update=dict.fromkeys(_PER_STEP, ()))
    return result.model_copy(update={"measurement": measurement})


@dataclass(frozen=True)
class PastContest:
    """A contest that no trial won, after which the search went on.

    Attributes:
        trials: numbers of the trials that were entered, in order. newest: number of the search's last trial.
        searched_s: seconds of the budget that were spent when the contest began.
        until_s: searching may go on until this many seconds are spent.
    """

    trials: tuple[int, ...]
    newest: int
    searched_s: float
    until_s: float


class History:
    """The trials of one study, each stored durably as it ends.

    Used by one process at a time (the study's lock). `record` returns only when the trial is on disk. If the process is
    killed at any point, `recover` of the next run finds the trial finished, or its result in its folder, or the trial
    still marked as running.

    Args:
        study: the study to use instead of the one in ``study.db``.

    Raises:
        MachineError: ``study.db`` cannot be opened or is not a database. Every method raises it if the database cannot
            be written; trials recorded before are kept.
    """

    def __init__(self, files: StudyFiles, space: Space, *, study: optuna.Study | None = None) -> None:
        self._files = files
        self._space = space
        self.optuna = study or open_study(files)
        self.trials: list[Trial] = []
        self._tried: set[str] = set()
        #: Number of transient failures of each configuration.
        self._failures: Counter[str] = Counter()
        for trial in finished(self.optuna.get_trials(deepcopy=False)):
            self._remember(trial, of_earlier_run=True)
        self.heats = heats_of(self.optuna)
        #: Contests that no trial won, in order.
        self.contests = [
            PastContest(**{**contest, "trials": tuple(contest["trials"])})
            for contest in self.optuna.user_attrs.get(_CONTESTS, [])
        ]
        #: Trials that were started here or found running, and whose result Optuna does not have yet.
        self._pending: dict[int, optuna.Trial] = {}
        #: Keys of the running configurations, by trial.
        self._running: dict[int, str] = {}

    def bind(self, fingerprint: Fingerprint) -> None:
        """Tie the study to a machine and a space; on a resume, check that both are unchanged.

        Raises:
            ResumeRefusedError: something has changed; the error has one row for each difference.
        """
        choices = {name: tuple(map(spell, self._space.legal(name))) for name in self._space.choices}
        choices[BASELINE] = tuple(f"{n}={spell(v)}" for n, v in self._space.baseline.items())
        now = StudyConditions(fingerprint=fingerprint, space=choices)
        attributes = self.optuna.user_attrs
        is_bound = FINGERPRINT in attributes
        then = read_conditions(self._files)
        if is_bound:
            then = StudyConditions(fingerprint=attributes[FINGERPRINT], space=attributes.get(SPACE, {}))
        rows = [] if then is None else then.differences(now)
        if rows:
            raise ResumeRefusedError(
                f"study {self._files.name!r} was made under other conditions; its numbers would not compare",
                rows,
                advice="restore the conditions, or start a new study with `autotune search`.",
            )
        if not self._files.conditions.exists():
            write_atomic(self._files.conditions, now.model_dump_json(indent=1))
        if not is_bound:
            with writing(self._files):
                self.optuna.set_user_attr(SPACE, now.model_dump(mode="json")["space"])
                self.optuna.set_user_attr(FINGERPRINT, fingerprint.model_dump())

    @property
    def has_plan(self) -> bool:
        """Whether `plan` has been called, in this run or an earlier one."""
        return _FIRST in self.optuna.user_attrs

    def plan(self, configs: Sequence[Config], capacity_bytes: int | None) -> None:
        """Store the configurations to try first and the memory limit, so that a resume uses the same."""
        with writing(self._files):
            self.optuna.set_user_attr(_CAPACITY, capacity_bytes)
            self.optuna.set_user_attr(_FIRST, [dict(config) for config in configs])

    @property
    def planned(self) -> list[dict[str, Value]]:
        return list(self.optuna.user_attrs.get(_FIRST, []))

    @property
    def capacity_bytes(self) -> int | None:
        """Device memory that a training may use; ``None`` if unknown."""
        capacity: int | None = self.optuna.user_attrs.get(_CAPACITY)
        return capacity

    @property
    def ended(self) -> str | None:
        """Why the search ended; ``None`` if it has not ended."""
        reason: str | None = self.optuna.user_attrs.get(_ENDED)
        return reason

    @property
    def ended_at_s(self) -> float:
        """Seconds of the budget that were spent when the search ended; 0 if that is not known."""
        return float(self.optuna.user_attrs.get(_ENDED_AT, 0.0))

    def end(self, reason: str, spent_s: float) -> None:
        """Store why the search ended and how much of its budget had been spent. The proof that follows can be
        interrupted and resumed."""
        with writing(self._files):
            self.optuna.set_user_attr(_ENDED_AT, spent_s)
            self.optuna.set_user_attr(_ENDED, reason)

    def reopen(self) -> None:
        """Forget that the search has ended."""
        with writing(self._files):
            self.optuna.set_user_attr(_ENDED, None)

    def go_on(self, lost: PastContest) -> None:
        """Store a contest that no trial won, and let the search go on."""
        with writing(self._files):
            self.optuna.set_user_attr(_CONTESTS, [asdict(contest) for contest in (*self.contests, lost)])
        self.contests.append(lost)
        self.reopen()

    def recover(self) -> list[Trial]:
        """Return the trials that an earlier run left running.

        A trial has the result that its process wrote before the kill, or else status ``interrupted``. The caller scores
        the trials and passes them to `record`.
        """
        left_running = []
        for frozen in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = optuna.Trial(self.optuna, frozen._trial_id)
            files = self._files.trial(frozen.number)
            spec, result = read_launch(files)
            # A trial killed while the sampler was suggesting has only some of its parameters and cannot be repeated.
            config = spec.config if spec else dict(frozen.system_attrs.get("fixed_params", {}))
            if result is None:
                result = TrialResult(
                    launch=files.folder.name,
                    status=TrialStatus.INTERRUPTED,
                    cause="the search was killed while it ran",
                )
                write_result(files, result)
            repeats = frozen.user_attrs.get("repeats")
            left_running.append(Trial(number=frozen.number, config=config, result=result, repeats=repeats))
            self._pending[frozen.number] = trial
        return left_running

    @property
    def newest(self) -> int:
        """Number of the last trial; 0 if there is none."""
        return self.trials[-1].number if self.trials else 0

    @property
    def tried(self) -> Set[str]:
        """Keys of configurations not to launch again: those that are running, have a verdict, or failed `ATTEMPTS`
        times (disturbed ones: in this run)."""
        return self._tried.union(self._running.values()) if self._running else self._tried

    @property
    def was_only_disturbed(self) -> bool:
        """Whether there have been trials, but other processes kept the machine too busy to measure any of them."""
        return any(_is_disturbed(t.result) for t in self.trials) and not any(_is_known(t.result) for t in self.trials)

    @property
    def unfinished(self) -> list[Trial]:
        """Trials that ended without a verdict on their configuration and should be repeated.

        Interruptions by the user, or by a kill of the whole search, do not count as attempts.
        """
        repeated = {t.repeats for t in self.trials}
        return [
            t
            for t in self.trials
            # A trial killed while the sampler was suggesting has no configuration.
            if t.config and not _is_known(t.result) and t.number not in repeated and key(t.config) not in self._tried
        ]

    def enqueue(self, config: dict[str, Value], *, repeats: int | None = None) -> None:
        """Make the next `ask` return this configuration."""
        with writing(self._files):
            self.optuna.enqueue_trial(dict(config), user_attrs={"repeats": repeats})

    @property
    def waiting(self) -> bool:
        """Whether the next `ask` returns an enqueued configuration."""
        return bool(self.optuna.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def ask(self) -> tuple[int, dict[str, Value], int | None]:
        """Start a trial; return its number, its configuration, and the number of the trial that it repeats, if any."""
        with writing(self._files):
            trial = self.optuna.ask()
            config = suggest(trial, self._space)
        self._pending[trial.number] = trial
        self._running[trial.number] = key(config)
        return trial.number, config, trial.user_attrs.get("repeats")

    def record(self, trial: Trial, excess: float = 0.0) -> Trial:
        """Store a finished trial durably, then report it to Optuna. Return the trial as stored.

        Args:
            excess: by how much it fails to meet the requirements.
        """
        pending = self._pending[trial.number]
        prediction = pending.storage.get_trial(pending._trial_id).system_attrs.get(PREDICTED)
        predicted = None if prediction is None else Prediction.model_validate(prediction)
        stored = trial.model_copy(update={"result": slim(trial.result), "predicted": predicted})
        with writing(self._files):
            pending.set_user_attr(RECORD, stored.model_dump(mode="json"))
            tell(
                self.optuna,
                pending,
                trial.result.status,
                scores=() if trial.score is None else (trial.score, *trial.further),
                rate_seen_per_s=trial.rate_per_s,
                excess=excess,
            )
        del self._pending[trial.number]
        self._running.pop(trial.number, None)
        self._remember(stored)
        return stored

    def record_heat(self, heat: StudyHeat) -> StudyHeat:
        """Store a finished heat; return it as stored, without the surroundings of its turns."""
        entrants = tuple(
            e.model_copy(update={"turns": tuple(t and t.model_copy(update={"around": None}) for t in e.turns)})
            for e in heat.heat.entrants
        )
        stored = heat.model_copy(update={"heat": heat.heat.model_copy(update={"entrants": entrants})})
        with writing(self._files):
            self.optuna.set_user_attr(f"{HEAT}{heat.number:05d}", stored.model_dump(mode="json"))
        self.heats = sorted([*self.heats, stored], key=lambda h: h.number)
        return stored

    def _remember(self, trial: Trial, *, of_earlier_run: bool = False) -> None:
        self.trials.append(trial)
        self.trials.sort(key=lambda t: t.number)
        name = key(trial.config)
        # Other processes may have left the machine since an earlier run, so what they disturbed is tried again.
        self._failures[name] += trial.result.transient and not (of_earlier_run and _is_disturbed(trial.result))
        if _is_known(trial.result) or self._failures[name] >= ATTEMPTS:
            self._tried.add(name)


def _is_disturbed(result: TrialResult) -> bool:
    """Return whether other processes kept the machine too busy to measure."""
    return result.status is TrialStatus.INTERRUPTED and result.transient


def _is_known(result: TrialResult) -> bool:
    return result.status is not TrialStatus.INTERRUPTED and not result.transient


def finished(trials: list[optuna.trial.FrozenTrial]) -> list[Trial]:
    """Convert Optuna's finished trials to `Trial` records, in order of their numbers."""
    records = [
        Trial.model_validate(t.user_attrs[RECORD]) for t in trials if t.state.is_finished() and RECORD in t.user_attrs
    ]
    return sorted(records, key=lambda t: t.number)


# Takes trials and heats that exist only as folders back into a study's database.


def adopt_folders(files: StudyFiles, history: History, space: Space, now: Fingerprint) -> None:
    """Mark the trials that the database lacks as running; `History.recover` then reads their results.

    The database has been moved away, or replaced by an older copy. New trials would get the numbers of these trials and
    overwrite their folders.

    Args:
        now: this machine, workload and data.

    Raises:
        ResumeRefusedError: a trial was measured with another workload, or on other data.
        MachineError: the database cannot be written.
    """
    study = history.optuna
    stored = study.get_trials(deepcopy=False)
    offered = distributions(space)
    numbers = [int(f.name) for f in files.trials.glob("*") if f.name.isdecimal()]
    with writing(files):
        for frozen in stored:
            # A waiting trial has not been launched, and only a launch makes a folder.
            if frozen.state is TrialState.WAITING and files.trial(frozen.number).folder.exists():
                study._storage.set_trial_state_values(frozen._trial_id, TrialState.RUNNING)
        for number in range(len(stored), max(numbers, default=-1) + 1):
            spec, _ = read_launch(files.trial(number))
            if spec is not None:
                _refuse_others(files, spec, now)
            config = {n: v for n, v in spec.config.items() if n in offered and v in offered[n].choices} if spec else {}
            study.add_trial(
                optuna.create_trial(
                    state=TrialState.RUNNING,
                    params=config,
                    distributions={n: offered[n] for n in config},
                    user_attrs={"repeats": spec.repeats if spec else None},
                )
            )


def adopt_heats(files: StudyFiles, history: History) -> None:
    """Store the finished heats that the database lacks, as found in their folders."""
    recorded = {heat.number for heat in history.heats}
    names = [f.name.removeprefix("heat-").removesuffix("-1") for f in files.launches.glob("heat-*-1")]
    missing = sorted({int(n) for n in names if n.isdecimal()} - recorded)
    trials = [int(f.name) for f in files.trials.glob("*") if missing and f.name.isdecimal()]
    results = [read_launch(files.trial(number))[1] for number in trials]
    trials_s = [result.began_s for result in results if result is not None and result.began_s is not None]
    for number in missing:
        spec, result = read_launch(files.launch(f"heat-{number}-1"))
        if spec is None or spec.heat is None:
            continue
        steps, wall_s, began_s = heat_steps(spec.heat), 0.0, math.inf
        attempt, plan = next(steps)
        while result is not None and result.status is not TrialStatus.INTERRUPTED:
            if spec is None or spec.heat is None or spec.heat.timeless != plan.timeless:
                break
            wall_s += result.wall_s
            began_s = min(began_s, math.inf if result.began_s is None else result.began_s)
            try:
                attempt, plan = steps.send(result)
            except StopIteration as ended:
                after = sum(trial_s < began_s for trial_s in trials_s)
                history.record_heat(StudyHeat(number=number, after=after, heat=ended.value, wall_s=wall_s))
                break
            spec, result = read_launch(files.launch(f"heat-{number}-{attempt}"))


def _refuse_others(files: StudyFiles, spec: TrialSpec, now: Fingerprint) -> None:
    # The rest of the fingerprint is in `conditions.json`, which older studies lack.
    then = {"workload_sha256": spec.workload.sha256, "data_identity": spec.data.identity}
    rows = [(name, was, str(now.values[name])) for name, was in then.items() if was != now.values.get(name, was)]
    if rows:
        raise ResumeRefusedError(
            f"{spec.launch} of study {files.name!r} was measured under other conditions",
            rows,
            advice="restore the conditions, or start a new study with `autotune search`.",
        )


# Accounts for the time of a study, using the results in its launches' folders.


BETWEEN = "between launches"
_PURPOSES = {
    LaunchKind.PROBE: "probing",
    LaunchKind.MEASURE: "verifying",
    LaunchKind.TRAIN_CHECK: "checking that it trains",
    LaunchKind.HOLD: "holding",
    LaunchKind.DEVICE_ONLY: "ceilings",
    LaunchKind.LOADER_ONLY: "ceilings",
    LaunchKind.HEAT: "heats",
}
_ORDER = (
    *("probing", "heats", "searching", "checking that it trains", "comparing data", "verifying"),
    *("holding", "ceilings", "ablation", BETWEEN),
)


def seconds_by_purpose(files: StudyFiles, elapsed_s: float) -> tuple[LedgerRow, ...]:
    """Return one row per purpose, in the order of a search. The last row is the time between launches.

    A killed launch counts with what is known about it. A repeated launch counts once, because its folder holds only the
    last attempt. Time of an interrupted run that no launch's folder covers counts as between launches.
    """
    rows: dict[str, list[LedgerRow]] = {}
    results = []
    for spec, result in read_launches(files):
        purpose = _purpose(spec)
        rows.setdefault(purpose, []).append(_row(purpose, result))
        results.append(result)
    between_s = max(0.0, elapsed_s - _covered_s(results))
    rows[BETWEEN] = [LedgerRow(purpose=BETWEEN, launches=0, seconds=between_s, rest_s=between_s)]
    return tuple(total_row(name, rows[name]) for name in _ORDER if name in rows)


def total_row(purpose: str, rows: Sequence[LedgerRow]) -> LedgerRow:
    figures = (name for name in LedgerRow.model_fields if name != "purpose")
    return LedgerRow(purpose=purpose, **{name: sum(getattr(row, name) for row in rows) for name in figures})


def _covered_s(results: Sequence[TrialResult]) -> float:
    """Return the seconds during which any launch ran: several may have run side by side.

    Launches of older versions do not record when they began, and ran one after another.
    """
    covered_s = sum(r.wall_s for r in results if r.began_s is None)
    until_s = -math.inf
    for began_s, ended_s in sorted((r.began_s, r.began_s + r.wall_s) for r in results if r.began_s is not None):
        covered_s += max(0.0, ended_s - max(began_s, until_s))
        until_s = max(until_s, ended_s)
    return covered_s


def _purpose(spec: TrialSpec) -> str:
    if spec.number is not None:
        return "searching"
    if spec.launch.startswith("data-"):
        return "comparing data"
    if spec.launch.startswith("ablate-"):
        return "ablation"
    return _PURPOSES[spec.kind]


def _row(purpose: str, result: TrialResult) -> LedgerRow:
    phases = result.phase_s
    start_s = phases.get(Phase.LOAD, 0.0) + phases.get(Phase.BUILD, 0.0)
    compile_s = phases.get(Phase.COMPILE, 0.0)
    kept_s = result.measurement.measured_s if result.measurement is not None else 0.0
    if result.heat is not None:
        kept_s = result.heat.measured_s
        # The models are compiled one after another, which the phases do not add up.
        compile_s = sum(e.first_step_s or 0.0 for e in result.heat.entrants)
    # Steps cut from the front of the windows by steady-state detection count as warm-up.
    warmup_s = phases.get(Phase.WARMUP, 0.0)
    if result.measurement is not None:
        warmup_s = max(warmup_s, result.measurement.warmup_s)
    parts_s = [start_s, compile_s, warmup_s, kept_s]
    if sum(parts_s) > result.wall_s:
        # Phases and steps are timed by different clocks, and the first steps of a heat may be inside its turns.
        parts_s = [part * result.wall_s / sum(parts_s) for part in parts_s]
    start_s, compile_s, warmup_s, kept_s = parts_s
    return LedgerRow(
        purpose=purpose,
        launches=1,
        seconds=result.wall_s,
        start_s=start_s,
        compile_s=compile_s,
        warmup_s=warmup_s,
        kept_s=kept_s,
        rest_s=result.wall_s - sum(parts_s),
    )
