"""What a search needs before its first trial."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from autotune import stats
from autotune.base.clock import Clock, SystemClock, VirtualClock
from autotune.base.errors import (
    AutotuneError,
    InterruptedSearch,
    MachineError,
    NoVerdictError,
    UsageError,
    WorkloadError,
    by_exit_code,
)
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import (
    CommandRef,
    DataRef,
    Fingerprint,
    Host,
    Outcome,
    Probe,
    StudySpec,
    TrialResult,
    TrialStatus,
    Value,
    WorkloadRef,
)
from autotune.knobs.num_workers import WORKERS
from autotune.launcher import Launcher, ProcessLauncher
from autotune.launcher.lanes import ThreadLanes
from autotune.launcher.remote import RemoteLanes, WorkerFacts, Workers
from autotune.launcher.script_entry import flags_of
from autotune.machine import page_cache
from autotune.machine.gpu import kept_open
from autotune.machine.host import fingerprint, read_host
from autotune.report import leave_page
from autotune.search.request import (
    Device,
    cards_for,
    cards_from,
    devices_text,
    request_for_space,
    require_energy_counters,
    resolve_devices,
)
from autotune.search.study_folders import absolute, resume_command, study_argument
from autotune.search.subject import ALL, Subject, cards_seen, ranks_told
from autotune.space import Space, build_space, key
from autotune.space.formatting import count
from autotune.space.requirements import Requirements
from autotune.study.budget import Budget
from autotune.study.database import Patience, SharedDatabase, SharedStudy
from autotune.study.history import read_conditions, read_launch
from autotune.study.launches import BUSY_FRACTION, LaunchConditions, Launches, Place, SourceWatch
from autotune.study.request import process_mark, read_request
from autotune.study.storage_url import with_credentials
from autotune.study.tables import read_trials
from autotune.workload.contract import DEFAULT_BATCH_SIZE
from autotune.workload.data import sets as data_sets

# Warm start: the winners of earlier studies are tried first.

#: Maximum number of such configurations. Each costs a trial, and the sampler knows without them what usually wins.
MAX_WARM = 3
#: Maximum number of configurations from a forked study, which has measured the same workload.
MAX_FORKED = 5


def best_of(files: StudyFiles) -> list[dict[str, Value]]:
    """Return the best configurations of a study, finished or not, best first and without its baseline.

    Raises:
        MachineError: the study's database cannot be read.
    """
    trials = [t for t in read_trials(files) if t.score is not None]
    if not trials:
        return []
    baseline = key(trials[0].config)
    ranked = sorted((t for t in trials if key(t.config) != baseline), key=lambda t: -(t.score or 0.0))
    return [dict(t.config) for t in ranked[:MAX_FORKED]]


def winners_elsewhere(
    files: StudyFiles, spec: StudySpec, space: Space, say: Callable[[str], None]
) -> list[dict[str, Value]]:
    """Return the winners of earlier studies of the same training in the same folder, on any hardware, as configurations
    of this space. A configuration that was only likely to be faster does not count. Unreadable studies are skipped.

    Args:
        say: called once with a sentence that names the studies.
    """
    winners: dict[str, tuple[str, dict[str, Value]]] = {}
    for name, then, outcome in _others(files):
        best = space.completed(outcome.best.config)
        won = outcome.evidence is None and key(outcome.best.config) != key(outcome.baseline.config)
        legal = space.refusal(best) is None and key(best) != key(space.baseline)
        if _is_alike(then, spec) and then.objective == spec.objective and won and legal:
            winners.setdefault(key(best), (name, best))
    chosen = list(winners.values())[:MAX_WARM]
    if chosen:
        say(f"trying first what won in {', '.join(name for name, _ in chosen)}")
    return [config for _, config in chosen]


def _is_alike(one: StudySpec, other: StudySpec) -> bool:
    """Return whether two studies are of the same training. The folder counts: many scripts are called train.py."""
    commands = [None if c is None else (c.folder, *c.words) for c in (one.command, other.command)]
    return one.model == other.model and one.args == other.args and commands[0] == commands[1]


def _others(files: StudyFiles) -> list[tuple[str, StudySpec, Outcome]]:
    """Return the other finished studies in the folder, newest first."""
    studies = []
    for request in files.folder.parent.glob("*/study.yaml"):
        other = StudyFiles(request.parent)
        if other.folder == files.folder or not other.outcome.is_file():
            continue
        # A damaged study must not prevent this search.
        with contextlib.suppress(AutotuneError, OSError, ValueError):
            outcome = Outcome.model_validate_json(other.outcome.read_text())
            studies.append((other.name, read_request(other), outcome))
    return sorted(studies, key=lambda study: study[1].created, reverse=True)


#: Time limit for dropping data from the page cache, in seconds.
EVICT_S = 20.0


def behind_store(spec: StudySpec, data: DataRef) -> DataRef:
    """Return the data with the slow store that the request puts in front of it, if any.

    Raises:
        UsageError: the store has no files to hold, or a cache is requested without a store.
    """
    store = spec.store
    if store is None:
        if spec.store_cache_bytes is not None:
            raise UsageError("--store-cache is in front of no store", advice="--store-latency says how slow it is.")
        return data
    if data.path is None:
        raise UsageError(
            "there are no files for the slow store to hold: this data comes from no folder",
            advice="--data DIR, or a workload that uses the generated photographs.",
        )
    if spec.store_cache_bytes is not None:
        fraction = min(1.0, spec.store_cache_bytes / max(1, data_sets.size_bytes(Path(data.path))))
        store = store.model_copy(update={"cached": fraction})
    return data.model_copy(update={"store": store})


def evicted(data: DataRef, clock: Clock) -> bool:
    """Drop the data's files from the page cache; return whether they are gone."""
    return data.path is not None and page_cache.evict(Path(data.path), limit_s=EVICT_S, clock=clock)


