"""The lines of a surface: one recorded launch each.

Field names carry their units (``_s``, ``_bytes``, ``_per_s``: samples per second); unknown values are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from autotune.base.records import (
    Config,
    Heat,
    LaunchKind,
    Measurement,
    Phase,
    Record,
    Side,
    TrialResult,
    TrialStatus,
    Turn,
    Value,
    Window,
)
from autotune.space import delivery_part, device_part, key
from autotune.stats import Rate

#: The part of a configuration that each side of a training depends on.
PARTS: Mapping[Side, Callable[[Config], dict[str, Value]]] = {"device": device_part, "loader": delivery_part}


class ShownEntrant(Record):
    """What a heat showed of one configuration.

    Attributes:
        config: the part of it that the heat's side depends on.
        status, cause, cannot_compile: how it ended. An entrant of a recorded heat never drops out for being slow.
        turns: ``(steps, samples, seconds)`` of each round, ``None`` if others disturbed it, or if it was out.
    """

    config: dict[str, Value]
    status: TrialStatus
    cause: str | None = None
    cannot_compile: bool = False
    first_step_s: float | None = None
    peak_bytes: int | None = None
    turns: tuple[tuple[int, int, float] | None, ...] = ()

    def turn(self, number: int) -> Turn | None:
        """Return the turn of a round, ``None`` if there was none."""
        found = self.turns[number] if number < len(self.turns) else None
        return None if found is None else Turn(steps=found[0], samples=found[1], seconds=found[2])


class Row(Record):
    """One launch.

    Attributes:
        number: in chronological order, from 0. began_s: seconds since the first launch began.
        kind: ``measure``, ``device_only``, ``loader_only`` or ``heat``.
        reference: a periodic launch of the baseline, which shows the machine's drift.
        config: the launched configuration; for the two ceilings and a heat's reference, the part that they depend on.
        side, entrants: of a heat. between_s: its seconds that are neither its start nor in turns or
            first steps.
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
    side: Side | None = None
    entrants: tuple[ShownEntrant, ...] = ()
    between_s: float | None = None

    @cached_property
    def shown(self) -> Mapping[str, ShownEntrant]:
        """The entrants of a heat, by the key of their part."""
        return {key(entrant.config): entrant for entrant in self.entrants}

    @cached_property
    def rounds(self) -> int:
        """Rounds of a heat."""
        return max((len(entrant.turns) for entrant in self.entrants), default=0)

    @cached_property
    def between_each_s(self) -> float:
        """Seconds before each turn of a heat, on average: of switching, or of starting and ending workers."""
        complete = [e for e in self.entrants if e.status is TrialStatus.COMPLETE]
        failed = [e for e in self.entrants if e.status is not TrialStatus.COMPLETE]
        # Who fails does so in a turn that is not in the row.
        taken = sum(len(e.turns) for e in complete) + sum(1 + sum(map(bool, e.turns)) for e in failed)
        return (self.between_s or 0.0) / max(1, taken)

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
            loader_wait_fraction=self.wait_fraction,
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
    if result.heat is not None:
        common |= _of_heat(result.heat, result.wall_s)
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


def _of_heat(heat: Heat, wall_s: float) -> dict[str, object]:
    part = PARTS[heat.side]
    taken_s = heat.measured_s + sum(e.first_step_s or 0.0 for e in heat.entrants)
    return {
        "config": part(heat.entrants[0].config),
        "side": heat.side,
        "startup_s": _short(heat.startup_s),
        "between_s": _short(wall_s - heat.startup_s - taken_s),
        "entrants": [
            ShownEntrant(
                config=part(e.config),
                status=e.status,
                cause=e.cause,
                cannot_compile=e.cannot_compile,
                first_step_s=e.first_step_s,
                peak_bytes=e.peak_bytes,
                turns=tuple(None if t is None else (t.steps, t.samples, round(t.seconds, 6)) for t in e.turns),
            )
            for e in heat.entrants
        ],
    }


def _short(value: object) -> object:
    """Round a float to six significant digits, more than any measurement has."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
