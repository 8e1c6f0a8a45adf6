"""The request, the memory and the outcome of a study."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from autotune.records.base import SCHEMA_VERSION, Record, Value
from autotune.records.goal import Goal
from autotune.records.launch import CommandRef, SlowStore
from autotune.records.proof import Bottleneck, HoldVerdict, KnobPart, TrainVerdict
from autotune.records.result import TrialResult

#: The largest whole number in a request or a profile: torch takes no larger seed, and SQLite stores no larger number.
LARGEST = 2**63 - 1
#: The largest side of an image: memory grows with the square, and no network trains on larger ones.
LARGEST_IMAGE = 2**14


class StudySpec(Record):
    """A request for a search, stored in ``study.yaml``. Resuming reads it back and repeats the request.

    Attributes:
        mark: unique to the request. The mark of the study's processes begins with it.
        device: ``auto`` or a contract name. devices: several, on which trials run side by side, as they were typed.
        on: the cluster on whose nodes launches run: ``ray://HOST:PORT``, or ``ray`` for the one of this machine;
            ``None``: here. on_resources: what each worker asks for there.
        workers: how many work there at most; of a study with a `storage`, how many devices at once, this machine's and
            those of ``autotune work``.
        command: the script to tune as it stands; ``None`` for a workload. `model` is then what it is called.
        samples_per_step: of a script, where they cannot be seen; ``None``: as its loader tells.
        flags, output_flag, scratch: of a script, ``--map`` and where it writes; see `CommandRef`.
        rate, rate_file: of a program that tells its own rate; see `CommandRef`.
        data: the value of ``--data``. store_latency_s, store_bytes_per_s: of a slow store that is put in front of it;
            store_cache_bytes: of a cache in front of that. epochs: how many of them the training has, if stated.
        samples: how many it reads in all, if that is stated instead. price_per_hour: of the machine, in the user's
            currency.
        storage: of the study, the address of a database that several machines share, without a password; ``None``: in
            its own folder.
        allow_busy: keep windows in which other processes used the cores or the card.
        keep_batch_size: search at the baseline's batch size only.
        global_batch: samples of an optimizer's step, of all ranks together, which are the batch then; `batch_size` is
            how many of them go through the model at once in the baseline.
        ranks: how many processes train together. The batch size is each one's.
        objective: one, or several with commas between them. require: what the winner must meet, each as
            ``FIGURE<=VALUE``.
        narrowed, fixed, baseline: ``--set``, ``--fix``, ``--baseline``, with the values as text.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    mark: str
    created: str
    model: str
    command: CommandRef | None = None
    samples_per_step: int | None = Field(default=None, gt=0)
    flags: dict[str, str] = Field(default_factory=dict)
    output_flag: str | None = None
    scratch: bool = False
    rate: str | None = None
    rate_file: str | None = None
    args: dict[str, str] = Field(default_factory=dict)
    data: str = "generated"
    store_latency_s: float | None = Field(default=None, gt=0)
    store_bytes_per_s: int | None = Field(default=None, gt=0, le=LARGEST)
    store_cache_bytes: int | None = Field(default=None, gt=0, le=LARGEST)
    epochs: int | None = Field(default=None, gt=0, le=10**6)
    samples: int | None = Field(default=None, gt=0, le=LARGEST)
    price_per_hour: float | None = Field(default=None, gt=0, le=10**6)
    objective: str = "throughput"
    require: tuple[str, ...] = ()
    device: str = "auto"
    devices: str | None = None
    on: str | None = None
    on_resources: dict[str, str] = Field(default_factory=dict)
    workers: int | None = Field(default=None, gt=0, le=2**10)
    batch_size: int | None = Field(default=None, gt=0, le=LARGEST)
    image_size: int | None = Field(default=None, gt=0, le=LARGEST_IMAGE)
    budget_s: float = Field(default=600.0, gt=0)
    trials: int | None = Field(default=None, gt=0, le=LARGEST)
    sampler: str = "auto"
    seed: int = Field(default=0, ge=0, le=LARGEST)
    memory_limit_bytes: int | None = Field(default=None, gt=0, le=LARGEST)
    allow_busy: bool = False
    keep_batch_size: bool = False
    global_batch: int | None = Field(default=None, gt=0, le=LARGEST)
    ranks: int = Field(default=1, gt=0, le=2**10)
    storage: str | None = None
    narrowed: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    fixed: dict[str, str] = Field(default_factory=dict)
    baseline: dict[str, str] = Field(default_factory=dict)

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names or files of the objectives; the first chooses the winner."""
        return tuple(self.objective.split(","))

    @property
    def rank_batch(self) -> int | None:
        """A rank's part of the global batch, if that is stated."""
        return None if self.global_batch is None else self.global_batch // self.ranks

    @property
    def goal(self) -> Goal:
        """What the training is to be."""
        return Goal(epochs=self.epochs, samples=self.samples, price_per_hour=self.price_per_hour)

    @property
    def script(self) -> CommandRef | None:
        """The command with all that options say of it; ``None`` for a workload."""
        told = ("samples_per_step", "flags", "output_flag", "scratch", "rate", "rate_file")
        return (
            None
            if self.command is None
            else self.command.model_copy(update={name: getattr(self, name) for name in told})
        )

    @property
    def store(self) -> SlowStore | None:
        """The slow store in front of the data; ``None`` if there is to be none."""
        told = {"latency_s": self.store_latency_s, "bytes_per_s": self.store_bytes_per_s}
        given = {name: value for name, value in told.items() if value is not None}
        return SlowStore(**given) if given else None


