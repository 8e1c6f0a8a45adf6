"""What a launch is told, and what it reports back."""

from __future__ import annotations

from pydantic import Field

from autotune.records.base import SCHEMA_VERSION, LaunchKind, Phase, Record, TrialStatus, Value
from autotune.records.facts import Probe


class WorkloadRef(Record):
    """Where a workload's code is, without importing it.

    Attributes:
        name: what a person calls it: the catalog name, the file's stem or the object's name.
        path: the file, absolute; ``None`` for a workload named ``package.module:NAME``.
        module: the import name; for a file its stem, imported with the file's folder first on ``sys.path``.
        attribute: the object inside the module, or ``None`` when the module itself is the workload.
        args: ``--arg`` values as text; the workload's own code interprets them.
        sha256: hash of the file and its sibling modules; empty for a named module until the probe fills it.
    """

    name: str
    path: str | None = None
    module: str
    attribute: str | None = None
    args: dict[str, str] = Field(default_factory=dict)
    sha256: str = ""


class DataRef(Record):
    """The data a workload is given.

    Attributes:
        kind: ``generated``, ``folder`` or ``synthetic``.
        path: the folder, absolute; ``None`` where there is none (synthetic, or a workload that makes its own).
        identity: a hash that changes when the data does; part of the fingerprint.
        epoch_samples: the stated length of an epoch in samples, by which an epoch's turn weighs in;
            ``None`` means the dataset's own length.
    """

    kind: str
    path: str | None = None
    identity: str = ""
    epoch_samples: int | None = Field(default=None, gt=0)


class PhaseLimits(Record):
    """Seconds each phase of a launch may take, how long it may stay silent inside a stepping phase, and how long
    it may take in all (``None``: as long as its phases do)."""

    load_s: float = 120.0
    build_s: float = 120.0
    compile_s: float = 600.0
    warmup_s: float = 120.0
    measure_s: float = 120.0
    silence_s: float = 60.0
    total_s: float | None = None

    def of(self, phase: Phase) -> float:
        """The limit of ``phase`` in seconds."""
        return float(getattr(self, f"{phase.value}_s"))


class MeasurePlan(Record):
    """How long to measure.

    Attributes:
        target_halfwidth: stop when the rate's 95 % interval is within this fraction of the rate.
        min_windows: never fewer windows than this.
        min_window_s: a window holds whole steps and lasts at least this long.
        max_measure_s: stop measuring after this many seconds, whatever the interval.
        min_measure_s: measure at least this long; several launches with a floor share one precision.
        warmup_steps: steps discarded at least, after the first.
        max_warmup_s: warm-up ends after this many seconds even if the loader's queue has not settled.
        prune_below_per_s: end as ``pruned`` when the first `prune_after_steps` measured steps run slower
            than this many samples per second; 0 never prunes.
    """

    target_halfwidth: float = 0.02
    min_windows: int = 5
    min_window_s: float = 0.5
    max_measure_s: float = 20.0
    min_measure_s: float = 0.0
    warmup_steps: int = 2
    max_warmup_s: float = 30.0
    prune_below_per_s: float = 0.0
    prune_after_steps: int = 5


class TrialSpec(Record):
    """Everything one child process needs to know. Written to ``spec.json`` before it starts.

    Attributes:
        launch: the launch's name inside the study, also its folder's name.
        number: the Optuna trial's number, ``None`` for launches that are no trials.
        devices: contract names: ``("cpu",)``, ``("cuda:0",)`` or ``("cuda:GPU-<uuid>",)``.
        env: variables the child must see when it is *loaded*; differing from the template's means spawn.
        entry: what is run; ``workload`` is the only one so far.
        memory_limit_bytes: see DESIGN: soft RLIMIT_DATA on a CPU, a fraction of device memory on CUDA.
        repeats: number of the trial this one repeats after a transient failure, if any.
    """

    schema_version: int = SCHEMA_VERSION
    kind: LaunchKind
    launch: str
    number: int | None = None
    folder: str
    workload: WorkloadRef
    data: DataRef
    config: dict[str, Value]
    devices: tuple[str, ...] = ("cpu",)
    ranks: int = 1
    env: dict[str, str] = Field(default_factory=dict)
    entry: str = "workload"
    seed: int = 0
    image_size: int | None = None
    batch_size: int = Field(gt=0)
    worker_start_method: str = "fork"
    memory_limit_bytes: int | None = Field(default=None, gt=0)
    cache_folder: str | None = None
    limits: PhaseLimits = PhaseLimits()
    plan: MeasurePlan = MeasurePlan()
    repeats: int | None = None