# The outside world of a search, and one run of a study in it, with its launcher, devices, budget and database.


_T = TypeVar("_T")


@dataclass(frozen=True)
class Environment:
    """The outside world of a search, as parameters.

    Attributes:
        observer: receives the progress.
        stop: returns the number of the signal that asks the search to end, or ``None``. Called a few times a second.
        launcher: makes the launcher of a study from the mark of its processes and the number of its devices; `Lanes` if
            there are several devices.
        page: writes the page of a finished study, given what commands call the study; returns why it could not.
        workers: makes the workers of a study that launches elsewhere, from its request and the mark of its processes.
            ``None``: no search can have workers in this environment.
    """

    observer: Observer
    clock: Clock
    stop: Callable[[], int | None]
    launcher: Callable[[str, int], Launcher]
    page: Callable[[StudyFiles, Outcome, str], str | None] = leave_page
    workers: Callable[[StudySpec, str], Workers] | None = None

    @classmethod
    def real(cls, observer: Observer | None = None, stop: Callable[[], int | None] = lambda: None) -> Environment:
        """Return the environment of this machine, with real time and processes."""
        clock, observer = SystemClock(), observer or Observer()

        def launcher(mark: str, devices: int) -> Launcher:
            def make(on_wait: Callable[[str], None]) -> Launcher:
                return ProcessLauncher(mark, clock, on_wait=on_wait)

            return make(observer.says) if devices == 1 else ThreadLanes(make, devices, clock, observer.says)

        return cls(observer, clock, stop, launcher)


@dataclass(frozen=True)
class Run:
    """One run of a study, which a later run may continue.

    Attributes:
        devices: the devices of its launches.
        away: facts of the first worker, if launches run elsewhere.
        shared: the study in a database that several machines share; ``None`` if the study has a file of its own.
    """

    files: StudyFiles
    spec: StudySpec
    ref: WorkloadRef
    env: Environment
    launcher: Launcher
    budget: Budget
    devices: tuple[Device, ...]
    away: WorkerFacts | None = None
    shared: SharedStudy | None = None

    @property
    def subject(self) -> Subject:
        """What is trained."""
        return Subject.of(self.spec)

    @property
    def target(self) -> Device:
        """The device on which launches run alone."""
        return self.devices[0]

    @property
    def host(self) -> Host:
        """What one device may use of the machine. Total memory sizes stay those of the machine, with which a later
        training is compared."""
        if self.away is not None:
            return self.away.host
        host, cores = read_host(), sum(len(device.cores) for device in self.devices)
        host = host.model_copy(update={"cores": min(cores, host.cores)}) if cores else host
        return host.part(len(self.devices))

    def launches(self, conditions: LaunchConditions) -> Launches:
        """Return the launches under these conditions. The budget counts their time."""
        return Launches(
            self.files,
            conditions,
            self.budget,
            self.launcher,
            self.env.observer,
            lambda: self.env.stop() is not None,
            busy_cores=None if self.spec.allow_busy else BUSY_FRACTION * self.host.cores,
            shared=self.shared,
        )

    @property
    def required(self) -> Requirements:
        """What the winner must meet."""
        return Requirements.parsed(self.spec.require, self.spec.goal)

    def raise_if_stopped(self) -> None:
        """Raise `InterruptedSearch` if a signal was received."""
        number = self.env.stop()
        if number is not None:
            raise InterruptedSearch(number)

    def uncounted(self, work: Callable[[], _T]) -> tuple[_T, float]:
        """Call ``work`` without counting its time in the budget; return its result and its duration in seconds."""
        self.budget.pause()
        began = self.env.clock.now()
        try:
            result = work()
            return result, self.env.clock.now() - began
        finally:
            self.budget.resume()


