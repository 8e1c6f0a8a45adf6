"""The results of a launch."""

from __future__ import annotations

from pydantic import Field

from autotune.records.base import SCHEMA_VERSION, Phase, Record, Side, TrialStatus, Value
from autotune.records.facts import Probe


class Surroundings(Record):
    """The machine's activity around a window. ``None`` means unknown, never zero.

    Attributes:
        foreign_cores: CPU time other processes used on our cores, in cores (including time stolen by a hypervisor).
        idle_cores: unused CPU time, in cores.
        foreign_processes: number of compute processes on the card that are not ours.
        foreign_sm_percent: time in which other processes used the card's SMs, in per cent, all of them together.
        sm_clock_mhz: of the card, during the window's last step.
        memory_clock_mhz, temperature_c, power_w: of the card, at the window's end.
        clocks_event_reasons: NVML's bit mask of what held the clocks down, at the window's end.
    """

    foreign_cores: float | None = None
    idle_cores: float | None = None
    foreign_processes: int | None = None
    foreign_sm_percent: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    clocks_event_reasons: int | None = None


class Window(Record):
    """Consecutive whole steps that are averaged together.

    Attributes:
        steps: number of steps; samples: number of samples in them; seconds: their time including loader waits. On CUDA
            it usually begins at the end of a step that is not counted.
        discarded: why the window does not count; ``None`` if it does.
    """

    steps: int
    samples: int
    seconds: float
    around: Surroundings | None = None
    discarded: str | None = None


class Measurement(Record):
    """The measurement of one launch after its warm-up. device_only and loader_only launches fill it in too; the work
    they skip (waiting for a loader, work on a device) takes zero seconds.

    Attributes:
        samples_per_s: the rate a training will see: the steady rate, including one epoch turn per `epoch_samples`
            samples.
        ci95_per_s: its 95 % interval ``(low, high)``.
        steady_per_s: the rate inside the windows alone.
        windows: the kept windows, in order.
        step_s, wait_s, device_s: per kept step: whole step, wait for the loader, work on the device.
            ``step_s`` is about ``wait_s + device_s`` plus the overhead of the loop.
        loader_capacity_per_s: samples per second the workers could deliver: workers times batch size over the mean time
            to make a batch. Without workers, batch size over that time.
        loader_idle_fraction: of the time in which batches were made, the part in which the processes that made them
            neither ran nor waited for a core: they waited for files or the network. ``None`` if none were made, or
            nothing tells.
        device_per_s: samples per second of the device's work on the kept batches, excluding the waits between them.
        learning_rate: of the optimizer's first group; ``None`` if unknown.
        losses: the loss of each kept step.
        first_losses: the losses of the steps before those, including the first step.
        settled: False if the loader's queue was still draining when warm-up ran out of time, or if the step times kept
            changing; `unsettled` says which, in one sentence.
        warmup_steps: number of steps cut from the front, including the first.
        relative_se: standard error of the rate's logarithm inside this launch, with `degrees` of freedom.
        autocorrelation: between neighbouring windows (lag 1), already accounted for in the interval.
        discarded: windows that do not count, each with its reason.
        page_cache: ``warm``, ``cold``, ``unknown``, or ``None`` for data without files; see `DataRef`.
        energy_j: energy the card used during the kept windows, from its own counter.
        sm_clock_mhz: median of the card's clock over the kept windows; ``None`` also where it waited for the loader.
        alloc_retries: number of times CUDA's allocator had to free its cache and retry, since the first step.
        enqueue_s: CUDA: median host time to enqueue a step. If it is as long as the step, the host is the bottleneck.
        startup_s: from the launch to the first step: the workload's import, data set, model, first batch. Excludes the
            import of torch, which the template has done.
        compile_s: the first step; `compile_cache_warm` says whether inductor found all its graphs in its cache.
        recompiles: graphs that were compiled after the first step; ``None`` if nothing is compiled.
        warmup_s: from the first step's end to the first kept window.
        measured_s: seconds inside the kept windows.
        loader_wait_fraction: fraction of the kept steps' time spent waiting for the loader, 0 to 1; ``None`` if nothing
            tells.
        epoch_turn_s: extra seconds between two epochs; ``None`` if not measured because it is negligible.
        peak_allocated_bytes: CUDA: the allocator's peak since the first step, in which kernels are tried whose
            workspaces no later step needs. CPU: growth of the process's peak resident memory.
        peak_reserved_bytes: the same for reserved memory, CUDA only.
        host_memory_bytes: memory of the process tree right after the last window, counting each shared page once.
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
    loader_idle_fraction: float | None = None
    device_per_s: float | None = None
    learning_rate: float | None = None
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
    sm_clock_mhz: float | None = None
    alloc_retries: int | None = None
    enqueue_s: float | None = None
    startup_s: float
    compile_s: float
    compile_cache_warm: bool | None = None
    recompiles: int | None = None
    warmup_s: float
    measured_s: float
    loader_wait_fraction: float | None
    epoch_turn_s: float | None = None
    epoch_samples: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    host_memory_bytes: int | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Peak device memory: reserved by the allocator on CUDA, growth of the process on a CPU."""
        return self.peak_reserved_bytes or self.peak_allocated_bytes


