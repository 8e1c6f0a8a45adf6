"""What a launch has measured, figures of it, and goals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import Field

from autotune.base.records.base import Record


class Surroundings(Record):
    """The machine's activity around a window. ``None`` means unknown, never zero.

    Attributes:
        foreign_cores: CPU time other processes used on our cores, in cores (including time stolen by a hypervisor).
        idle_cores: unused CPU time, in cores.
        stops: how often the process that was measured was stopped and continued (SIGSTOP, SIGCONT).
        foreign_processes: number of compute processes on the card that are not ours.
        foreign_sm_percent: time in which other processes used the card's SMs, in per cent, all of them together.
            Of several cards, both are of the one that others disturb most.
        sm_clock_mhz: of the card, during the window's last step; of several, the lowest.
        memory_clock_mhz, temperature_c, power_w: of the card, at the window's end; of several, the lowest clock, the
            highest temperature, the sum of powers.
        clocks_event_reasons: NVML's bit mask of what held the clocks down, at the window's end; of any of several.
    """

    foreign_cores: float | None = None
    idle_cores: float | None = None
    stops: int | None = None
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


#: A training waits for the hand-over of its batches if that takes more than this fraction of a step.
HANDS_OVER = 0.1


class Measurement(Record):
    """The measurement of one launch after its warm-up. device_only and loader_only launches fill it in too; the work
    they skip (waiting for a loader, work on a device) takes zero seconds.

    Of several ranks, rates and samples are those of all together, times and losses those of the first, and the peak is
    that of the rank with the highest.

    Attributes:
        counts: what is counted as samples: ``samples``, or ``steps`` of a script that tells nothing of its samples.
        samples_per_s: the rate a training will see: the steady rate, including one epoch turn per `epoch_samples`
            samples.
        ci95_per_s: its 95 % interval ``(low, high)``.
        steady_per_s: the rate inside the windows alone.
        windows: the kept windows, in order.
        samples_per_step: of a kept step, on the average; ``None`` in measurements of older versions.
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
        cold_per_s: rate of a first epoch, whose files are in no cache yet. No launch knows it of itself: it is filled
            in where launches of its own have measured it.
        energy_j: energy used during the kept windows: by the card, from its own counter, or by all cards of several
            ranks; of a training on the CPU, by the processors and their memory, from theirs (RAPL), whatever ran there.
        sm_clock_mhz: median of the card's clock over the kept windows; ``None`` also where it waited for the loader.
        alloc_retries: number of times CUDA's allocator had to free its cache and retry, since the first step.
        enqueue_s: CUDA: median host time to enqueue a step. If it is as long as the step, the host is the bottleneck.
        startup_s: from the launch to the first step: the workload's import, data set, model, first batch. Excludes the
            import of torch, which the template has done.
        compile_s: the first step; `compile_cache_warm` says whether inductor found all its graphs in its cache.
        recompiles: graphs that were compiled after the first step; ``None`` if nothing is compiled.
        warmup_s: from the first step's end to the first kept window.
        measured_s: seconds inside the kept windows.
        hand_over_fraction: of that, the part spent waiting for batches that a worker had made already: until the
            training's process had received them and, with pinned memory, copied them; ``None`` if nothing tells.
        even_steps: as many of a script's steps in a row take about as long as any others; ``None`` if none do.
        loader_wait_fraction: fraction of the kept steps' time spent waiting for the loader, 0 to 1; ``None`` if nothing
            tells.
        ranks: processes that trained together.
        rank_wait_fractions: the same for each rank of several; ``None`` for one that did not tell.
        backwards_per_batch, updates_per_batch: of a script, backward passes and steps of its optimizers for each batch
            that its loader has delivered, with those that a gradient scaler has left out because of an overflow;
            ``None`` if that was not seen.
        epoch_turn_s: extra seconds between two epochs; ``None`` if not measured because it is negligible.
        peak_allocated_bytes: CUDA: the allocator's peak since the first step, in which kernels are tried whose
            workspaces no later step needs. CPU: growth of the process's peak resident memory.
        peak_reserved_bytes: the same for reserved memory, CUDA only.
        host_memory_bytes: memory of the process tree right after the last window, counting each shared page once.
    """

    batch_size: int
    counts: str = "samples"
    samples_per_s: float
    ci95_per_s: tuple[float, float]
    steady_per_s: float
    windows: tuple[Window, ...]
    samples_per_step: float | None = None
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
    cold_per_s: float | None = None
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
    hand_over_fraction: float | None = None
    even_steps: int | None = 1
    ranks: int = 1
    rank_wait_fractions: tuple[float | None, ...] = ()
    backwards_per_batch: float | None = None
    updates_per_batch: float | None = None
    epoch_turn_s: float | None = None
    epoch_samples: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    host_memory_bytes: int | None = None

    @property
    def mean_step_s(self) -> float:
        """Mean duration of a step at the steady rate, in seconds."""
        return self.batch_size * self.ranks / self.steady_per_s

    @property
    def waits_for_hand_over(self) -> bool:
        """Whether it is the hand-over of batches that limits the loader, not the making of them."""
        handed, waited = self.hand_over_fraction or 0.0, self.loader_wait_fraction or 0.0
        return handed > HANDS_OVER and handed > waited / 2

    @property
    def unit(self) -> str:
        """The unit of its rates."""
        return f"{self.counts}/s"

    @property
    def peak_bytes(self) -> int | None:
        """Peak device memory: reserved by the allocator on CUDA, growth of the process on a CPU."""
        return self.peak_reserved_bytes or self.peak_allocated_bytes

    @property
    def per_batch(self) -> tuple[float, float] | None:
        """Backward passes and updates for each batch of a script; ``None`` if that was not seen."""
        found = self.backwards_per_batch, self.updates_per_batch
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    @property
    def power_w(self) -> float | None:
        """Mean power during the kept windows; ``None`` without an energy counter."""
        return self.energy_j / self.measured_s if self.energy_j and self.measured_s else None

    @property
    def joules_per_sample(self) -> float | None:
        """Energy for a sample at the steady rate; ``None`` without an energy counter."""
        return None if self.power_w is None else self.power_w / self.steady_per_s


# What the user's training is to be, as far as it was stated: how long, and on a machine of what price.

#: What an objective may need to be stated, and how it is.
NEEDS = {
    "length": "how long the training is was not stated: --epochs N or --samples N",
    "price_per_hour": "what an hour of the machine costs was not stated: --price-per-hour PRICE",
}


def training_s(
    samples: int, *, epoch_samples: int | None, start_s: float, per_s: float, cold_per_s: float | None
) -> float:
    """Return the seconds of a training: its start, a first epoch from files in no cache, and the rest.

    Args:
        epoch_samples: of one epoch; ``None`` or 0 if not known. start_s: from the launch to the end of the first step.
        per_s: samples per second. cold_per_s: in the first epoch; ``None`` if that was not measured.
    """
    first = min(samples, epoch_samples or 0)
    return start_s + first / min(per_s, cold_per_s or per_s) + (samples - first) / per_s


class NotScored(ValueError):
    """A measurement cannot be scored, for want of a figure or of something to be stated; the text says which."""


class Goal(Record):
    """The length and the price of a training. The methods raise `NotScored` if they need what was not stated.

    Attributes:
        epochs, samples: how much it reads in all, in one unit or the other.
        price_per_hour: of the machine, in the user's currency.
    """

    epochs: int | None = Field(default=None, gt=0)
    samples: int | None = Field(default=None, gt=0)
    price_per_hour: float | None = Field(default=None, gt=0)

    @property
    def has_length(self) -> bool:
        """Whether it is stated how long the training is."""
        return self.epochs is not None or self.samples is not None

    def lacks(self, needs: Iterable[str]) -> str | None:
        """Return what is missing of `NEEDS`, in one sentence; ``None`` if nothing is."""
        stated = {"length": self.has_length, "price_per_hour": self.price_per_hour is not None}
        return next((NEEDS[name] for name in needs if not stated[name]), None)

    def samples_of(self, measurement: Measurement) -> int:
        """Return the number of samples that the training reads."""
        if self.samples is not None:
            return self.samples
        if self.epochs is None:
            raise NotScored(NEEDS["length"])
        if not measurement.epoch_samples:
            raise NotScored("how many samples an epoch has is not known: state --samples N instead of --epochs")
        return self.epochs * measurement.epoch_samples

    def seconds_of(self, measurement: Measurement) -> float:
        """Return the seconds that the training takes: start-up, the first step with its compiling, the first epoch, and
        the rest at the measured rate, which includes the turns of epochs.

        The first epoch is that of files in no cache, if its rate is known.
        """
        return training_s(
            self.samples_of(measurement),
            epoch_samples=measurement.epoch_samples,
            start_s=measurement.startup_s + measurement.compile_s,
            per_s=measurement.samples_per_s,
            cold_per_s=measurement.cold_per_s,
        )

    def cost_of(self, measurement: Measurement) -> float:
        """Return what the training costs, or a million samples of it if its length was not stated."""
        if self.price_per_hour is None:
            raise NotScored(NEEDS["price_per_hour"])
        seconds = self.seconds_of(measurement) if self.has_length else 1e6 / measurement.samples_per_s
        return self.price_per_hour * seconds / 3600


# The measured figures that can be required, ranked and drawn, each with its name, its unit and its better side.


@dataclass(frozen=True)
class Figure:
    """One figure of a measurement.

    Attributes:
        about: a few words. unit: ``samples/s``, ``bytes``, ``s``, ``J``, ``W``, ``fraction`` or ``money``.
        of: returns the figure; ``None`` if the launch did not measure it. Raises `NotScored` if it needs what was not
            stated of the training.
        more_is_better: of two values the larger is preferred.
        largest: over several launches the largest counts, not the mean.
    """

    name: str
    about: str
    unit: str
    of: Callable[[Measurement, Goal], float | None]
    more_is_better: bool = False
    largest: bool = False


FIGURES = {
    figure.name: figure
    for figure in (
        Figure("throughput", "rate of the training", "samples/s", lambda m, _: m.samples_per_s, more_is_better=True),
        Figure("peak_memory", "peak of device memory", "bytes", lambda m, _: m.peak_bytes, largest=True),
        Figure("host_memory", "memory of all processes", "bytes", lambda m, _: m.host_memory_bytes, largest=True),
        Figure("compile_time", "first step, compiling included", "s", lambda m, _: m.compile_s),
        Figure("startup_time", "from the launch to the first step", "s", lambda m, _: m.startup_s),
        Figure(
            "loader_wait", "part of a step that waits for the loader", "fraction", lambda m, _: m.loader_wait_fraction
        ),
        Figure("epoch_turn", "extra time between two epochs", "s", lambda m, _: m.epoch_turn_s),
        Figure("energy_per_sample", "energy of a sample", "J", lambda m, _: m.joules_per_sample),
        Figure("power", "mean power", "W", lambda m, _: m.power_w),
        Figure("training_time", "the whole training", "s", lambda m, goal: goal.seconds_of(m)),
        Figure("cost", "the whole training, or a million samples", "money", lambda m, goal: goal.cost_of(m)),
    )
}
#: Shorter names, for typing.
SHORT = {"memory": "peak_memory", "rate": "throughput", "energy": "energy_per_sample", "time": "training_time"}
