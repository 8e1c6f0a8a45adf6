"""The launches of a study."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from autotune.base.errors import AutotuneError, MachineError, UsageError, WorkloadError
from autotune.base.layout import LaunchFiles, StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import (
    ATTEMPTS,
    Beat,
    CheckPlan,
    CommandRef,
    Config,
    DataRef,
    Heat,
    HeatPlan,
    HoldPlan,
    LaunchKind,
    MeasurePlan,
    Phase,
    PhaseLimits,
    Side,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Value,
    WorkloadRef,
)
from autotune.launcher import Launcher
from autotune.launcher.lanes import Lanes, OneLane
from autotune.launcher.script_entry import places
from autotune.space import key
from autotune.study.budget import VERDICT_LAUNCHES, Budget
from autotune.study.database import SharedStudy
from autotune.study.history import heat_steps, read_launch, write_result
from autotune.study.tables import LaunchTables, SamplesRead
from autotune.workload.catalog import source_files, source_hash

# Detects edits of a workload's files while a search runs.

_Stamp = tuple[int, int, int, int]


class SourceWatch:
    """A workload's file and the modules next to it that it imports, as they were when the search began.

    Args:
        path: the workload's file.
        sha256: `autotune.workload.catalog.source_hash` of it when the search began.
    """

    def __init__(self, path: Path, sha256: str) -> None:
        self._path = path
        self._sha256 = sha256
        self._contents: dict[str, bytes] = {}
        #: Stamps of the files and of their folders: a new file may hide a module that was imported from elsewhere.
        self._stamps: dict[Path, _Stamp | None] = {}

    def edited(self) -> str | None:
        """Return the name of a file that has changed; ``None`` if there is none.

        The files are read only if one has been touched since the last call.
        """
        if self._stamps and all(_stamp(path) == stamp for path, stamp in self._stamps.items()):
            return None
        try:
            contents = source_files(self._path)
            folder = self._path.parent
            files = [folder / name for name in contents]
            stamps = {path: _stamp(path) for path in (*files, *(file.parent for file in files))}
            # The files are read again: the stamps belong to this content only if it is the same before and after them.
            if source_hash(self._path) == self._sha256:
                self._contents, self._stamps = contents, stamps
                return None
        except UsageError:
            contents = {}
        names = sorted(contents.keys() | self._contents.keys())
        differing = [name for name in names if contents.get(name) != self._contents.get(name)]
        # Before the first successful look, only the hash of all files is known.
        return differing[0] if self._contents and differing else self._path.name


def edited_meanwhile(name: str) -> WorkloadError:
    return WorkloadError(
        f"{name} was edited meanwhile, and figures of two versions do not compare",
        advice="everything measured before is kept: undo the edit and `autotune resume`, or start a new search.",
    )


def _stamp(path: Path) -> _Stamp | None:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return None


# Runs a study's launches on its devices within its budget, and enters each in the study's tables.

_T = TypeVar("_T")
#: Launches, one after another: yields the spec of each, receives its result, and returns what all of them show.
Launching = Generator[TrialSpec, TrialResult, _T]


@dataclass(frozen=True)
class Place:
    """A device of a study, as fields of the specs of its launches."""

    devices: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@dataclass
class _Task:
    """Launches on one device, one after another.

    Attributes:
        spec: spec of the current launch. waits: it has not begun to train, and may be waiting for its device.
    """

    title: str
    launching: Launching[Any]
    then: Callable[[Any], None]
    spec: TrialSpec
    waits: bool = True


class RunningLaunches:
    """The running launches, at most one on each device.

    If launches run side by side, the observer receives the beats of the one begun last.

    Args:
        places: the devices; a launch that runs alone runs on the first.
        source: the workload's files, if they can be watched.
        launcher: `Lanes`, as many as there are devices, or the launcher of the only one.
        stop: called a few times a second; if it returns True, the running launches end as interrupted.
    """

    def __init__(
        self,
        files: StudyFiles,
        places: Sequence[Place],
        source: SourceWatch | None,
        budget: Budget,
        launcher: Launcher,
        observer: Observer,
        stop: Callable[[], bool],
        tables: LaunchTables | None = None,
    ) -> None:
        self._places = places
        self._source = source
        self._budget = budget
        self.lanes = launcher if isinstance(launcher, Lanes) else OneLane(launcher)
        self._observer = observer
        self._stop = stop
        self.tables = tables or LaunchTables(files)
        self.reading = SamplesRead(files)
        self._tasks: dict[int, _Task] = {}
        self._shown: _Task | None = None
        #: The device whose launch was the first to train after a pause of the budget.
        self._resumed: int | None = None

    @property
    def devices(self) -> int:
        return self.lanes.count

    @property
    def number(self) -> int:
        """Number of devices on which something runs."""
        return len(self._tasks)

    @property
    def free(self) -> int:
        """Number of devices on which nothing runs."""
        return max(0, self.devices - len(self._tasks))  # some may have gone while something ran on them

    def alone(self, title: str, launching: Launching[_T]) -> _T:
        """Run launches on the first device while nothing else runs; return what they return.

        Raises:
            WorkloadError: the workload's files have been edited.
            MachineError: see `Launcher`.
        """
        results: list[_T] = []
        try:
            self.begin(title, launching, results.append)
            while not results:
                self.end()
        except BaseException:
            self.abandon()
            raise
        return results[0]

    def begin(self, title: str, launching: Launching[_T], then: Callable[[_T], None]) -> None:
        """Begin launches on a free device.

        Args:
            title: describes their purpose.
            then: called by `end` with what they return.

        Raises:
            WorkloadError, MachineError: as `alone`.
        """
        lane = next(lane for lane in range(self.lanes.count) if lane not in self._tasks)
        spec, shown = _next(launching, None)
        if spec is None:  # an earlier run of the study has made all of them
            then(shown)
        else:
            self._launch(lane, _Task(title, launching, then, spec))

    def end(self) -> None:
        """Wait until the launches on one device have ended, and call their callback.

        Raises:
            WorkloadError, MachineError: as `alone`.
        """
        while True:
            lane, result = self.lanes.end()
            task = self._tasks.pop(lane)
            result = self._recorded(lane, task.spec, result)
            spec, shown = _next(task.launching, result)
            if spec is None:
                task.then(shown)
                return
            self._launch(lane, replace(task, spec=spec, waits=True))

    def abandon(self) -> None:
        """End everything that is running. A resumed study finds the results in the launches' folders."""
        self.lanes.abandon()
        self._budget.resume()
        while self._tasks:
            _, task = self._tasks.popitem()
            _clear(task.spec)

    def _launch(self, lane: int, task: _Task) -> None:
        edited = None if self._source is None else self._source.edited()
        if edited is not None:
            raise edited_meanwhile(edited)
        first = self.reading.after([other.spec for other in self._tasks.values()])
        spec = task.spec = task.spec.model_copy(update={**asdict(self._places[lane]), "first_sample": first})
        if spec.heat is None:
            self._observer.launch_begins(task.title, spec.config)
        else:
            self._observer.heat_begins(task.title, spec.heat.entrants)
        self._shown = self._tasks[lane] = task
        self._pause()

        def beat(found: Beat) -> None:
            if task.waits:
                task.waits = False
                self._resume(lane)
            if task is self._shown:
                self._observer.beat(found)

        self.lanes.begin(lane, spec, on_beat=beat, stop=self.should_stop)

    def _recorded(self, lane: int, spec: TrialSpec, result: TrialResult) -> TrialResult:
        """Enter a finished launch in the budget and in the tables."""
        self._resume(lane)
        if self._resumed == lane:
            self._budget.settle(result.waited_s)
            self._resumed = None
        _clear(spec)
        edited = None if self._source is None else self._source.edited()
        if edited is not None:
            # Part of the launch may have used the new code (workers import it late), so its figures are void.
            result = TrialResult(
                launch=spec.launch, status=TrialStatus.INTERRUPTED, cause=f"{edited} was edited while it ran"
            )
            write_result(LaunchFiles(Path(spec.folder)), result)
        self.reading.add(spec, result)
        if self.tables.exist:
            self.tables.add(spec, result)
        self._budget.save()
        if edited is not None:
            raise edited_meanwhile(edited)
        self._pause()
        return result

    def _pause(self) -> None:
        """Stop the budget while every launch may be waiting for its device, for however long."""
        if self._tasks and all(task.waits for task in self._tasks.values()):
            self._budget.pause()

    def _resume(self, lane: int) -> None:
        if self._budget.is_paused:
            self._budget.resume()
            self._resumed = lane

    def should_stop(self) -> bool:
        """Update the budget's count and the observer's clock; return whether everything must end."""
        self._budget.tick()
        self._observer.clock(self._budget.spent_s, self._budget.limit_s)
        return self._stop() or self._budget.left_s < -self._budget.grace_s