class Prediction(Record):
    """The sampler's expectation of a trial before it began.

    Attributes:
        rate_per_s: in the objective's unit, if that is not a rate. seconds: duration of the whole trial.
        peak_bytes: of device memory; ``None`` if it could not be predicted.
        why: a few words on why the trial was proposed.
    """

    rate_per_s: float
    seconds: float
    peak_bytes: float | None = None
    why: str = ""


class Trial(Record):
    """One finished trial, as the search stores it.

    Attributes:
        predicted: ``None`` if the proposer had no particular expectation.
        result: its measurement omits the per-step tuples; those are in the trial's folder.
        score: the objective's; only for a complete trial. further: those of further objectives.
    """

    number: int
    config: dict[str, Value]
    result: TrialResult
    score: float | None = None
    further: tuple[float, ...] = ()
    repeats: int | None = None
    predicted: Prediction | None = None

    @property
    def rate_per_s(self) -> float | None:
        """Samples per second: measured if complete, observed if pruned."""
        measurement = self.result.measurement
        return measurement.samples_per_s if measurement else self.result.rate_seen_per_s


class Standing(Record):
    """One configuration with its verified or measured performance.

    Attributes:
        launches: number of independent launches that the figures are based on.
        verified: the launches were made after the search, interleaved with the baseline's. Otherwise the figure is the
            trial's own, which is too high on average because the trial was selected for it.
        speedup: over the baseline, with its 95 % interval.
        score: the objective's, averaged over the launches.
        compile_s, startup_s, epoch_turn_s, loader_wait_fraction: medians over the launches.
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
        purpose: ``probing``, ``searching``, ``checking that it trains``, ``verifying``, ``holding``, ``ceilings``,
            ``ablation``, ``between launches`` (sampler, storage, scoring, our own code).
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
    #: Nothing that was tried is better than the baseline by an amount that matters.
    KEEP = "keep"
    #: No verdict: too little was measured, or something may be better and was not shown to be.
    OPEN = "open"


class Edge(Record):
    """A knob whose value in the winner is the largest that was offered, so that a larger one may be faster still.

    Attributes:
        beyond: larger values to try. command: the command that searches them.
    """

    knob: str
    value: Value
    beyond: tuple[Value, ...]
    command: str


class LeftFiles(Record):
    """Files of the folder in which a script runs that are new or changed since its search began.

    Attributes:
        names: of the largest, relative to `folder`. number, size_bytes: of all that were looked at.
    """

    folder: str
    names: tuple[str, ...]
    number: int = Field(gt=0)
    size_bytes: int


class Outcome(Record):
    """A finished search. ``--json`` prints it; ``outcome.json`` stores it.

    Attributes:
        state: ``done``.
        finding: ``None`` in outcomes of older versions; see `found`.
        because, advice: why there is no verdict, and what to do about it, one sentence each.
        again: without a verdict, the command of a search with three times the budget.
        profile: path of the profile; ``None`` if there is no verdict.
        folder: of the study; empty in outcomes of older versions.
        keeps_batch_size: only the baseline's batch size was searched.
        command: the script that was tuned; empty for a workload. flags: by which words it sets knobs itself.
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
        edges: knobs whose value in the winner is the largest that was offered.
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
    again: str | None = None
    model: str
    folder: str = ""
    profile: str | None
    objective: str
    keeps_batch_size: bool = False
    command: tuple[str, ...] = ()
    flags: dict[str, str] = Field(default_factory=dict)
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
    edges: tuple[Edge, ...] = ()
    ledger: tuple[LedgerRow, ...] = ()

    @property
    def found(self) -> Finding:
        """The finding, for an outcome of an older version what its intervals show."""
        if self.finding is not None:
            return self.finding
        shown = max(self.best.speedup_ci95[0], self.best_same_batch.speedup_ci95[0]) > 1
        return Finding.FASTER if shown else Finding.KEEP
