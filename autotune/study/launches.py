"""Builds the specs of a study's launches and runs them within the budget."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.entering import places
from autotune.launcher import Launcher
from autotune.layout import LaunchFiles, StudyFiles
from autotune.observer import Observer
from autotune.records import (
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
    Side,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Value,
    WorkloadRef,
)
from autotune.space import key
from autotune.study.budget import Budget
from autotune.study.heats import run_heat
from autotune.study.history import read_launch, write_result
from autotune.study.plans import heat_plan_for, last_turn_s, limits_for, plan_for, turn_s_for
from autotune.study.samples_read import SamplesRead
from autotune.study.source_watch import SourceWatch, edited_meanwhile
from autotune.study.tables import LaunchTables

#: A launch still running this long after the end of the budget is stopped.
GRACE_S = 20.0
#: The part of a heat's time limit that its turns may take.
_TURNS_PART = 0.5


@dataclass(frozen=True)
class LaunchConditions:
    """Settings shared by all launches of a study.

    Attributes:
        source: the workload's files, if they can be watched.
        command: the script that is run; ``None`` for the workload.
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


def _timeless(plan: HeatPlan | None) -> HeatPlan | None:
    """Return a plan without what it was allowed to take, which depends on the search's own time."""
    return None if plan is None else plan.model_copy(update={"wall_s": None})


def _clear(files: LaunchFiles) -> None:
    """Remove the folders that a script had for itself. Nothing of the launch runs any more."""
    for folder in (files.output, files.scratch):
        shutil.rmtree(folder, ignore_errors=True)