def once(spec: TrialSpec) -> Launching[TrialResult]:
    return (yield spec)


def _next(launching: Launching[Any], result: TrialResult | None) -> tuple[TrialSpec | None, Any]:
    """Return the spec of the next launch, or after the last one ``None`` and what all of them show.

    Args:
        result: result of the previous launch; ``None`` before the first.
    """
    try:
        return (next(launching) if result is None else launching.send(result)), None
    except StopIteration as ended:
        return None, ended.value


def _clear(spec: TrialSpec) -> None:
    """Remove a script's own folders. No process of the launch is running any more."""
    files = LaunchFiles(Path(spec.folder))
    for folder in (files.output, files.scratch):
        shutil.rmtree(folder, ignore_errors=True)


# How long launches may take and how precisely they measure, as fractions of a study's budget.

#: Half-widths of the 95 % intervals of ratios in a heat, within which the remaining entrants count as equal.
_SETTLED = {"cpu": 0.02, "cuda": 0.005}
_SETTLED_LOADER = 0.05
#: A turn of the loader is this many times as long as one of the device: batches come in bursts of all workers.
_LOADER_TURN = 10.0
#: In less time, the turns of a heat show little, however short the budget.
_LEAST_HEAT_S = 4.0
#: No turn of a heat begins after this multiple of its expected duration (taken as at least the second figure), nor
#: after this fraction of its time limit, at which it would be killed and lost entirely.
_LATE, _LEAST_EXPECTED_S, _BEGIN_PART = 3.0, 10.0, 0.8
#: Fraction of the allowed cores that other processes may use if no core is free. The search's own process needs some.
BUSY_FRACTION = 0.1


