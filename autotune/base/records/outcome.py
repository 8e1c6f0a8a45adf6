"""How a search has ended: with an outcome and what its proof shows of the finalists, or with an error."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from autotune.base.records.base import SCHEMA_VERSION, Record, Value
from autotune.base.records.facts import DataVerdict, LeftFiles
from autotune.base.records.launch import Hold


class Limit(StrEnum):
    """The bottleneck of a training's rate."""

    LOADER = "loader-bound"
    DEVICE = "device-bound"
    #: Batches that workers have made wait for the training's process to receive them.
    HAND_OVER = "hand-over-bound"
    #: The host cannot enqueue work as fast as the device does it.
    LAUNCH = "launch-bound"
    #: The device waits while batches are copied to it from memory that it cannot read by itself.
    COPY = "copy-bound"
    #: The ranks wait for each other's gradients.
    COMMUNICATION = "communication-bound"
    BALANCED = "balanced"


class Bottleneck(Record):
    """The bottleneck of a configuration, and the rate it could reach without each limit.

    Attributes:
        device_only_per_s, loader_only_per_s: the two ceilings with their 95 % intervals, in samples per second;
            ``None`` if not measured.
        alone_per_s: several ranks: the device's ceiling if they did not exchange gradients; ``None`` if not measured.
        store_fraction: of the time that its loader takes for a batch, the part in which it waits for files or the
            network; ``None`` if not known.
        local_per_s: the rate to expect if it need not wait for them, as from a copy in memory; ``None`` if they are not
            the limit.
        cold_per_s: the rate of a first epoch, whose files are in no cache yet: that of a store in front of the data, or
            the page cache; ``None`` if not measured, or if later epochs are no faster.
        sentence: the verdict for the user.
    """

    trial: int
    limit: Limit
    samples_per_s: float
    device_only_per_s: tuple[float, float, float] | None = None
    loader_only_per_s: tuple[float, float, float] | None = None
    alone_per_s: tuple[float, float, float] | None = None
    store_fraction: float | None = None
    local_per_s: float | None = None
    cold_per_s: tuple[float, float, float] | None = None
    sentence: str


class KnobPart(Record):
    """The gain of one knob of the winner: its rate over that with the knob at the baseline's value.

    Attributes:
        value, baseline_value: ``None`` if the knob is not active there.
        with_it: knobs that had to be reset together with it, because they have no meaning without it.
        gain: ratio of the rates with its 95 % interval; ``None`` if not measured, with the reason in `why_not`.
        launches: number of launches without the knob; 0 in outcomes of older versions.
        in_heat: both trained in turns in one process, without loading.
    """

    knob: str
    value: Value
    baseline_value: Value | None
    with_it: tuple[str, ...] = ()
    gain: tuple[float, float, float] | None = None
    launches: int = 0
    in_heat: bool = False
    why_not: str | None = None


#: What finalists are compared with in training, if they are workloads.
EAGER_FP32 = "eager fp32"


class TrainVerdict(Record):
    """The verdict on whether a finalist trains like eager fp32 at the user's batch size.

    Attributes:
        trials: the finalists it applies to (they train the same way and differ only in the loader).
        config: what was checked.
        passed: ``None`` if not checked; `reason` says why it failed or was not checked, or in what way it was.
        losses: its curve; reference: that of eager fp32 from the same weights and batches, or of a script as it stands;
        beside: what the reference is called;
        tolerance: the largest accepted mean difference; distance: the observed one. Both leave out the tenth of the
            steps that differ most.
        metric, reference_metric: what the workload's own metric says of both afterwards; ``None`` if it has none.
        differs: it was not passed, and differs from a run of the reference; whether that is much, others would show.
    """

    trials: tuple[int, ...]
    config: dict[str, Value]
    passed: bool | None
    reason: str | None = None
    losses: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()
    beside: str = EAGER_FP32
    tolerance: float | None = None
    distance: float | None = None
    metric: float | None = None
    reference_metric: float | None = None
    differs: bool = False


class HoldVerdict(Record):
    """The verdict on whether the winner stays inside the device's memory, and the rate that the device holds.

    Attributes:
        sustained_per_s: CUDA: samples per second of a training that had gone on for some time, with the turns of epochs
            as in `Measurement.samples_per_s`; ``None`` if not measured.
    """

    trial: int
    passed: bool | None
    reason: str | None = None
    hold: Hold | None = None
    headroom_wanted: float
    sustained_per_s: float | None = None


class Standing(Record):
    """One configuration with its verified or measured performance.

    Attributes:
        launches: number of independent launches that the figures are based on.
        verified: the launches were made after the search, interleaved with the baseline's. Otherwise the figure is the
            trial's own, which is too high on average because the trial was selected for it.
        speedup: over the baseline, with its 95 % interval.
        score: the objective's, averaged over the launches.
        compile_s: of its graphs, with a cold cache. startup_s, epoch_turn_s, loader_wait_fraction: medians over the
            launches.
        peak_memory_bytes: maximum over the launches.
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
    loader_wait_fraction: float | None


class BreakEven(Record):
    """When compiling pays off: the number of steps after which the compiled training overtakes the best eager one."""

    compile_s: float
    eager_config: dict[str, Value]
    eager_samples_per_second: float
    steps: int


class LedgerRow(Record):
    """The time spent on launches of one purpose.

    Attributes:
        purpose: ``probing``, ``searching``, ``checking that it trains``, ``comparing data``, ``verifying``,
            ``holding``, ``ceilings``, ``ablation``, ``between launches`` (sampler, storage, scoring, our own code).
        launches: number of launches; seconds: their total time, of which the other fields are parts: load and build;
            compile, the first step; warm-up; kept windows; the rest (discarded windows, epoch turn, process start and
            exit).
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
    """The error that ended a search without an outcome. Kept in ``failure.json`` until the study is resumed."""

    schema_version: int = SCHEMA_VERSION
    message: str
    advice: str | None = None
    exit_code: int


