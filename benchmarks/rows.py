"""Rows of a surface, made from the launches that they record."""

from __future__ import annotations

from autotune.base.records import Config, Heat, LaunchKind, TrialResult
from autotune.search.replay import PARTS, Row, ShownEntrant


def row_of(
    result: TrialResult, config: Config, *, kind: LaunchKind, number: int, began_s: float, reference: bool = False
) -> Row:
    """Return the row of a launch."""
    measurement = result.measurement
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
    if measurement is None:
        return Row.model_validate(common)
    measured = {
        "cache_warm": measurement.compile_cache_warm,
        "rate_per_s": measurement.samples_per_s,
        "low_per_s": measurement.ci95_per_s[0],
        "high_per_s": measurement.ci95_per_s[1],
        "relative_se": measurement.relative_se,
        "degrees": measurement.degrees,
        "steady_per_s": measurement.steady_per_s,
        "loader_per_s": measurement.loader_capacity_per_s,
        "device_per_s": measurement.device_per_s,
        "wait_fraction": measurement.loader_wait_fraction,
        "peak_bytes": measurement.peak_bytes,
        "startup_s": measurement.startup_s,
        "compile_s": measurement.compile_s,
        "warmup_s": measurement.warmup_s,
        "measured_s": measurement.measured_s,
        "epoch_turn_s": measurement.epoch_turn_s,
        "epoch_samples": measurement.epoch_samples,
        "settled": measurement.settled,
        "windows": tuple((w.steps, w.samples, round(w.seconds, 6)) for w in measurement.windows),
    }
    return Row.model_validate({**common, **{n: _short(v) for n, v in measured.items()}})


def _of_heat(heat: Heat, wall_s: float) -> dict[str, object]:
    part = PARTS[heat.side]
    stepping_s = heat.measured_s + sum(e.first_step_s or 0.0 for e in heat.entrants)
    return {
        "config": part(heat.entrants[0].config),
        "side": heat.side,
        "startup_s": _short(heat.startup_s),
        "between_s": _short(wall_s - heat.startup_s - stepping_s),
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
    """Round a float to six significant digits, more than any measurement is good for."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