def plan_for(budget_s: float, busy_cores: float | None) -> MeasurePlan:
    """Return the measuring plan of one launch: a fortieth of the budget, so that about twenty trials fit.

    Args:
        busy_cores: a window is discarded if no core is free and other processes use more cores than this, or if they
            use the card; ``None`` disables both checks.
    """
    return MeasurePlan(
        max_measure_s=min(30.0, max(3.0, budget_s / 40)),
        max_warmup_s=min(30.0, max(3.0, budget_s / 40)),
        busy_cores=busy_cores,
    )


def proof_plan_for(plan: MeasurePlan) -> MeasurePlan:
    """Return the measuring plan of a launch in the proof.

    Rates vary more between launches than between the windows of one launch, so several short launches reveal more than
    a long one.
    """
    return plan.model_copy(update={"max_measure_s": max(3.0, 0.4 * plan.max_measure_s)})


def heat_plan_for(budget_s: float, entrants: Sequence[Config], device: str, side: Side = "device") -> HeatPlan:
    """Return the plan of a heat, whose turns take at most a fifteenth of the budget.

    Args:
        device: its contract name.
    """
    common = HeatPlan(
        side=side,
        entrants=tuple(dict[str, Value](config) for config in entrants),
        turn_s=turn_s_for(budget_s)[side],
        max_s=min(60.0, max(_LEAST_HEAT_S, budget_s / 15)),
        settled=_SETTLED["cpu" if device == "cpu" else "cuda"],
    )
    if side == "device":
        return common
    # Numbers of workers differ a lot in rate, if at all.
    return common.model_copy(update={"min_rounds": 2, "max_rounds": 4, "settled": _SETTLED_LOADER})