class Finding(StrEnum):
    """What a finished search found."""

    #: A configuration was shown to be better than the baseline.
    FASTER = "faster"
    #: A configuration is probably faster than the baseline, judging by what could be measured; there was no time for a
    #: proof by separate launches in turns.
    LIKELY = "likely"
    #: Nothing that was tried is better than the baseline by an amount that matters.
    KEEP = "keep"
    #: No verdict: too little was measured, or something may be better and was not shown to be.
    OPEN = "open"


class Edge(Record):
    """A knob whose value in the winner is the largest one offered, so that a larger one may be faster still.

    Attributes:
        beyond: larger values to try. command: the command that searches them.
    """

    knob: str
    value: Value
    beyond: tuple[Value, ...]
    command: str


class Outcome(Record):
    """A finished search. ``--json`` prints it; ``outcome.json`` stores it.

    Attributes:
        state: ``done``.
        finding: ``None`` in outcomes of older versions; see `found`.
        because, advice: why nothing is proven, and what to do about it, one sentence each.
        evidence: what the winner is likely by, as a phrase; ``None`` if it is proven, or if nothing is likely.
        again: if nothing is proven, the command that goes on.
        profile: path of the profile; ``None`` if there is no verdict.
        folder: of the study; empty in outcomes of older versions.
        keeps_batch_size: only the baseline's batch size was searched.
        command: the script that was tuned; empty for a workload. flags: by which words it sets knobs itself.
        counts: what its rates count; see `Measurement`.
        left: what its launches may have left in its folder; ``None`` for nothing. own_folders: options by which they
            had folders of their own.
        speed_only: the workload's knobs that are declared to change only the speed.
        devices: number of devices on which trials ran side by side.
        trials: number of trials by status.
        elapsed_s: budget used, excluding data generation (`data_s`). measured_s: seconds inside kept windows.
        stopped: why the search ended, one sentence.
        wait_s: seconds spent waiting for an idle device, not in `elapsed_s`.
        page_cache: see `Measurement`.
        epochs: that the training is to have, if stated. dataset_samples: of a workload's set, if known. samples_read:
            by all launches together; ``None`` of a script.
        allow_busy: windows in which other processes used the cores or the card were kept.
        ranks: processes that train together. Rates are of all of them, batch sizes each one's.
        require: what the winner had to meet; baseline_unmet: what the baseline does not meet of it, as a clause.
        tie: what the winner was preferred to although it was not shown to be faster, one sentence.
        data: whether the winners' loaders deliver what the baseline's does; empty in outcomes of older versions.
        edges: knobs whose value in the winner is the largest that was offered.
        no_more_workers: why no more workers than the script's own were on offer, a clause, if they were not.
        dropped: eliminated finalists by trial number, with the reason.
        ledger: how the time of all launches was spent.
    """

    def __repr__(self) -> str:
        trials = ", ".join(f"{count} {status}" for status, count in self.trials.items())
        return f"<Outcome of study {self.study}: {self.state}; trials: {trials}; stopped: {self.stopped}>"

    __str__ = __repr__

    schema_version: int = SCHEMA_VERSION
    study: str
    state: str
    finding: Finding | None = None
    because: str | None = None
    advice: str | None = None
    evidence: str | None = None
    again: str | None = None
    model: str
    folder: str = ""
    profile: str | None
    objective: str
    keeps_batch_size: bool = False
    command: tuple[str, ...] = ()
    flags: dict[str, str] = Field(default_factory=dict)
    counts: str = "samples"
    left: LeftFiles | None = None
    own_folders: tuple[str, ...] = ()
    speed_only: tuple[str, ...] = ()
    device: str
    device_name: str
    devices: int = 1
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
    epochs: int | None = None
    dataset_samples: int | None = None
    samples_read: int | None = None
    allow_busy: bool = False
    ranks: int = 1
    finalists: tuple[Standing, ...] = ()
    require: tuple[str, ...] = ()
    baseline_unmet: str | None = None
    tie: str | None = None
    dropped: dict[int, str] = Field(default_factory=dict)
    bottlenecks: tuple[Bottleneck, ...] = ()
    checks: tuple[TrainVerdict, ...] = ()
    hold: HoldVerdict | None = None
    ablation: tuple[KnobPart, ...] = ()
    data: tuple[DataVerdict, ...] = ()
    no_more_workers: str | None = None
    edges: tuple[Edge, ...] = ()
    ledger: tuple[LedgerRow, ...] = ()

    @property
    def unit(self) -> str:
        """The unit of its rates."""
        return f"{self.counts}/s"

    @property
    def found(self) -> Finding:
        """The finding; for an outcome of an older version, what its intervals show."""
        if self.finding is not None:
            return self.finding
        shown = max(self.best.speedup_ci95[0], self.best_same_batch.speedup_ci95[0]) > 1
        return Finding.FASTER if shown else Finding.KEEP
