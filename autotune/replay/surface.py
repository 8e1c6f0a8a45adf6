"""A surface: the measured space of one workload on one machine, stored as JSON lines.

The first line is a `Heading`, every other line a `Row`, one recorded launch. Lines are only ever appended. Field names
carry their units (``_s``, ``_bytes``, ``_per_s``: samples per second); unknown values are omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from autotune.errors import UsageError
from autotune.files import read_regular
from autotune.records import (
    Config,
    LaunchKind,
    Measurement,
    MeasurePlan,
    Phase,
    Record,
    TrialResult,
    TrialStatus,
    Value,
    Window,
)
from autotune.space import Choice, Space, device_part, key
from autotune.stats import Rate

#: No space that somebody has measured takes more.
_MOST_BYTES = 2**28
#: Version of the file format.
SURFACE_VERSION = 1
K = TypeVar("K")


class Heading(Record):
    """The first line of a surface.

    Attributes:
        surface: the version of the format.
        name, workload: the surface's display name, and what was trained.
        made: ``recorded`` on a machine, or ``generated`` from formulas. Results of the two are never mixed.
        machine: one line with the machine, its versions and the date.
        device: contract name. batch_size, image_size: of the baseline.
        memory_bytes: device memory available to a launch; ``None``: more than any needed.
        plan: how each launch measured.
        knobs: the values of each active knob that occur. Some combinations may not have been launched.
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