class TrainCheck(Record):
    """The course of a training from saved weights over saved batches.

    Attributes:
        losses: after each step, up to the first that was not finite (then `finite` is False). A step skipped by
            GradScaler is repeated, and its loss is not included.
        changed: fraction of the trainable tensors that differ from their initial values.
        scaler_skips: number of steps that GradScaler skipped because of an overflow.
        metric: what the workload's own says of the model after these steps; ``None`` if it has none.
    """

    losses: tuple[float, ...]
    finite: bool
    changed: float
    scaler_skips: int = 0
    metric: float | None = None


class Hold(Record):
    """The memory use of a training, compared with the device's memory.

    Attributes:
        steps, seconds: how long it trained.
        settled: the peak had stopped growing.
        peak_bytes: including evaluation and largest sample. CUDA: reserved by the allocator, since the first step.
        first_step_bytes: CUDA: the same up to the end of the first step.
        capacity_bytes: memory that was free on the device, or the memory limit.
        alloc_retries: CUDA only, since the first step.
        evaluated: how the evaluation pass was run, if it was: ``evaluate`` (the workload's own), ``eval`` (its loss in
            evaluation mode), ``train`` (its loss in training mode, without gradients).
        evaluation_per_s: samples per second of the computing in that pass, under ``no_grad``; ``None`` if not timed.
        inference_gain: what ``torch.inference_mode()`` makes of it, as a ratio; ``None`` if it was not timed, or fails.
        largest_bytes: size of the largest sample; ``None`` if all samples have the same shape.
        sustained_per_s: CUDA: samples per second after `seconds` of training, over `sustained_s`, without the turns of
            epochs. sm_clock_mhz: the card's clock at their end.
    """

    steps: int
    seconds: float
    settled: bool
    peak_bytes: int
    first_step_bytes: int | None = None
    capacity_bytes: int
    alloc_retries: int | None = None
    evaluated: str | None = None
    evaluation_per_s: float | None = None
    inference_gain: float | None = None
    largest_bytes: int | None = None
    sustained_per_s: float | None = None
    sustained_s: float = 0.0
    sm_clock_mhz: int | None = None

    @property
    def headroom(self) -> float:
        """Fraction of the capacity that remained free."""
        return 1 - self.peak_bytes / self.capacity_bytes


class Turn(Record):
    """One turn of an entrant: counted steps in a row.

    Attributes:
        seconds: of the counted steps together, on CUDA by the device's clock. samples: in them.
        wait_s: in a script, how long these steps also waited for their loader.
    """

    steps: int
    samples: int
    seconds: float
    wait_s: float | None = None
    around: Surroundings | None = None


