"""What a study is asked, what it remembers, and what it ends with."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from autotune.records.base import SCHEMA_VERSION, Record, Value
from autotune.records.result import Hold, TrialResult


class StudySpec(Record):
    """What was asked for, as ``study.yaml`` keeps it. Resuming reads it back and asks for the same.

    Attributes:
        mark: unique to the study; every process of it carries it in its environment.
        device: ``auto`` or a contract name.
        data: what was given to ``--data``.
        allow_busy: keep windows during which others used the cores (a card shared with others still counts for none).
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
    sampler: str = "auto"
    seed: int = 0
    memory_limit_bytes: int | None = Field(default=None, gt=0)
    allow_busy: bool = False
    narrowed: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    fixed: dict[str, str] = Field(default_factory=dict)
    baseline: dict[str, str] = Field(default_factory=dict)


class Prediction(Record):
    """What was expected of a trial before it began.

    Attributes:
        rate_per_s: in the objective's unit, where that is no rate. seconds: the whole trial would take.
        peak_bytes: of device memory; ``None`` where there was no telling.
        why: it was proposed, in some words.
    """

    rate_per_s: float
    seconds: float
    peak_bytes: float | None = None
    why: str = ""


class Trial(Record):
    """One finished trial, as the search remembers it.

    Attributes:
        predicted: ``None`` where its proposer expected nothing in particular.
        result: its measurement is without the per-step tuples; those are in the trial's folder.
        score: the objective's, only when complete.
    """

    number: int
    config: dict[str, Value]
    result: TrialResult
    score: float | None = None
    repeats: int | None = None
    predicted: Prediction | None = None

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


class Limit(StrEnum):
    """What a training's rate is bound by."""

    LOADER = "loader-bound"
    DEVICE = "device-bound"
    #: The host cannot enqueue work as fast as the device does it.
    LAUNCH = "launch-bound"
    BALANCED = "balanced"


class Bottleneck(Record):
    """What limits a configuration, and what raising each limit would buy.

    Attributes:
        device_only_per_s, loader_only_per_s: the two ceilings with their 95 % intervals, in samples per second;
            ``None`` where it was not measured.
        sentence: the verdict for a person.
    """

    trial: int
    limit: Limit
    samples_per_s: float
    device_only_per_s: tuple[float, float, float] | None = None
    loader_only_per_s: tuple[float, float, float] | None = None
    sentence: str


class KnobPart(Record):
    """What one knob of the winner gives: the winner over the same with this knob at the baseline's value.

    Attributes:
        value, baseline_value: ``None``: the knob is not active there.
        with_it: knobs that had to go back together with it, because they mean nothing without it.
        gain: ratio of the rates with its 95 % interval; ``None`` where it was not measured, and `why_not` says why.
    """

    knob: str
    value: Value
    baseline_value: Value | None
    with_it: tuple[str, ...] = ()
    gain: tuple[float, float, float] | None = None
    why_not: str | None = None


class TrainVerdict(Record):
    """Whether a finalist trains like eager fp32 at the user's batch size.

    Attributes:
        trials: the finalists that it stands for (they train the same way and differ in the loader only).
        passed: ``None`` where it was not checked; `reason` says why it failed, or was not checked.
        losses: its curve; reference: that of eager fp32 from the same weights and batches;
        tolerance: the largest mean difference accepted; distance: the one seen. Both leave out the tenth of the steps
            that differ most.
    """

    trials: tuple[int, ...]
    config: dict[str, Value]
    passed: bool | None
    reason: str | None = None
    losses: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()
    tolerance: float | None = None
    distance: float | None = None


class HoldVerdict(Record):
    """Whether the winner stays inside the device's memory."""

    trial: int
    passed: bool | None
    reason: str | None = None
    hold: Hold | None = None
    headroom_wanted: float


class LedgerRow(Record):
    """Where seconds went, for launches of one purpose.

    Attributes:
        purpose: ``probing``, ``searching``, ``checking that it trains``, ``verifying``, ``holding``, ``ceilings``,
            ``ablation``, ``between launches`` (sampler, storage, scoring, our own).
        launches: how many; seconds: their whole time. The others are its parts: load and build; compile, the first
            step; warm-up; kept windows; the rest (discarded windows, epoch turn, the process's begin and end).
    """

    purpose: str
    launches: int
    seconds: float
    start_s: float = 0.0
    compile_s: float = 0.0
    warmup_s: float = 0.0
    kept_s: float = 0.0
    rest_s: float = 0.0


class Failure(Record):
    """The error that ended a search without an outcome. ``failure.json`` keeps it until the study goes on."""

    schema_version: int = SCHEMA_VERSION
    message: str
    advice: str | None = None
    exit_code: int


class Outcome(Record):
    """A finished search. ``--json`` prints it; ``outcome.json`` keeps it.

    Attributes:
        state: ``done``.
        trials: counts by status.
        elapsed_s: of the budget; generating data (`data_s`) is apart. measured_s: inside kept windows.
        stopped: why the search ended, one sentence.
        wait_s: seconds spent waiting for a quiet device, not in `elapsed_s`.
        page_cache: see `Measurement`.
        allow_busy: windows count in which others used the cores.
        tie: what the winner was preferred to although nothing showed it to be faster, one sentence.
        dropped: finalists that are out, with the reason, by trial number.
        ledger: where the seconds of all launches went.
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
    wait_s: float = 0.0
    page_cache: str | None = None
    allow_busy: bool = False
    finalists: tuple[Standing, ...] = ()
    tie: str | None = None
    dropped: dict[int, str] = Field(default_factory=dict)
    bottlenecks: tuple[Bottleneck, ...] = ()
    checks: tuple[TrainVerdict, ...] = ()
    hold: HoldVerdict | None = None
    ablation: tuple[KnobPart, ...] = ()
    ledger: tuple[LedgerRow, ...] = ()