def turn_s_for(budget_s: float) -> dict[Side, float]:
    """Return the least duration of a turn in a heat, by side."""
    device_s = min(0.2, max(0.02, budget_s / 3000))
    return {"device": device_s, "loader": _LOADER_TURN * device_s}


# Builds the specs of a study's launches and runs them within the budget.

#: In a longer budget, no script is kept: there is time for launches, and for everything that a probe can inspect.
_KEEPS_UP_TO_S = 180.0
#: Number of steps after which a script's training has been observed.
_SEEN_AFTER = 6
#: Fraction of a heat's time limit that its turns may take.
_TURNS_PART = 0.5


@dataclass(frozen=True)
class LaunchConditions:
    """Settings shared by all launches of a study.

    Attributes:
        device, env, cores: those of the device on which launches run alone. beside: further devices for the search.
        source: the workload's files, if they can be watched.
        command: the script that is run; ``None`` for the workload.
        ranks: processes that train together.
    """

    workload: WorkloadRef
    data: DataRef
    device: str
    batch_size: int
    image_size: int | None
    seed: int
    worker_start_method: str
    memory_limit_bytes: int | None
    env: dict[str, str]
    source: SourceWatch | None = None
    command: CommandRef | None = None
    ranks: int = 1
    cores: tuple[int, ...] = ()
    beside: tuple[Place, ...] = ()

    @property
    def cards(self) -> tuple[str, ...]:
        """The UUIDs of the cards of a launch that runs alone, in the order of its ranks; empty on a CPU."""
        return tuple(filter(None, self.env.get("CUDA_VISIBLE_DEVICES", "").split(",")))

    @property
    def places(self) -> tuple[Place, ...]:
        return (Place((self.device,), self.env, self.cores), *self.beside)


def ended_from_outside(result: TrialResult) -> bool:
    """Return whether a launch says nothing about its configuration, because it was ended from outside or the machine
    failed (full disk, lost store)."""
    faults = (MachineError.exit_code, AutotuneError.exit_code)
    return result.status in (TrialStatus.INTERRUPTED, TrialStatus.KILLED) or result.error_code in faults