class Window(Record):
    """Consecutive whole steps that are averaged together.

    Attributes:
        steps: how many; samples: how many samples they held; seconds: wall time including loader waits.
    """

    steps: int
    samples: int
    seconds: float


class Measurement(Record):
    """What one measure launch saw, after the warm-up was cut.

    Attributes:
        samples_per_s: the rate a training will see: the steady rate, with one epoch turn per
            `epoch_samples` samples weighed in.
        ci95_per_s: its 95 % interval ``(low, high)``.
        steady_per_s: the rate inside the windows alone.
        windows: the kept windows, in order.
        step_s, wait_s, device_s: per kept step: whole step, waiting for the loader, work on the device.
            ``step_s`` is about ``wait_s + device_s`` plus what the loop itself costs.
        loader_capacity_per_s: samples per second the workers could deliver (workers divided by the mean
            time to produce a batch, times the batch); with no workers one over the production time.
        losses: the loss of each kept step.
        first_losses: the losses of the steps before that, the first step included.
        settled: False when the loader's queue was still draining as warm-up ran out of time.
        startup_s: from the launch to the first step: the workload's import, data set, model, first batch. Importing
            torch, which the template has done before, is not in it.
        compile_s: the first step; `compile_cache_warm` says whether inductor's cache had entries before it.
        warmup_s: from the first step's end to the first kept window.
        measured_s: seconds inside the kept windows.
        loader_wait_fraction: the loader's part of the kept steps' time, 0 to 1.
        epoch_turn_s: the extra seconds between two epochs; ``None`` where it was not measured, because so little
            would not show in an epoch's time.
        peak_allocated_bytes: CUDA: the allocator's peak. CPU: growth of the process's peak resident memory.
        peak_reserved_bytes: CUDA only.
        host_memory_bytes: memory of the process tree right after the last window, shared pages split.
    """

    batch_size: int
    samples_per_s: float
    ci95_per_s: tuple[float, float]
    steady_per_s: float
    windows: tuple[Window, ...]
    step_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    device_s: tuple[float, ...]
    loader_capacity_per_s: float | None = None
    losses: tuple[float, ...] = ()
    first_losses: tuple[float, ...] = ()
    settled: bool = True
    startup_s: float
    compile_s: float
    compile_cache_warm: bool | None = None
    warmup_s: float
    measured_s: float
    loader_wait_fraction: float
    epoch_turn_s: float | None = None
    epoch_samples: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    host_memory_bytes: int | None = None


class TrialResult(Record):
    """How a launch ended, with its evidence. Written to ``result.json`` last, atomically.

    Attributes:
        status: exactly one. phase: where it was then.
        cause: one sentence on what happened; ``None`` only when complete.
        advice: what a person could change, if anything.
        exit_code: as the kernel reported it: negative is minus the signal number.
        unclean_exit: the work was reported complete, and the process died afterwards.
        rate_seen_per_s: for ``pruned``: what it ran at.
        peak_bytes: peak device memory seen, for failures (a measurement has its own).
        phase_s: seconds spent in each phase entered.
        rank: which of several ranks the cause names.
        error_code: the exit code of the autotune error that ended it, where it was one.
    """

    schema_version: int = SCHEMA_VERSION
    launch: str
    status: TrialStatus
    phase: Phase | None = None
    cause: str | None = None
    advice: str | None = None
    evidence: str | None = None
    exit_code: int | None = None
    unclean_exit: bool = False
    rate_seen_per_s: float | None = None
    peak_bytes: int | None = None
    phase_s: dict[str, float] = Field(default_factory=dict)
    wall_s: float = 0.0
    rank: int = 0
    error_code: int | None = None
    measurement: Measurement | None = None
    probe: Probe | None = None


class Beat(Record):
    """One sign of progress, written by the child itself (a step writes its own)."""

    phase: Phase
    step: int = 0
    rate_per_s: float | None = None
    loss: float | None = None
    memory_bytes: int | None = None
