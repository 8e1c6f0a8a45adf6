"""Builds the specs of a study's launches and runs them within the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.launcher.entering import places
from autotune.launcher import Launcher
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import (
    ATTEMPTS,
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
from autotune.study.heats import heat_steps
from autotune.study.launch_files import read_launch
from autotune.study.plans import heat_plan_for, last_turn_s, limits_for, plan_for, turn_s_for
from autotune.study.running import Launching, Place, RunningLaunches, once
from autotune.study.shared import SharedStudy
from autotune.study.source_watch import SourceWatch
from autotune.study.tables import LaunchTables

#: The part of a heat's time limit that its turns may take.
_TURNS_PART = 0.5


@dataclass(frozen=True)
class LaunchConditions:
    """Settings shared by all launches of a study.

    Attributes:
        device, env, cores: of the device on which launches run alone. beside: further devices for the search.
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
        """All devices."""
        return (Place((self.device,), self.env, self.cores), *self.beside)


def _timeless(plan: HeatPlan | None) -> HeatPlan | None:
    """Return a plan without what it was allowed to take, which depends on the search's own time."""
    return None if plan is None else plan.model_copy(update={"wall_s": None})


class Launches:
    """Starts launches under the conditions of one study, and enters each in the study's tables.

    Every method that launches raises `WorkloadError` if the workload's files have been edited.

    Args:
        stop: called a few times a second; if it returns True, the running launch ends as interrupted.
        shared: the study in a database that several machines share, if that is where it is.
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
        #: See `HeatPlan`; ``None``: no turns would be fair.
        self.even_steps: int | None = 1
        self.limits = limits_for(budget.limit_s)

    def probe(self, launch: str) -> TrialResult:
        """Run a probe, which looks at torch, the device and the workload."""
        c = self.conditions
        # The batch size may have a place in a command. Flags of its own are left out, so that its own values are seen.
        placed = c.command is not None and "batch_size" in places(c.command.words)
        config: Config = {"batch_size": c.batch_size} if placed else {}
        spec = self._spec(LaunchKind.PROBE, launch, str(self.files.launch(launch).folder), config)
        return self.running.alone("looking at the workload", once(spec))

    def trial_spec(
        self,
        number: int,
        config: Config,
        *,
        repeats: int | None,
        prune_below_per_s: float,
        prune_clock_mhz: float | None = None,
        per_batch: tuple[float, float] | None = None,
        limit_s: float | None,
    ) -> TrialSpec:
        """Return the spec of trial ``number``, which takes at most ``limit_s`` seconds if given."""
        folder = self.files.trial(number).folder
        beside = {"prune_below_per_s": prune_below_per_s, "prune_clock_mhz": prune_clock_mhz, "per_batch": per_batch}
        plan = self.plan.model_copy(update=beside)
        limits = self.limits.model_copy(update={"total_s": limit_s})
        return self._spec(LaunchKind.MEASURE, folder.name, str(folder), config).model_copy(
            update={"number": number, "repeats": repeats, "plan": plan, "limits": limits}
        )

    def heat(
        self, name: str, title: str, entrants: Sequence[Config], *, limit_s: float | None = None
    ) -> tuple[Heat, float]:
        """Compare configurations in a heat while nothing else runs; return it, and the seconds of its launches.

        Args:
            name, entrants, limit_s: see `heat_launches`.
        """
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
    ) -> Launching[tuple[Heat, float]]:
        """Return the launches of a heat, which compares configurations; they show it, and the seconds they have taken.

        Args:
            name: unique in the study, and the same on a resume; its launches are called ``name-1``, ``name-2``, …
            entrants: the first is the reference.
            side, least_per_s: see `HeatPlan`.
            expected_s: what it is expected to take. No turn begins after three times as long.
            limit_s: time limit of its launches together.
        """
        plan = self.heat_plan(name)
        if plan is None or (plan.side, plan.entrants) != (side, tuple(entrants)):
            plan = heat_plan_for(self.budget.limit_s, entrants, self.conditions.device, side)
            plan = plan.model_copy(update={"least_per_s": least_per_s, "even_steps": self.even_steps or 1})
            if limit_s is not None:
                # Starting, compiling and first steps have the rest.
                plan = plan.model_copy(update={"max_s": max(0.5, min(plan.max_s, _TURNS_PART * limit_s))})
        wall_s = 0.0
        result: TrialResult | None = None
        steps = heat_steps(plan)
        while True:
            try:
                number, plan = next(steps) if result is None else steps.send(result)
            except StopIteration as ended:
                return ended.value, wall_s
            left_s = None if limit_s is None else limit_s - wall_s
            plan = plan.model_copy(update={"wall_s": last_turn_s(expected_s, left_s)})
            result = yield from self._heat_launch(f"{name}-{number}", plan, left_s)
            wall_s += result.wall_s

    def _heat_launch(self, launch: str, plan: HeatPlan, left_s: float | None) -> Launching[TrialResult]:
        """Launch a heat, unless an earlier run of the study has completed this launch or no time is left for it."""
        late = TrialResult(launch=launch, status=TrialStatus.INTERRUPTED, cause="there was no time left for it")
        done = self.finished(launch, plan.entrants[0], plan)
        if done is not None:
            return done
        if left_s is not None and left_s <= 0:
            return late
        result = yield self._outside(LaunchKind.HEAT, launch, plan.entrants[0], left_s, heat=plan)
        # The time that all of them took together is nobody's fault.
        over = left_s is not None and result.status is TrialStatus.TIMEOUT and result.wall_s >= left_s
        return late.model_copy(update={"wall_s": result.wall_s}) if over else result

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
        attempts: int = ATTEMPTS,
        limit_s: float | None = None,
    ) -> TrialResult:
        """Run a launch outside the search, or return its result if an earlier run of the study completed it.

        A launch whose result says nothing about the configuration (killed, disturbed) is repeated in a fresh process.

        Args:
            launch: name of the launch, unique in the study, and the same on a resume.
            data: other data than the study's.
            exchanges: see `TrialSpec`.
            attempts: how often it is run at most.
            limit_s: time limit over all attempts.
        """
        done = self.finished(launch, config)
        if done is not None:
            return done
        plans = {"plan": plan or self.plan, "check": check, "hold": hold, "data": data or self.conditions.data}
        spec = self._outside(kind, launch, config, limit_s, exchanges=exchanges, **plans)
        told: TrialResult | None = None
        for _ in range(attempts):
            result = self.running.alone(title, once(spec))
            if not result.transient or self.running.should_stop():
                break
            told = result
        # Why the time ran out tells more than that it did.
        return told if told is not None and result.status is TrialStatus.INTERRUPTED else result

    def _outside(
        self, kind: LaunchKind, launch: str, config: Config, limit_s: float | None, **changes: object
    ) -> TrialSpec:
        """Return the spec of a launch outside the search."""
        limits = self.limits.model_copy(update={"total_s": limit_s})
        spec = self._spec(kind, launch, str(self.files.launch(launch).folder), config)
        return spec.model_copy(update={"limits": limits, **changes})

    @property
    def turn_s(self) -> dict[Side, float]:
        """The least time of a turn in a heat of either side."""
        return turn_s_for(self.budget.limit_s)

    @property
    def measured_s(self) -> float:
        """Seconds inside kept windows, over all launches of the study."""
        return self.running.tables.measured_s()

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
            ranks=c.ranks,
            seed=c.seed,
            image_size=c.image_size,
            batch_size=int(config.get("batch_size", c.batch_size)),
            worker_start_method=c.worker_start_method,
            memory_limit_bytes=c.memory_limit_bytes,
            cache_folder=str(self.files.compile_cache),
            limits=self.limits,
            plan=self.plan,
        )
