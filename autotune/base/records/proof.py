"""What the proof says of a study's finalists: whether they train, hold, what limits them, and what each knob gave."""

from __future__ import annotations

from enum import StrEnum

from autotune.base.records.base import Record, Value
from autotune.base.records.result import Hold


class Limit(StrEnum):
    """The bottleneck of a training's rate."""

    LOADER = "loader-bound"
    DEVICE = "device-bound"
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


#: What finalists train beside, if they are workloads.
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
