"""The results of a launch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from autotune.base.records.base import SCHEMA_VERSION, Phase, Record, TrialStatus, without_former
from autotune.base.records.delivered import Deliveries
from autotune.base.records.facts import Probe
from autotune.base.records.heat import Heat
from autotune.base.records.measurement import Measurement


class TrainCheck(Record):
    """The course of a training from saved weights over saved batches.

    Attributes:
        losses: after each step, up to the first that was not finite (then `finite` is False). A step skipped by
            GradScaler is repeated, and its loss is not included.
        changed: fraction of the trainable tensors that differ from their initial values.
        scaler_skips: number of steps that GradScaler skipped because of an overflow.
        metric: what the workload's own says of the model after these steps; ``None`` if it has none.
        metric_lacks: why it could not be computed, as a clause.
        deliveries: what the loader has delivered, if that was to be noted.
    """

    losses: tuple[float, ...]
    finite: bool
    changed: float
    scaler_skips: int = 0
    metric: float | None = None
    metric_lacks: str | None = None
    deliveries: Deliveries | None = None


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
        phase_s: seconds spent in each phase entered. wall_s: from its beginning, which is at `began_s` of the machine's
            monotonic clock, to its end.
        rank: the rank that the cause refers to, of several.
        error_code: exit code of the autotune error that ended it, if one did.
        cannot_compile: the compilation failed for a reason that is this machine's and not the model's.
        refuses: the knob whose value something in the training refuses, whatever the other knobs.
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
    began_s: float | None = None
    wall_s: float = 0.0
    rank: int = 0
    error_code: int | None = None
    cannot_compile: bool = False
    refuses: str | None = None
    transient: bool = False
    waited_s: float = 0.0
    turn: int | None = None
    samples_drawn: int | None = None
    measurement: Measurement | None = None
    check: TrainCheck | None = None
    hold: Hold | None = None
    heat: Heat | None = None
    probe: Probe | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, data: Any) -> Any:
        return without_former(data)


class Beat(Record):
    """One progress report, written by the child after a step or at the start of a phase.

    Attributes:
        at_s: the child's monotonic clock, which should run like the parent's.
        turn: in a heat, the entrant whose turn it is, as an index.
        disturbed: why the last window does not count, as a clause.
    """

    phase: Phase
    at_s: float | None = None
    step: int = 0
    rate_per_s: float | None = None
    loss: float | None = None
    memory_bytes: int | None = None
    turn: int | None = None
    disturbed: str | None = None
