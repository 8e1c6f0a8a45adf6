"""Searches without a device: recorded launches (a surface), which `run` replays in virtual time.

A surface is the measured space of one workload on one machine, stored as JSON lines. The first line is a `Heading`,
every other line a `Row`, one recorded launch. Lines are only ever appended. Field names carry their units (``_s``,
``_bytes``, ``_per_s``: samples per second); unknown values are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from autotune.base.errors import UsageError
from autotune.base.files import read_regular
from autotune.base.records import (
    Config,
    LaunchKind,
    Measurement,
    MeasurePlan,
    Phase,
    Record,
    Side,
    TrialStatus,
    Turn,
    Value,
    Window,
)
from autotune.knobs.num_workers import workers_of
from autotune.space import Choice, Space, delivery_part, device_part, key
from autotune.stats import Rate

#: The part of a configuration that each side of a training depends on.
PARTS: Mapping[Side, Callable[[Config], dict[str, Value]]] = {"device": device_part, "loader": delivery_part}


class ShownEntrant(Record):
    """What a heat showed of one configuration.

    Attributes:
        config: the part of the configuration that the heat's side depends on.
        status, cause, cannot_compile: how it ended. An entrant of a recorded heat never drops out for being slow.
        turns: ``(steps, samples, seconds)`` of its turn in each round; ``None`` if other processes disturbed the turn,
            or if the entrant was out.
    """

    config: dict[str, Value]
    status: TrialStatus
    cause: str | None = None
    cannot_compile: bool = False
    first_step_s: float | None = None
    peak_bytes: int | None = None
    turns: tuple[tuple[int, int, float] | None, ...] = ()

    def turn(self, number: int) -> Turn | None:
        """Return the turn of a round; ``None`` if there was none."""
        turn = self.turns[number] if number < len(self.turns) else None
        return None if turn is None else Turn(steps=turn[0], samples=turn[1], seconds=turn[2])


class Row(Record):
    """One launch.

    Attributes:
        number: in chronological order, from 0. began_s: seconds since the first launch began.
        kind: ``measure``, ``device_only``, ``loader_only`` or ``heat``.
        reference: a periodic launch of the baseline, which shows the machine's drift.
        config: the launched configuration; for the two ceilings and a heat's reference, the part that they depend on.
        side, entrants: of a heat. between_s: seconds of the heat spent outside its start, its turns and first steps.
        status, phase, cause: how and where it ended.
        wall_s: seconds of the whole launch; phase_s: seconds of each phase entered.
        cache_warm: inductor found the launch's graphs in its cache.
        rate_per_s, low_per_s, high_per_s: the rate and its 95 % interval from the launch's own windows;
            relative_se, degrees: the standard error of the rate's logarithm, and its degrees of freedom.
        steady_per_s: the rate without epoch turns.
        loader_per_s: the rate that the loader could deliver; device_per_s: the rate of the device's work alone.
        wait_fraction: fraction of the steps' time spent waiting for the loader.
        peak_bytes: device memory reserved by the allocator; on a CPU, growth of the process's resident memory.
        compile_s: seconds of the first step. warmup_s: seconds from there to the first kept window.
        windows: ``(steps, samples, seconds)`` of the kept windows, in order.
    """

    number: int
    began_s: float
    kind: LaunchKind = LaunchKind.MEASURE
    reference: bool = False
    config: dict[str, Value]
    status: TrialStatus
    phase: Phase | None = None
    cause: str | None = None
    wall_s: float
    phase_s: dict[str, float]
    cache_warm: bool | None = None
    rate_per_s: float | None = None
    low_per_s: float | None = None
    high_per_s: float | None = None
    relative_se: float | None = None
    degrees: float | None = None
    steady_per_s: float | None = None
    loader_per_s: float | None = None
    device_per_s: float | None = None
    wait_fraction: float | None = None
    peak_bytes: int | None = None
    startup_s: float | None = None
    compile_s: float | None = None
    warmup_s: float | None = None
    measured_s: float | None = None
    epoch_turn_s: float | None = None
    epoch_samples: int | None = None
    settled: bool | None = None
    windows: tuple[tuple[int, int, float], ...] = ()
    side: Side | None = None
    entrants: tuple[ShownEntrant, ...] = ()
    between_s: float | None = None

    @cached_property
    def shown(self) -> Mapping[str, ShownEntrant]:
        """The entrants of a heat, by the key of their part of the configuration."""
        return {key(entrant.config): entrant for entrant in self.entrants}

    @cached_property
    def rounds(self) -> int:
        """Number of rounds of a heat."""
        return max((len(entrant.turns) for entrant in self.entrants), default=0)

    @cached_property
    def between_each_s(self) -> float:
        """Average seconds before each turn of a heat, spent switching, or starting and ending workers."""
        complete = [e for e in self.entrants if e.status is TrialStatus.COMPLETE]
        failed = [e for e in self.entrants if e.status is not TrialStatus.COMPLETE]
        # An entrant that fails does so in one more turn, which is not recorded in the row.
        taken = sum(len(e.turns) for e in complete) + sum(1 + sum(map(bool, e.turns)) for e in failed)
        return (self.between_s or 0.0) / max(1, taken)

    @cached_property
    def timed(self) -> tuple[Window, ...]:
        """The kept windows."""
        return tuple(Window(steps=n, samples=m, seconds=s) for n, m, s in self.windows)

    def measurement(self, rate: Rate | None = None, windows: tuple[Window, ...] | None = None) -> Measurement | None:
        """Return the row's measurement, without per-step data; ``None`` if the launch measured nothing.

        Args:
            rate, windows: replace the recorded ones, if the launch was ended early.
        """
        if self.rate_per_s is None or self.low_per_s is None or self.high_per_s is None:
            return None
        recorded = Rate(self.rate_per_s, self.low_per_s, self.high_per_s, self.relative_se, self.degrees)
        shown = rate or recorded
        return Measurement(
            batch_size=int(self.config["batch_size"]),
            samples_per_s=shown.per_s,
            ci95_per_s=(shown.low_per_s, shown.high_per_s),
            steady_per_s=rate.per_s if rate else self.steady_per_s or self.rate_per_s,
            windows=self.timed if windows is None else windows,
            step_s=(),
            wait_s=(),
            device_s=(),
            loader_capacity_per_s=self.loader_per_s,
            device_per_s=self.device_per_s,
            settled=self.settled is not False,
            relative_se=shown.relative_se,
            degrees=shown.degrees,
            startup_s=self.startup_s or 0.0,
            compile_s=self.compile_s or 0.0,
            compile_cache_warm=self.cache_warm,
            warmup_s=self.warmup_s or 0.0,
            measured_s=self.measured_s or 0.0,
            loader_wait_fraction=self.wait_fraction,
            epoch_turn_s=self.epoch_turn_s,
            epoch_samples=self.epoch_samples or 1,
            peak_allocated_bytes=self.peak_bytes,
        )


#: Larger than the file of any measured space.
_MOST_BYTES = 2**28
#: Version of the file format. Version 1 had no heats.
SURFACE_VERSION = 2
K = TypeVar("K")


class Heading(Record):
    """The first line of a surface.

    Attributes:
        surface: the version of the format.
        name, workload: the surface's display name, and what was trained.
        made: ``recorded`` on a machine, or ``generated`` from formulas. Results of the two are never mixed.
        machine: one line that gives the machine, its versions and the date.
        device: its contract name. batch_size, image_size: the baseline's.
        memory_bytes: device memory available to a launch; ``None``: more than any launch needed.
        plan: how each launch measured.
        knobs: the values of each active knob that occur. Some combinations of them may not have been launched.
        baseline: the configuration of trial 0.
    """

    surface: int = SURFACE_VERSION
    name: str
    made: str = "recorded"
    machine: str
    workload: str
    device: str
    batch_size: int
    image_size: int | None = None
    memory_bytes: int | None = None
    plan: MeasurePlan
    knobs: dict[str, tuple[Value, ...]]
    baseline: dict[str, Value]


@dataclass(frozen=True)
class Surface:
    """A surface, as read from its file."""

    heading: Heading
    rows: tuple[Row, ...]

    @cached_property
    def launches(self) -> Mapping[str, tuple[Row, ...]]:
        """The measure launches of each configuration key, in chronological order."""
        return _grouped((key(r.config), r) for r in self.rows if r.kind is LaunchKind.MEASURE)

    @cached_property
    def ceilings(self) -> Mapping[tuple[LaunchKind, str], tuple[Row, ...]]:
        """The device-only and loader-only launches, by kind and the key of the part of the configuration they use."""
        rows = [r for r in self.rows if r.kind in (LaunchKind.DEVICE_ONLY, LaunchKind.LOADER_ONLY)]
        return _grouped(((r.kind, key(r.config)), r) for r in rows)

    @cached_property
    def heats(self) -> Mapping[Side, tuple[Row, ...]]:
        """The heats of each side that completed."""
        return _grouped((r.side, r) for r in self.rows if r.side is not None and r.status is TrialStatus.COMPLETE)

    @cached_property
    def has_heats(self) -> bool:
        """Whether heats were recorded for each side that has something to compare."""
        configs = [r.config for r in self.rows if r.kind is LaunchKind.MEASURE]
        varied: dict[Side, int] = {
            "device": len({key(device_part(config)) for config in configs}),
            "loader": len({workers_of(config) for config in configs}),
        }
        return bool(self.heats) and all(side in self.heats for side, count in varied.items() if count > 1)

    @cached_property
    def failed(self) -> Mapping[str, Row]:
        """A failed launch of each device part with which no launch succeeded, by the key of the part."""
        groups = _grouped((key(device_part(r.config)), r) for r in self.rows if r.kind is LaunchKind.MEASURE)
        return {name: rows[0] for name, rows in groups.items() if not any(r.rate_per_s for r in rows)}

    @cached_property
    def compile_seconds(self) -> Mapping[tuple[str, bool], tuple[float, ...]]:
        """Seconds of the first step, by graph (the key of its device part) and whether the cache was warm."""
        seconds: dict[tuple[str, bool], tuple[float, ...]] = {}
        for row in self.rows:
            if row.cache_warm is not None and row.compile_s is not None and row.kind is not LaunchKind.LOADER_ONLY:
                name = (key(device_part(row.config)), row.cache_warm)
                seconds[name] = (*seconds.get(name, ()), row.compile_s)
        return seconds

    @cached_property
    def space(self) -> Space:
        """The space that a search may explore: the configurations that were launched."""
        heading = self.heading
        choices = {name: tuple(Choice(v) for v in values) for name, values in heading.knobs.items()}
        return Space(choices=choices, inactive={}, baseline=heading.baseline, only=frozenset(self.launches))


def _grouped(pairs: Iterable[tuple[K, Row]]) -> dict[K, tuple[Row, ...]]:
    groups: dict[K, tuple[Row, ...]] = {}
    for name, row in pairs:
        groups[name] = (*groups.get(name, ()), row)
    return groups


def read_surface(path: Path) -> Surface:
    """Read a surface. An incomplete last line is ignored.

    Raises:
        UsageError: the file does not exist, or is not a surface.
    """
    try:
        text = read_regular(path, _MOST_BYTES, follow=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    first, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
    try:
        heading = Heading.model_validate_json(first)
        rows = tuple(Row.model_validate_json(line) for line in lines)
    except ValidationError as error:
        details = error.errors()[0]
        where = ".".join(str(part) for part in details["loc"])
        raise UsageError(
            f"{path} is no surface: {where or 'its first line'}: {details['msg']}",
            advice="`python -m benchmarks.surfaces record` makes one; benchmarks/README.md describes the format.",
        ) from error
    surface = Surface(heading, rows)
    if key(heading.baseline) not in surface.launches:
        raise UsageError(f"{path} holds no launch of its baseline", advice="record it to its end.")
    return surface