@contextlib.contextmanager
def run_of(files: StudyFiles, spec: StudySpec, ref: WorkloadRef, env: Environment) -> Iterator[Run]:
    """Yield a run. At the end, its launcher is closed and its observer is notified.

    Raises:
        MachineError: the device does not exist, the budget that the study has used cannot be read, or the database
            that is to store the study cannot be used.
    """
    with contextlib.ExitStack() as ends, kept_open():
        ends.callback(env.observer.ends)
        mark, budget, shared = process_mark(files, spec), Budget(files, spec.budget_s, env.clock), None
        if spec.storage is not None:
            advice = "nothing is lost; `autotune resume` goes on once it answers."
            patience = Patience(spec.storage, env.clock, budget, env.observer.says, env.stop, advice=advice)
            database = SharedDatabase(with_credentials(spec.storage), make=True, keep=True)
            ends.callback(database.close)
            shared = SharedStudy(database, spec.mark, patience)
        if spec.on is None:
            devices = resolve_devices(spec)
            launcher = env.launcher(mark, len(devices))
            ends.callback(launcher.close)
            yield Run(files, spec, ref, env, launcher, budget, devices, shared=shared)
            return
        if env.workers is None:
            raise UsageError(f"--on {spec.on} is for `autotune search` and `autotune resume`", advice="leave it out.")
        earlier = read_conditions(files)
        assert isinstance(env.clock, SystemClock | VirtualClock)
        fingerprint_before = None if earlier is None else earlier.fingerprint
        lanes = RemoteLanes(env.workers(spec, mark), files.folder, env.clock, env.observer.says, fingerprint_before)
        ends.callback(lanes.close)
        run = Run(files, spec, ref, env, lanes, budget, (), shared=shared)
        # The search's time does not include waiting for the first worker.
        facts, _ = run.uncounted(lambda: lanes.first(run.raise_if_stopped))
        devices = (Device(facts.device, facts.gpu, cores=facts.cores),) * lanes.count
        yield replace(run, devices=devices, away=facts)


#: Number of batches to repeat if a data set caches its samples.
_REPEATED = 16
#: A verdict takes at least about this many launches, each as long as the probe.
_LAUNCHES = 6
#: The objective that needs the energy counters of all cards.
_ENERGY = "energy"


@dataclass(frozen=True)
class Setup:
    """The state of a search before its first trial.

    Attributes:
        conditions: the conditions of all further launches.
        data_s: seconds spent on making and reading the data, which the budget does not count.
    """

    run: Run
    conditions: LaunchConditions
    probe: Probe
    host: Host
    fingerprint: Fingerprint
    space: Space
    data_s: float

    @property
    def capacity_bytes(self) -> int | None:
        """Device memory that a training may use, in bytes; ``None`` if unknown."""
        probe = self.probe
        device_limit = (
            self.host.available_bytes // self.conditions.ranks
            if probe.device == "cpu"
            else probe.device_free_bytes or probe.device_memory_bytes
        )
        limits = [limit for limit in (self.run.spec.memory_limit_bytes, device_limit) if limit is not None]
        return min(limits, default=None)