class Launches:
    """Starts launches under the conditions of one study, and enters each in the study's tables.

    Every method that launches raises `WorkloadError` if the workload's files have been edited.

    Args:
        stop: called a few times a second; if it returns True, the running launch ends as interrupted.
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
    ) -> None:
        self.files = files
        self.conditions = conditions
        self.budget = budget
        self._launcher = launcher
        self._observer = observer
        self._stop = stop
        self._tables = LaunchTables(files)
        self.reading = SamplesRead(files)
        self.plan = plan_for(budget.limit_s, busy_cores)
        self.limits = limits_for(budget.limit_s)

    def probe(self, launch: str) -> TrialResult:
        """Run a probe, which looks at torch, the device and the workload."""
        c = self.conditions
        # The batch size may have a place in a command. Flags of its own are left out, so that its own values are seen.
        placed = c.command is not None and "batch_size" in places(c.command.words)
        config: Config = {"batch_size": c.batch_size} if placed else {}
        spec = self._spec(LaunchKind.PROBE, launch, str(self.files.launch(launch).folder), config)
        return self._run(spec, "looking at the workload")

    def trial(
        self,
        number: int,
        config: Config,
        *,
        repeats: int | None,
        prune_below_per_s: float,
        prune_clock_mhz: float | None = None,
        limit_s: float | None,
    ) -> TrialResult:
        """Run trial ``number``, for at most ``limit_s`` seconds if given."""
        folder = self.files.trial(number).folder
        prune = {"prune_below_per_s": prune_below_per_s, "prune_clock_mhz": prune_clock_mhz}
        plan = self.plan.model_copy(update=prune)
        limits = self.limits.model_copy(update={"total_s": limit_s})
        spec = self._spec(LaunchKind.MEASURE, folder.name, str(folder), config).model_copy(
            update={"number": number, "repeats": repeats, "plan": plan, "limits": limits}
        )
        return self._run(spec, f"trial {number}")

    def heat(
        self,
        name: str,
        title: str,
        entrants: Sequence[Config],
        *,
        side: Side = "device",
        least_per_s: float = 0.0,
        expected_s: float = math.inf,
        limit_s: float | None = None,
    ) -> tuple[Heat, float]:
        """Compare configurations in a heat; return it, and the seconds of its launches.

        Args:
            name: unique in the study, and the same on a resume; its launches are called ``name-1``, ``name-2``, …
            entrants: the first is the reference.
            side, least_per_s: see `HeatPlan`.
            expected_s: what it is expected to take. No turn begins after three times as long.
            limit_s: time limit of its launches together.
        """
        wall_s = 0.0

        def launch(number: int, plan: HeatPlan) -> TrialResult:
            nonlocal wall_s
            this = f"{name}-{number}"
            left_s = None if limit_s is None else limit_s - wall_s
            late = TrialResult(launch=this, status=TrialStatus.INTERRUPTED, cause="there was no time left for it")
            if left_s is not None and left_s <= 0 and self.finished(this, plan.entrants[0], plan) is None:
                return late
            plan = plan.model_copy(update={"wall_s": last_turn_s(expected_s, left_s)})
            result = self.run_outside(
                LaunchKind.HEAT, this, title, plan.entrants[0], heat=plan, attempts=1, limit_s=left_s
            )
            wall_s += result.wall_s
            # The time that all of them took together is nobody's fault.
            over = left_s is not None and result.status is TrialStatus.TIMEOUT and result.wall_s >= left_s
            return late if over else result

        plan = self.heat_plan(name)
        if plan is None or (plan.side, plan.entrants) != (side, tuple(entrants)):
            plan = heat_plan_for(self.budget.limit_s, entrants, self.conditions.device, side)
            plan = plan.model_copy(update={"least_per_s": least_per_s})
            if limit_s is not None:
                # Starting, compiling and first steps have the rest.
                plan = plan.model_copy(update={"max_s": max(0.5, min(plan.max_s, _TURNS_PART * limit_s))})
        return run_heat(launch, plan), wall_s

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
        heat: HeatPlan | None = None,
        data: DataRef | None = None,
        attempts: int = ATTEMPTS,
        limit_s: float | None = None,
    ) -> TrialResult:
        """Run a launch outside the search, or return its result if an earlier run of the study completed it.

        A launch whose result says nothing about the configuration (killed, disturbed) is repeated in a fresh process.

        Args:
            launch: name of the launch, unique in the study, and the same on a resume.
            data: other data than the study's.
            attempts: how often it is run at most.
            limit_s: time limit over all attempts.
        """
        done = self.finished(launch, config, heat)
        if done is not None:
            return done
        spec = self._spec(kind, launch, str(self.files.launch(launch).folder), config)
        limits = self.limits.model_copy(update={"total_s": limit_s})
        plans = {"plan": plan or self.plan, "check": check, "hold": hold, "heat": heat}
        spec = spec.model_copy(update={**plans, "limits": limits, "data": data or spec.data})
        for _ in range(attempts):
            result = self._run(spec, title)
            if not result.transient or self._should_stop():
                break
        return result

    @property
    def turn_s(self) -> dict[Side, float]:
        """The least time of a turn in a heat of either side."""
        return turn_s_for(self.budget.limit_s)

    @property
    def measured_s(self) -> float:
        """Seconds inside kept windows, over all launches of the study."""
        return self._tables.measured_s()

    def finished(self, launch: str, config: Config, heat: HeatPlan | None = None) -> TrialResult | None:
        """Return the result of a launch outside the search that an earlier run completed; ``None`` if there is none."""
        spec, result = read_launch(self.files.launch(launch))
        if spec is None or result is None or result.status is not TrialStatus.COMPLETE:
            return None
        return result if key(spec.config) == key(config) and _timeless(spec.heat) == _timeless(heat) else None

    def _spec(self, kind: LaunchKind, launch: str, folder: str, config: Config) -> TrialSpec:
        c = self.conditions
        return TrialSpec(
            kind=kind,
            launch=launch,
            folder=folder,
            workload=c.workload,
            command=c.command,
            data=c.data,
            config=dict[str, Value](config),
            devices=(c.device,),
            env=dict(c.env),
            seed=c.seed,
            image_size=c.image_size,
            batch_size=int(config.get("batch_size", c.batch_size)),
            worker_start_method=c.worker_start_method,
            memory_limit_bytes=c.memory_limit_bytes,
            cache_folder=str(self.files.compile_cache),
            limits=self.limits,
            plan=self.plan,
        )

    def _run(self, spec: TrialSpec, title: str) -> TrialResult:
        source = self.conditions.source
        if source is not None:
            source.check()
        spec = spec.model_copy(update={"first_sample": self.reading.samples})
        if spec.heat is None:
            self._observer.launch_begins(title, spec.config)
        else:
            self._observer.heat_begins(title, spec.heat.entrants)
        # Until its first heartbeat the launch may be waiting for a quiet machine, for any length of time.
        self.budget.pause()

        def beat(found: Beat) -> None:
            self.budget.resume()
            self._observer.beat(found)

        try:
            result = self._launcher.run(spec, on_beat=beat, stop=self._should_stop)
        finally:
            self.budget.resume()
            _clear(LaunchFiles(Path(spec.folder)))
        self.budget.settle(result.waited_s)
        edited = None if source is None else source.edited()
        if edited is not None:
            # A part of the launch may have used the new code (workers import it late), so its figures are nobody's.
            result = TrialResult(
                launch=spec.launch, status=TrialStatus.INTERRUPTED, cause=f"{edited} was edited while it ran"
            )
            write_result(LaunchFiles(Path(spec.folder)), result)
        self.reading.add(spec, result)
        if self.files.database.exists():
            self._tables.add(spec, result)
        self.budget.save()
        if edited is not None:
            raise edited_meanwhile(edited)
        return result

    def _should_stop(self) -> bool:
        self.budget.tick()
        self._observer.clock(self.budget.spent_s, self.budget.limit_s)
        return self._stop() or self.budget.spent_s > self.budget.limit_s + GRACE_S
