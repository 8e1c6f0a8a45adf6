"""How a search has ended: with an outcome, or with an error."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from autotune.base.records.base import SCHEMA_VERSION, Record, Value
from autotune.base.records.delivered import DataVerdict
from autotune.base.records.facts import LeftFiles
from autotune.base.records.proof import Bottleneck, HoldVerdict, KnobPart, TrainVerdict


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
    #: A configuration is likely to be faster than the baseline, by what could be measured; there was no time for a
    #: proof by separate launches in turns.
    LIKELY = "likely"
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
        """The finding, for an outcome of an older version what its intervals show."""
        if self.finding is not None:
            return self.finding
        shown = max(self.best.speedup_ci95[0], self.best_same_batch.speedup_ci95[0]) > 1
        return Finding.FASTER if shown else Finding.KEEP
