"""The measured figures that can be required, ranked and drawn, each with its name, its unit and its better side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.base.records.goal import Goal
from autotune.base.records.measurement import Measurement


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
