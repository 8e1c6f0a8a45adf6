"""What a study is asked, what it remembers, and what it ends with."""

from __future__ import annotations

from pydantic import Field

from autotune.records.base import SCHEMA_VERSION, Record, Value
from autotune.records.launch import TrialResult


class StudySpec(Record):
    """What was asked for, as ``study.yaml`` keeps it. Resuming reads it back and asks for the same.

    Attributes:
        mark: unique to the study; every process of it carries it in its environment.
        device: ``auto`` or a contract name.
        data: what was given to ``--data``.
        narrowed, fixed, baseline: ``--set``, ``--fix``, ``--baseline``, with the values as text.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    mark: str
    created: str
    model: str
    args: dict[str, str] = Field(default_factory=dict)
    data: str = "generated"
    objective: str = "throughput"
    device: str = "auto"
    batch_size: int | None = Field(default=None, gt=0)
    image_size: int | None = Field(default=None, gt=0)
    budget_s: float = Field(default=600.0, gt=0)
    trials: int | None = Field(default=None, gt=0)
    sampler: str = "tpe"
    seed: int = 0
    memory_limit_bytes: int | None = Field(default=None, gt=0)
    narrowed: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    fixed: dict[str, str] = Field(default_factory=dict)
    baseline: dict[str, str] = Field(default_factory=dict)


class Trial(Record):
    """One finished trial, as the search remembers it.

    Attributes:
        result: its measurement is without the per-step tuples; those are in the trial's folder.
        score: the objective's, only when complete.
    """

    number: int
    config: dict[str, Value]
    result: TrialResult
    score: float | None = None
    repeats: int | None = None

    @property
    def rate_per_s(self) -> float | None:
        """Samples per second: measured when complete, seen when pruned."""
        measurement = self.result.measurement
        return measurement.samples_per_s if measurement else self.result.rate_seen_per_s


class Standing(Record):
    """One configuration with what is promised of it.

    Attributes:
        launches: how many independent launches the figures rest on.
        verified: these were launches after the search, in turns with the baseline's; else it is the trial itself,
            whose figure is too good on average, because it was chosen for it.
        speedup: over the baseline, with its 95 % interval.
        score: the objective's, averaged over the launches.
        compile_s, startup_s, epoch_turn_s, loader_wait_fraction: medians over the launches.
        peak_memory_bytes: the largest seen.
    """

    config: dict[str, Value]
    trial: int
    launches: int
    verified: bool
    samples_per_second: float
    ci95: tuple[float, float]
    speedup: float
    speedup_ci95: tuple[float, float]
    score: float
    peak_memory_bytes: int | None
    host_memory_bytes: int | None
    compile_s: float
    startup_s: float
    epoch_turn_s: float | None
    loader_wait_fraction: float


class BreakEven(Record):
    """When compiling pays: after how many steps the compiled training is ahead of the best eager one."""

    compile_s: float
    eager_config: dict[str, Value]
    eager_samples_per_second: float
    steps: int


class Outcome(Record):
    """A finished search. ``--json`` prints it; ``outcome.json`` keeps it.

    Attributes:
        state: ``done``.
        trials: counts by status.
        elapsed_s: of the budget; generating data (`data_s`) is apart. measured_s: inside kept windows.
        stopped: why the search ended, one sentence.
    """

    schema_version: int = SCHEMA_VERSION
    study: str
    state: str
    model: str
    profile: str
    objective: str
    device: str
    device_name: str
    image_size: int | None
    memory_is: str
    baseline: Standing
    best: Standing
    best_same_batch: Standing
    break_even: BreakEven | None = None
    trials: dict[str, int]
    elapsed_s: float
    measured_s: float
    data_s: float = 0.0
    stopped: str