class Launches:
    """Starts launches under the conditions of one study, and enters each in the study's tables.

    Every method that launches raises `WorkloadError` if the workload's files have been edited.

    Args:
        stop: called a few times a second; if it returns True, the running launch ends as interrupted.
        shared: the study in a database that several machines share, if it is stored there.
    """

    def __init__(
        self,
        files: StudyFiles,
        conditions: LaunchConditions,
        budget: Budget,
        launcher: Launcher,
        observer: Observer,
        stop: Callable[[], bool],
        *,
        busy_cores: float | None,
        shared: SharedStudy | None = None,
    ) -> None:
        self.files = files
        self.conditions = conditions
        self.budget = budget
        self.running = RunningLaunches(
            files, conditions.places, conditions.source, budget, launcher, observer, stop, LaunchTables(files, shared)
        )
        self.plan = plan_for(budget.limit_s, busy_cores)
        #: See `HeatPlan`; ``None`` if no turns would be fair.
        self.even_steps: int | None = 1
        #: How long each phase may take before a launch counts as stuck: some take a part of a large budget.
        long_s = max(120.0, budget.limit_s / 4)
        self.limits = PhaseLimits(
            load_s=long_s, build_s=long_s, compile_s=long_s, warmup_s=180.0, measure_s=180.0, silence_s=120.0
        )

    def probe(self, launch: str, *, keep: bool = False) -> TrialResult:
        """Run a probe, which inspects torch, the device and the workload.

        Args:
            keep: if the workload is a script and the budget has no time for a verdict by launches, the probe's script
                keeps training for what follows.
        """
        c = self.conditions
        # A command may have a place for the batch size. Separate flags are left out, to observe the script's own
        # values.
        is_placed = c.command is not None and "batch_size" in places(c.command.words)
        config: Config = {"batch_size": c.batch_size} if is_placed else {}
        spec = self.spec(LaunchKind.PROBE, self.files.launch(launch), config, keeps=keep and self._may_keep)
        result = self.running.alone("looking at the workload", once(spec))
        start_s = sum(result.phase_s.get(phase, 0.0) for phase in (Phase.LOAD, Phase.BUILD, Phase.COMPILE))
        step_s = 0.0 if result.probe is None else result.probe.step_s or 0.0
        launch_s = start_s + max(self.plan.max_measure_s, _SEEN_AFTER * step_s)
        if self.follow and VERDICT_LAUNCHES * launch_s <= self.budget.left_s:
            # There is time for a proof, whose launches then show everything.
            self.running.lanes.let_go()
        return result

    @property
    def _may_keep(self) -> bool:
        """Whether the script of a probe may keep running for the launches that follow: it writes where it always does,
        and none of its processes is distinguished from the others."""
        c = self.conditions.command
        if c is None or c.rate is not None or c.scratch or c.output_flag is not None:
            return False
        is_short = self.budget.limit_s <= _KEEPS_UP_TO_S
        return is_short and self.running.lanes.may_keep and self.conditions.memory_limit_bytes is None

    @property
    def follow(self) -> bool:
        """Whether launches may take place in the script that the probe has started, which is still running."""
        return self.running.lanes.keeps

    def heat(
        self, name: str, title: str, entrants: Sequence[Config], *, limit_s: float | None = None
    ) -> tuple[Heat, float]:
        """Compare configurations in a heat (see `heat_launches`) while nothing else runs; return the heat, and the
        seconds of its launches."""
        return self.running.alone(title, self.heat_launches(name, entrants, limit_s=limit_s))

    def heat_launches(
        self,
        name: str,
        entrants: Sequence[Config],
        *,
        side: Side = "device",
        least_per_s: float = 0.0,
        expected_s: float = math.inf,
        limit_s: float | None = None,
        follows: bool = False,
        all_rounds: bool = False,
    ) -> Launching[tuple[Heat, float]]:
        """Return the launches of a heat, which compares configurations; they return the heat and the seconds they took.

        Args:
            name: unique in the study, and the same on a resume; its launches are called ``name-1``, ``name-2``, …
            entrants: the first is the reference.
            side, least_per_s: see `HeatPlan`.
            expected_s: expected duration. No turn begins after three times as long.
            limit_s: time limit of all its launches together.
            follows: see `TrialSpec`.
            all_rounds: see `HeatPlan`; the turns may take their whole part of the limit.
        """
        plan = self.heat_plan(name)
        if plan is None or (plan.side, plan.entrants) != (side, tuple(entrants)):
            plan = heat_plan_for(self.budget.limit_s, entrants, self.conditions.device, side)
            plan = plan.model_copy(update={"least_per_s": least_per_s, "even_steps": self.even_steps or 1})
            if limit_s is not None:
                # Startup, compiling and first steps take the rest.
                most_s = _TURNS_PART * limit_s
                max_s = max(0.5, most_s if all_rounds else min(plan.max_s, most_s))
                plan = plan.model_copy(update={"max_s": max_s, "all_rounds": all_rounds})
        wall_s = 0.0
        result: TrialResult | None = None
        steps = heat_steps(plan)
        while True:
            try:
                number, plan = next(steps) if result is None else steps.send(result)
            except StopIteration as ended:
                return ended.value, wall_s
            left_s = None if limit_s is None else limit_s - wall_s
            late_s = _LATE * max(expected_s, _LEAST_EXPECTED_S)
            late_s = late_s if left_s is None else min(late_s, _BEGIN_PART * left_s)
            plan = plan.model_copy(update={"wall_s": None if math.isinf(late_s) else max(0.1, late_s)})
            result = yield from self._heat_launch(f"{name}-{number}", plan, left_s, follows=follows)
            wall_s += result.wall_s

    def _heat_launch(
        self, launch: str, plan: HeatPlan, left_s: float | None, *, follows: bool
    ) -> Launching[TrialResult]:
        """Launch a heat unless an earlier run of the study has completed this launch or no time is left for it."""
        too_late = TrialResult(launch=launch, status=TrialStatus.INTERRUPTED, cause="there was no time left for it")
        earlier = self.finished(launch, plan.entrants[0], plan)
        if earlier is not None:
            return earlier
        if left_s is not None and left_s <= 0:
            return too_late
        files = self.files.launch(launch)
        result = yield self.spec(LaunchKind.HEAT, files, plan.entrants[0], left_s, heat=plan, follows=follows)
        # No entrant is to blame for the time that all of them took together.
        is_overdue = left_s is not None and result.status is TrialStatus.TIMEOUT and result.wall_s >= left_s
        return too_late.model_copy(update={"wall_s": result.wall_s}) if is_overdue else result

    def heat_plan(self, name: str) -> HeatPlan | None:
        """Return the plan of a heat that an earlier run of the study has begun; ``None`` if there is none."""
        spec, _ = read_launch(self.files.launch(f"{name}-1"))
        return None if spec is None else spec.heat

    def run_outside(
        self,
        kind: LaunchKind,
        launch: str,
        title: str,
        config: Config,
        *,
        plan: MeasurePlan | None = None,
        check: CheckPlan | None = None,
        hold: HoldPlan | None = None,
        data: DataRef | None = None,
        exchanges: bool = True,
        limit_s: float | None = None,
    ) -> TrialResult:
        """Run a launch outside the search, or return its result if an earlier run of the study completed it.

        A launch whose result says nothing about the configuration (killed, disturbed) is repeated in a fresh process.

        Args:
            launch: name of the launch, unique in the study, and the same on a resume.
            data: data to use instead of the study's.
            exchanges: see `TrialSpec`.
            limit_s: time limit of each attempt.
        """
        earlier = self.finished(launch, config)
        if earlier is not None:
            return earlier
        plans = {"plan": plan or self.plan, "check": check, "hold": hold, "data": data or self.conditions.data}
        spec = self.spec(kind, self.files.launch(launch), config, limit_s, exchanges=exchanges, **plans)
        disturbed: TrialResult | None = None
        for _ in range(ATTEMPTS):
            result = self.running.alone(title, once(spec))
            if not result.transient or self.running.should_stop():
                break
            disturbed = result
        # The reason why the time ran out is more informative than that it did.
        return disturbed if disturbed is not None and result.status is TrialStatus.INTERRUPTED else result

    @property
    def turn_s(self) -> dict[Side, float]:
        return turn_s_for(self.budget.limit_s)

    @property
    def measured_s(self) -> float:
        return self.running.tables.measured_s()

    def finished(self, launch: str, config: Config, heat: HeatPlan | None = None) -> TrialResult | None:
        """Return the result of a launch outside the search that an earlier run completed, or in which the configuration
        failed; ``None`` if there is none."""
        spec, result = read_launch(self.files.launch(launch))
        if spec is None or result is None:
            return None
        # With more time, or on a machine that is itself again, it may end otherwise.
        open_still = result.transient or ended_from_outside(result) or result.status is TrialStatus.TIMEOUT
        if result.status is not TrialStatus.COMPLETE and open_still:
            return None
        then, now = (None if plan is None else plan.timeless for plan in (spec.heat, heat))
        return result if key(spec.config) == key(config) and then == now else None

    def spec(
        self, kind: LaunchKind, files: LaunchFiles, config: Config, limit_s: float | None = None, **changes: object
    ) -> TrialSpec:
        """Return the spec of a launch, which takes at most ``limit_s`` seconds if given."""
        c = self.conditions
        spec = TrialSpec(
            kind=kind,
            launch=files.folder.name,
            folder=str(files.folder),
            workload=c.workload,
            command=c.command,
            data=c.data,
            config=dict[str, Value](config),
            ranks=c.ranks,
            seed=c.seed,
            image_size=c.image_size,
            batch_size=int(config.get("batch_size", c.batch_size)),
            worker_start_method=c.worker_start_method,
            memory_limit_bytes=c.memory_limit_bytes,
            cache_folder=str(self.files.compile_cache),
            limits=self.limits.model_copy(update={"total_s": limit_s}),
            plan=self.plan,
        )
        return spec.model_copy(update=changes)