class Row(Record):
    """One launch.

    Attributes:
        number: in chronological order, from 0. began_s: seconds since the first launch began.
        kind: ``measure``, ``device_only`` or ``loader_only``.
        reference: a periodic launch of the baseline, which shows the machine's drift.
        config: the launched configuration; for the two ceilings, the part that they depend on.
        status, phase, cause: how and where it ended.
        wall_s: of the whole launch; phase_s: of each phase entered. cache_warm: inductor found its graphs in its cache.
        rate_per_s, low_per_s, high_per_s: the rate and its 95 % interval from the launch's own windows;
            relative_se, degrees: the standard error of its logarithm, and its degrees of freedom.
        steady_per_s: the rate without epoch turns.
        loader_per_s: what the loader could deliver; device_per_s: the rate of the device's work alone.
        wait_fraction: fraction of the steps' time spent waiting for the loader.
        peak_bytes: device memory reserved by the allocator; on a CPU, growth of the process's resident memory.
        compile_s: the first step. warmup_s: from there to the first kept window.
        windows: ``(steps, samples, seconds)`` of the kept ones, in order.
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

    @cached_property
    def timed(self) -> tuple[Window, ...]:
        """The kept windows."""
        return tuple(Window(steps=n, samples=m, seconds=s) for n, m, s in self.windows)

    def measurement(self, rate: Rate | None = None, windows: tuple[Window, ...] | None = None) -> Measurement | None:
        """Return the row's measurement, without per-step data; ``None`` if the launch measured nothing.

        Args:
            rate, windows: replace the recorded ones, for a launch that is ended early.
        """
        if self.rate_per_s is None or self.low_per_s is None or self.high_per_s is None:
            return None
        own = Rate(self.rate_per_s, self.low_per_s, self.high_per_s, self.relative_se, self.degrees)
        seen = rate or own
        return Measurement(
            batch_size=int(self.config["batch_size"]),
            samples_per_s=seen.per_s,
            ci95_per_s=(seen.low_per_s, seen.high_per_s),
            steady_per_s=rate.per_s if rate else self.steady_per_s or self.rate_per_s,
            windows=self.timed if windows is None else windows,
            step_s=(),
            wait_s=(),
            device_s=(),
            loader_capacity_per_s=self.loader_per_s,
            device_per_s=self.device_per_s,
            settled=self.settled is not False,
            relative_se=seen.relative_se,
            degrees=seen.degrees,
            startup_s=self.startup_s or 0.0,
            compile_s=self.compile_s or 0.0,
            compile_cache_warm=self.cache_warm,
            warmup_s=self.warmup_s or 0.0,
            measured_s=self.measured_s or 0.0,
            loader_wait_fraction=self.wait_fraction or 0.0,
            epoch_turn_s=self.epoch_turn_s,
            epoch_samples=self.epoch_samples or 1,
            peak_allocated_bytes=self.peak_bytes,
        )


def row_of(
    result: TrialResult, config: Config, *, kind: LaunchKind, number: int, began_s: float, reference: bool = False
) -> Row:
    """Return the row of a launch."""
    m = result.measurement
    common = {
        "number": number,
        "began_s": round(began_s, 3),
        "kind": kind,
        "reference": reference,
        "config": dict(config),
        "status": result.status,
        "phase": result.phase,
        "cause": result.cause,
        "wall_s": round(result.wall_s, 3),
        "phase_s": {name: round(seconds, 3) for name, seconds in result.phase_s.items()},
        "peak_bytes": result.peak_bytes,
    }
    if m is None:
        return Row.model_validate(common)
    measured = {
        "cache_warm": m.compile_cache_warm,
        "rate_per_s": m.samples_per_s,
        "low_per_s": m.ci95_per_s[0],
        "high_per_s": m.ci95_per_s[1],
        "relative_se": m.relative_se,
        "degrees": m.degrees,
        "steady_per_s": m.steady_per_s,
        "loader_per_s": m.loader_capacity_per_s,
        "device_per_s": m.device_per_s,
        "wait_fraction": m.loader_wait_fraction,
        "peak_bytes": m.peak_bytes,
        "startup_s": m.startup_s,
        "compile_s": m.compile_s,
        "warmup_s": m.warmup_s,
        "measured_s": m.measured_s,
        "epoch_turn_s": m.epoch_turn_s,
        "epoch_samples": m.epoch_samples,
        "settled": m.settled,
        "windows": tuple((w.steps, w.samples, round(w.seconds, 6)) for w in m.windows),
    }
    return Row.model_validate({**common, **{n: _short(v) for n, v in measured.items()}})


def _short(value: object) -> object:
    """Round a float to six significant digits, more than any measurement has."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Surface:
    """A surface as it was read."""

    heading: Heading
    rows: tuple[Row, ...]

    @cached_property
    def launches(self) -> Mapping[str, tuple[Row, ...]]:
        """The measure launches of each configuration key, in chronological order."""
        return _grouped((key(r.config), r) for r in self.rows if r.kind is LaunchKind.MEASURE)

    @cached_property
    def ceilings(self) -> Mapping[tuple[LaunchKind, str], tuple[Row, ...]]:
        """The device-only and loader-only launches, by kind and key of the part of the configuration they depend on."""
        rows = [r for r in self.rows if r.kind is not LaunchKind.MEASURE]
        return _grouped(((r.kind, key(r.config)), r) for r in rows)

    @cached_property
    def compile_seconds(self) -> Mapping[tuple[str, bool], tuple[float, ...]]:
        """Seconds of the first step, by graph (the key of its device part) and whether the cache was warm."""
        found: dict[tuple[str, bool], tuple[float, ...]] = {}
        for row in self.rows:
            if row.cache_warm is not None and row.compile_s is not None and row.kind is not LaunchKind.LOADER_ONLY:
                name = (key(device_part(row.config)), row.cache_warm)
                found[name] = (*found.get(name, ()), row.compile_s)
        return found

    @cached_property
    def space(self) -> Space:
        """The space a search may try: the configurations that were launched."""
        h = self.heading
        choices = {name: tuple(Choice(v) for v in values) for name, values in h.knobs.items()}
        return Space(choices=choices, inactive={}, baseline=h.baseline, only=frozenset(self.launches))


def _grouped(pairs: Iterable[tuple[K, Row]]) -> dict[K, tuple[Row, ...]]:
    found: dict[K, tuple[Row, ...]] = {}
    for name, row in pairs:
        found[name] = (*found.get(name, ()), row)
    return found


def read_surface(path: Path) -> Surface:
    """Read a surface. An incomplete last line is ignored.

    Raises:
        UsageError: the file does not exist or is not a surface.
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
        found = error.errors()[0]
        where = ".".join(str(part) for part in found["loc"])
        raise UsageError(
            f"{path} is no surface: {where or 'its first line'}: {found['msg']}",
            advice="`python -m benchmarks.surfaces record` makes one; benchmarks/README.md describes the format.",
        ) from error
    surface = Surface(heading, rows)
    if key(heading.baseline) not in surface.launches:
        raise UsageError(f"{path} holds no launch of its baseline", advice="record it to its end.")
    return surface