def set_up(run: Run, *, measuring: bool = True) -> Setup:
    """Probe the workload for the data it needs, provide the data, probe again with it, and build the legal space.

    Args:
        measuring: whether measurements will follow. If so, the observer is notified, and the data's files are read
            once.

    Raises:
        UsageError: the request cannot be carried out on this machine.
        WorkloadError: the workload cannot be used.
        MachineError: the machine or its device cannot be used.
        InterruptedSearch: a signal was received.
    """
    conditions, probe, data_s = _probed(run)
    if measuring:
        run.env.observer.begins(run.spec, _headline(run, conditions, probe))
        for sentence in filter(None, (_alone(run), *run.subject.before_measuring(run.files, probe))):
            run.env.observer.says(sentence)
        data, warm_s = run.uncounted(lambda: _warmed(run, conditions.data))
        conditions, data_s = replace(conditions, data=data), data_s + warm_s
    host, ranks = run.host, conditions.ranks
    # Each rank has its share of the machine.
    probe = probe.model_copy(update={"ranks": ranks, "cores": max(1, probe.cores // ranks)}) if ranks > 1 else probe
    space = build_space(probe, host.part(ranks), request_for_space(run.spec, probe.workload_knobs))
    if space.shm_sentence is not None:
        run.env.observer.says(space.shm_sentence)
    conditions = replace(conditions, command=_knowing(conditions.command, probe, space))
    machine = fingerprint(probe, host, run.target.gpu, conditions.data, ranks=ranks)
    return Setup(run, conditions, probe, host, machine, space, data_s)


def _alone(run: Run) -> str | None:
    """Return the sentence that a script sees one card of several; ``None`` if its command says how many it takes."""
    words = run.subject.words
    if not words or run.target.gpu is None or run.away is not None or ranks_told(words) is not None:
        return None
    cards = cards_seen()
    if cards <= 1:
        return None
    return f"the script sees one of {cards} cards, because its command does not say that it starts several ranks"


def _warmed(run: Run, data: DataRef) -> DataRef:
    """Read the data's files once, so that the first launch does not read them more slowly than the last; return the
    data with the state of the page cache."""
    if data.path is None:
        # Only the workload knows where its own data comes from.
        state = "unknown" if data.kind == "none" else None
    elif run.away is not None:
        # Each worker reads the files before its first launch, as many as fit.
        state = "cold"
    else:
        state = page_cache.warm(Path(data.path), clock=run.env.clock)
        if state == "cold":
            run.env.observer.says(
                "the data does not fit into the page cache: its files may be read faster by one launch than by another"
            )
    return data.model_copy(update={"page_cache": state})


def _knowing(command: CommandRef | None, probe: Probe, space: Space) -> CommandRef | None:
    """Return the command with the values that its flags have when they are not given (those that the probe observed,
    or else the baseline's), and with whether its data set is to be seen as in later epochs."""
    if command is None:
        return None
    values = {**space.baseline, **(probe.own or {})}
    own = {flag.knob: values[flag.knob] for flag in flags_of(command.flags) if flag.knob in values}
    is_cached = probe.deliveries is not None and stats.first_epoch_more_s(probe.deliveries) is not None
    update = {"own": own, "repeats": _REPEATED if is_cached else None, "view": probe.view_refused is None}
    return command.model_copy(update=update)


def first_headline(run: Run) -> str:
    """Return the headline of a search before the workload is probed."""
    if run.away is None:
        return f"{run.ref.name}, on {devices_text(run.devices)}"
    card = "" if run.away.gpu is None else f" ({run.away.gpu.name})"
    return f"{run.ref.name}, on {run.target.name}{card} of {count(len(run.devices), 'worker')} at {run.spec.on}"


def _headline(run: Run, conditions: LaunchConditions, probe: Probe) -> str:
    ranks = run.spec.ranks
    per_rank = f" in each of {ranks} ranks" if ranks > 1 else ""
    # Without a loader, nothing says how many samples a step has.
    by_steps = conditions.batch_size == 1 and probe.own is not None and WORKERS not in probe.own
    parts = [first_headline(run), *([] if by_steps else [f"batch {conditions.batch_size}{per_rank}"])]
    if conditions.image_size is not None:
        default = "" if run.spec.image_size else f" (the default on {'a CPU' if probe.device == 'cpu' else 'a GPU'})"
        parts.append(f"images of {conditions.image_size} px{default}")
    store = conditions.data.store
    behind = "" if store is None else f" behind a store ({store.words})"
    parts.append(f"data {conditions.data.kind if conditions.data.kind != 'none' else 'of its own'}{behind}")
    return ", ".join(parts)


def _first_conditions(run: Run) -> LaunchConditions:
    """Return the conditions of the first probe, in which the workload reports what data it needs."""
    spec = run.spec
    return LaunchConditions(
        workload=run.ref,
        data=run.subject.data(),
        device=run.target.name,
        batch_size=spec.rank_batch or spec.batch_size or DEFAULT_BATCH_SIZE,
        image_size=spec.image_size,
        seed=spec.seed,
        worker_start_method="fork",
        memory_limit_bytes=spec.memory_limit_bytes,
        command=spec.script,
        env=_place(run.target, _cards(run)).env,
        ranks=spec.ranks,
        cores=run.target.cores,
        beside=tuple(map(_place, run.devices[1:])),
    )


def _cards(run: Run) -> int:
    if run.target.gpu is None:
        return 1
    cards = run.subject.cards(one_each=len(run.devices) > 1 or run.away is not None)
    return cards_from(run.target) if cards == ALL else cards


def _place(device: Device, ranks: int = 1) -> Place:
    # By UUID, because PyTorch and the driver may number the GPUs differently.
    env = {} if device.gpu is None else {"CUDA_VISIBLE_DEVICES": ",".join(cards_for(device, ranks))}
    return Place((device.name,), env, device.cores)


def _probed(run: Run) -> tuple[LaunchConditions, Probe, float]:
    """Return the conditions of further launches, the probe's result, and the seconds spent making data."""
    spec, made_s = run.spec, 0.0
    conditions = _first_conditions(run)
    if _ENERGY in spec.objectives and run.target.gpu is not None and run.away is None:
        require_energy_counters(conditions.cards)
    probe = _probe(run, "probe-1", conditions)
    if probe.wants_data not in (None, "images"):
        raise WorkloadError(
            f"{run.ref.name} asks for DATA = {probe.wants_data!r}", advice='the one set made here is "images".'
        )
    if probe.wants_data is not None and not conditions.data.identity:
        if spec.data == "generated":
            # The budget does not count this time, because the data is made once for all studies.
            data, made_s = run.uncounted(lambda: _generated(run))
        else:
            data = data_sets.folder(absolute(spec.data))
        conditions = replace(conditions, data=data)
        probe = _probe(run, "probe-2", conditions)
    elif conditions.data.path is not None and not conditions.data.identity:
        # The workload has read a sample from the folder, whatever the folder's layout.
        conditions = replace(conditions, data=data_sets.tree(Path(conditions.data.path)))
    conditions = replace(conditions, data=behind_store(spec, conditions.data))
    default_size = probe.cpu_image_size if probe.device == "cpu" else probe.default_image_size
    conditions = replace(
        conditions,
        image_size=conditions.image_size or default_size,
        batch_size=spec.rank_batch or spec.batch_size or probe.default_batch_size,
        worker_start_method=probe.worker_start_method,
        workload=run.ref.model_copy(update={"sha256": probe.workload_sha256}),
        source=_source(run, probe),
    )
    return conditions, probe, made_s


def _generated(run: Run) -> DataRef:
    observer = run.env.observer

    def progress(done: int, total: int) -> None:
        observer.data_progress(done, total)
        run.raise_if_stopped()

    return data_sets.ensure_generated(
        processes=read_host().cores, on_progress=progress, on_warning=observer.says, clock=run.env.clock
    )


def _source(run: Run, probe: Probe) -> SourceWatch | None:
    file = run.subject.file(run.ref)
    if file is not None:
        return SourceWatch(file, run.ref.sha256)
    # Only the probe can find the file of a module.
    if run.away is not None or probe.workload_file is None:
        return None
    return SourceWatch(Path(probe.workload_file), probe.workload_sha256)


def _probe(run: Run, name: str, conditions: LaunchConditions) -> Probe:
    _, earlier = read_launch(run.files.launch(name))
    # Criteria other than the rate, such as memory, need a process of their own per launch.
    keep = run.spec.objectives == ("throughput",) and not run.required
    result = run.launches(conditions).probe(name, keep=keep)
    run.raise_if_stopped()
    if result.probe is None or result.status is not TrialStatus.COMPLETE:
        raise _probe_error(run, result)
    if earlier is not None and earlier.probe is not None and earlier.probe.images_vary is not None:
        # Whether images vary follows from a look at samples, which is limited in time and sees more of them once they
        # are in the page cache. The space of a resumed study follows from its first look.
        return result.probe.model_copy(update={"images_vary": earlier.probe.images_vary})
    return result.probe


def _probe_error(run: Run, result: TrialResult) -> AutotuneError:
    ref, cause = run.ref, result.cause or f"ended as {result.status}"
    if result.status is TrialStatus.INTERRUPTED:
        # No signal asked the search to end: that has been checked before.
        return NoVerdictError(
            f"the budget was spent before {ref.name} had begun to train",
            advice=f"go on with: {resume_command(study_argument(run.files), _LAUNCHES * result.wall_s)}",
        )
    kind = by_exit_code(result.error_code)
    if kind not in (UsageError, MachineError):
        kind = WorkloadError
    message = cause if result.error_code else f"{ref.name} cannot be used: {cause}"
    return kind(message, advice=result.advice, detail=None if result.error_code else result.evidence)
