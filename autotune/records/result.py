"""What a launch reports back."""

from __future__ import annotations

from pydantic import Field

from autotune.records.base import SCHEMA_VERSION, Phase, Record, TrialStatus
from autotune.records.facts import Probe


class Surroundings(Record):
    """What went on around a window. ``None`` is unknown, never zero.

    Attributes:
        foreign_cores: CPU time that others took of the cores allowed, in cores (time stolen by a hypervisor included).
        idle_cores: cores that nobody used.
        foreign_processes: compute processes on the card that are not ours.
        sm_clock_mhz, memory_clock_mhz, temperature_c, power_w: of the card, at the window's end.
        clocks_event_reasons: NVML's bit mask of what held the clocks down, at the window's end.
    """

    foreign_cores: float | None = None
    idle_cores: float | None = None
    foreign_processes: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    clocks_event_reasons: int | None = None


class Window(Record):
    """Consecutive whole steps that are averaged together.

    Attributes:
        steps: how many; samples: how many samples they held; seconds: wall time including loader waits.
        discarded: why it does not count, where it does not.
    """

    steps: int
    samples: int
    seconds: float
    around: Surroundings | None = None
    discarded: str | None = None


class Measurement(Record):
    """What one measure launch saw, after the warm-up was cut. device_only and loader_only launches fill it too; what
    they do not do (waiting for a loader, working on a device) lasts zero seconds in them.

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
        device_per_s: samples per second of the device's work on the kept batches, without the waits between them.
        losses: the loss of each kept step.
        first_losses: the losses of the steps before that, the first step included.
        settled: False when the loader's queue was still draining as warm-up ran out of time, or the step times went
            on changing; `unsettled` says which, one sentence.
        warmup_steps: steps cut from the front, the first one included.
        relative_se: standard error of the rate's logarithm inside this launch, with `degrees` of freedom.
        autocorrelation: between neighbouring windows (lag 1), already accounted for in the interval.
        discarded: windows that do not count, each with its reason.
        page_cache: ``warm`` or ``cold`` for data in files, ``None`` for others.
        energy_j: what the card used during the kept windows, from its own counter.
        alloc_retries: how often CUDA's allocator had to free its cache and try again.
        enqueue_s: CUDA: median host time to enqueue a step. Where it is no less than the step, the host is the limit.
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
    device_per_s: float | None = None
    losses: tuple[float, ...] = ()
    first_losses: tuple[float, ...] = ()
    settled: bool = True
    unsettled: str | None = None
    warmup_steps: int = 0
    relative_se: float | None = None
    degrees: float | None = None
    autocorrelation: float | None = None
    discarded: tuple[Window, ...] = ()
    page_cache: str | None = None
    energy_j: float | None = None
    alloc_retries: int | None = None
    enqueue_s: float | None = None
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

    @property
    def peak_bytes(self) -> int | None:
        """Of device memory: what the allocator had reserved on CUDA, what the process grew by on a CPU."""
        return self.peak_reserved_bytes or self.peak_allocated_bytes


class TrainCheck(Record):
    """How a training went from saved weights over saved batches.

    Attributes:
        losses: after each step, until the first that was not finite (`finite` is False then). A step that GradScaler
            left out is taken again and its loss is not among them.
        changed: fraction of the trainable tensors that differ from where they began.
        scaler_skips: steps that GradScaler left out because of an overflow.
    """

    losses: tuple[float, ...]
    finite: bool
    changed: float
    scaler_skips: int = 0


class Hold(Record):
    """Whether a training stays inside the device's memory.

    Attributes:
        steps, seconds: how long it trained.
        settled: the peak had stopped growing.
        peak_bytes: of everything, evaluation and largest sample included. CUDA: reserved by the allocator.
        capacity_bytes: what the device, or the memory limit, gives.
        alloc_retries: CUDA only.
        evaluated: an evaluation pass was run, and how: ``evaluate`` (the workload's own), ``eval`` (its loss in
            evaluation mode), ``train`` (its loss in training mode, without gradients).
        largest_bytes: of the largest sample met; ``None`` where all samples have one shape.
    """

    steps: int
    seconds: float
    settled: bool
    peak_bytes: int
    capacity_bytes: int
    alloc_retries: int | None = None
    evaluated: str | None = None
    largest_bytes: int | None = None

    @property
    def headroom(self) -> float:
        """Fraction of the capacity that stayed free."""
        return 1 - self.peak_bytes / self.capacity_bytes


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
        transient: it says nothing about the configuration, and may go well another time.
        waited_s: seconds the launch waited for the device to be quiet before it began; not in `wall_s`.
        measurement: of a complete launch; of a pruned one what it had measured until then, where that is a rate.
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
    transient: bool = False
    waited_s: float = 0.0
    measurement: Measurement | None = None
    check: TrainCheck | None = None
    hold: Hold | None = None
    probe: Probe | None = None


class Beat(Record):
    """One sign of progress, written by the child itself (a step writes its own)."""

    phase: Phase
    step: int = 0
    rate_per_s: float | None = None
    loss: float | None = None
    memory_bytes: int | None = None