class HeatEntrant(Record):
    """What a heat saw of one configuration.

    Attributes:
        status: ``complete``, or ``pruned`` if it dropped out because it was certainly behind; otherwise what it failed
            with. phase, cause, advice: of such a failure.
        turns: for each round, ``None`` where it took none.
        ratio, ratio_ci95: its rate on the heat's side relative to the reference's, and the 95 % interval of that;
            ``None`` without a turn in a round of the reference's.
        first_step_s: its very first step, in which its model is compiled.
        peak_bytes: device memory, its own; on a CPU an upper bound, because the process keeps what others have freed.
    """

    config: dict[str, Value]
    status: TrialStatus = TrialStatus.COMPLETE
    phase: Phase | None = None
    cause: str | None = None
    advice: str | None = None
    cannot_compile: bool = False
    turns: tuple[Turn | None, ...] = ()
    ratio: float | None = None
    ratio_ci95: tuple[float, float] | None = None
    first_step_s: float | None = None
    peak_bytes: int | None = None


class Heat(Record):
    """Several configurations compared within one process. The first entrant is the reference.

    Attributes:
        side: of the training, what was compared.
        noise_sd: standard deviation of the logarithm of one turn's rate, relative to the others of its round.
        switch_s: seconds spent on switching, or on starting and ending loaders. ended: why it ended, in one clause.
    """

    side: Side = "device"
    entrants: tuple[HeatEntrant, ...]
    noise_sd: float
    startup_s: float
    switch_s: float
    measured_s: float
    ended: str

    @property
    def reference(self) -> HeatEntrant:
        """The entrant that ratios are relative to: the first, or the first of those that were left when it failed."""
        return next((e for e in self.entrants if e.ratio is not None), self.entrants[0])


class StudyHeat(Record):
    """A heat of a study.

    Attributes:
        number: counted from 1.
        after: number of trials that had ended when it began.
        wall_s: seconds of its launches together.
    """

    number: int
    after: int
    heat: Heat
    wall_s: float

    @property
    def title(self) -> str:
        """What it is called while it runs."""
        return heat_title(self.number, self.heat.side)


def heat_title(number: int, side: Side) -> str:
    """Return what a heat is called while it runs."""
    return f"heat {number}" if side == "device" else f"heat {number}, of the loader"


class TrialResult(Record):
    """The end of a launch, with its evidence. Written to ``result.json`` last, atomically.

    Attributes:
        status: how it ended. phase: the phase it was in.
        cause: one sentence on what happened; ``None`` only when complete.
        advice: what the user could change, if anything.
        exit_code: as in `os.waitstatus_to_exitcode`: negative for a signal.
        unclean_exit: the launch reported success and the process died afterwards.
        rate_seen_per_s: rate of a ``pruned`` launch.
        peak_bytes: peak device memory seen, for failures (a measurement has its own).
        phase_s: seconds spent in each phase entered.
        rank: the rank that the cause refers to, of several.
        error_code: exit code of the autotune error that ended it, if one did.
        cannot_compile: the compilation failed for a reason that is this machine's and not the model's.
        transient: the failure says nothing about the configuration and may not recur.
        waited_s: seconds the launch waited for the device to become idle before it began; not in `wall_s`.
        turn: of a heat that did not end by itself: whose turn it was, as an index into its entrants.
        samples_drawn: how many samples its loaders have read, or asked for; ``None`` if it could not tell.
        measurement: of a complete launch; of a pruned launch, what it had measured by then, if anything.
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
    cannot_compile: bool = False
    transient: bool = False
    waited_s: float = 0.0
    turn: int | None = None
    samples_drawn: int | None = None
    measurement: Measurement | None = None
    check: TrainCheck | None = None
    hold: Hold | None = None
    heat: Heat | None = None
    probe: Probe | None = None


class Beat(Record):
    """One progress report, written by the child after a step or at the start of a phase.

    Attributes:
        at_s: the child's monotonic clock, which should run like the parent's.
        turn: in a heat, the entrant whose turn it is, as an index.
    """

    phase: Phase
    at_s: float | None = None
    step: int = 0
    rate_per_s: float | None = None
    loss: float | None = None
    memory_bytes: int | None = None
    turn: int | None = None
