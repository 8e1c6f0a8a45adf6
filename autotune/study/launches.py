"""The specs of a study's launches, and running them with the budget's clock going."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.launcher import Launcher
from autotune.layout import StudyFiles
from autotune.observer import Observer
from autotune.records import (
    Config,
    DataRef,
    LaunchKind,
    MeasurePlan,
    PhaseLimits,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Value,
    WorkloadRef,
)
from autotune.space import environment, key
from autotune.study.budget import Budget
from autotune.study.history import Ledger, read_launch

#: A launch still running this long after the budget's end is ended.
GRACE_S = 20.0


@dataclass(frozen=True)
class Conditions:
    """What all launches of a study have in common."""

    workload: WorkloadRef
    data: DataRef
    device: str
    batch_size: int
    image_size: int | None
    seed: int
    worker_start_method: str
    memory_limit_bytes: int | None
    env: dict[str, str]


def plan_for(budget_s: float) -> MeasurePlan:
    """How long one launch may measure: a fortieth of the budget, so that some twenty trials fit."""
    return MeasurePlan(
        max_measure_s=min(30.0, max(3.0, budget_s / 40)), max_warmup_s=min(30.0, max(3.0, budget_s / 40))
    )


def limits_for(budget_s: float) -> PhaseLimits:
    """How long a phase may take before the launch counts as stuck: two minutes, or a quarter of a long budget."""
    long_s = max(120.0, budget_s / 4)
    return PhaseLimits(
        load_s=long_s, build_s=long_s, compile_s=long_s, warmup_s=180.0, measure_s=180.0, silence_s=120.0
    )


class Launches:
    """Starts launches under one study's conditions, and keeps a row of each.

    Args:
        stop: asked a few times a second; True ends the running launch as interrupted.
    """

    def __init__(
        self,
        files: StudyFiles,
        conditions: Conditions,
        budget: Budget,
        launcher: Launcher,
        observer: Observer,
        stop: Callable[[], bool],
    ) -> None:
        self.files = files
        self.conditions = conditions
        self.budget = budget
        self._launcher = launcher
        self._observer = observer
        self._stop = stop
        self._ledger = Ledger(files)
        self._plan = plan_for(budget.limit_s)
        self._limits = limits_for(budget.limit_s)

    def probe(self, launch: str) -> TrialResult:
        """Look at torch, the device and the workload."""
        spec = self._spec(LaunchKind.PROBE, launch, str(self.files.launch(launch).folder), {})
        return self._run(spec, "looking at the workload")

    def trial(
        self, number: int, config: Config, *, repeats: int | None, prune_below_per_s: float, limit_s: float | None
    ) -> TrialResult:
        """Run trial ``number``, for at most ``limit_s`` seconds where given."""
        folder = self.files.trial(number).folder
        plan = self._plan.model_copy(update={"prune_below_per_s": prune_below_per_s})
        limits = self._limits.model_copy(update={"total_s": limit_s})
        spec = self._spec(LaunchKind.MEASURE, folder.name, str(folder), config).model_copy(
            update={"number": number, "repeats": repeats, "plan": plan, "limits": limits}
        )
        return self._run(spec, f"trial {number}")

    def measure(self, launch: str, title: str, config: Config) -> TrialResult:
        """Measure a configuration outside the search."""
        spec = self._spec(LaunchKind.MEASURE, launch, str(self.files.launch(launch).folder), config)
        return self._run(spec, title)

    @property
    def measured_s(self) -> float:
        """Seconds inside kept windows, over all launches of the study."""
        return self._ledger.measured_s()

    def finished(self, launch: str, config: Config) -> TrialResult | None:
        """The result of a launch outside the search that an earlier run completed, or ``None``."""
        spec, result = read_launch(self.files.launch(launch))
        if spec is None or result is None or result.status is not TrialStatus.COMPLETE:
            return None
        return result if key(spec.config) == key(config) else None

    def _spec(self, kind: LaunchKind, launch: str, folder: str, config: Config) -> TrialSpec:
        c = self.conditions
        return TrialSpec(
            kind=kind,
            launch=launch,
            folder=folder,
            workload=c.workload,
            data=c.data,
            config=dict[str, Value](config),
            devices=(c.device,),
            env={**c.env, **environment(config)},
            seed=c.seed,
            image_size=c.image_size,
            batch_size=int(config.get("batch_size", c.batch_size)),
            worker_start_method=c.worker_start_method,
            memory_limit_bytes=c.memory_limit_bytes,
            cache_folder=str(self.files.compile_cache),
            limits=self._limits,
            plan=self._plan,
        )

    def _run(self, spec: TrialSpec, title: str) -> TrialResult:
        self._observer.launch_begins(title, spec.config)
        result = self._launcher.run(spec, on_beat=self._observer.beat, stop=self._should_stop)
        if self.files.database.exists():
            self._ledger.add(spec, result)
        self.budget.save()
        return result

    def _should_stop(self) -> bool:
        self.budget.tick()
        self._observer.clock(self.budget.spent_s, self.budget.limit_s)
        return self._stop() or self.budget.spent_s > self.budget.limit_s + GRACE_S
