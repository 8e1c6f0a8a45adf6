"""Synthetic surfaces for tests of searches, computed from a rate and a memory function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

from autotune.base.records import Config, LaunchKind, MeasurePlan, Phase, Side, TrialResult, TrialStatus, Value
from autotune.knobs.compile_mode import compiles
from autotune.knobs.num_workers import workers_of
from autotune.search.replay import PARTS, Heading, Row, ShownEntrant
from autotune.space import canonical, device_part, key, loader_part
from benchmarks.rows import row_of
from tests.support.makers import make_measurement

COLD_S, WARM_S = 40.0, 6.0
#: Of heats: the rounds, samples per second of a loader without workers or with one, and seconds between turns.
_ROUNDS, _LOADER_PER_S, _BETWEEN_S = 6, 400.0, 0.05


def write_surface(
    path: Path,
    knobs: Mapping[str, tuple[Value, ...]],
    baseline: Config,
    rate: Callable[[Config], float],
    peak_bytes: Callable[[Config], int],
    *,
    capacity_bytes: int | None = None,
    repeats: int = 2,
    heats: bool = False,
) -> list[dict[str, Value]]:
    """Write a surface with every combination of the knobs' values, and return these configurations.

    Configurations that need more than ``capacity_bytes`` end as oom. Each repeat of a configuration is 2 % slower than
    the one before, and only the first compiles with a cold cache. The baseline also has a device-only and a loader-only
    launch.

    Args:
        heats: of the device and of the loader, with all their parts. Every other round is 3 % slower for all, and each
            worker makes equally many samples.
    """
    found = {key(c): c for v in product(*knobs.values()) for c in [canonical(dict(zip(knobs, v, strict=True)))]}
    heading = Heading(
        name=path.stem,
        machine="a machine",
        workload="a net",
        device="cpu",
        batch_size=int(baseline["batch_size"]),
        memory_bytes=capacity_bytes,
        plan=MeasurePlan(),
        knobs=dict(knobs),
        baseline=canonical(baseline),
    )
    lines = [heading.model_dump_json()]

    def add(result: TrialResult, config: Config, kind: LaunchKind) -> None:
        row = row_of(result, config, kind=kind, number=len(lines) - 1, began_s=10.0 * len(lines))
        lines.append(row.model_dump_json(exclude_none=True))

    def launch(config: Config, repeat: int) -> TrialResult:
        peak = peak_bytes(config)
        if capacity_bytes is not None and peak > capacity_bytes:
            return _out_of_memory(capacity_bytes)
        return _measured(config, rate(config) * (1 - 0.02 * repeat), peak, warm=repeat > 0)

    for repeat in range(repeats):
        for config in found.values():
            add(launch(config, repeat), config, LaunchKind.MEASURE)
    add(launch(baseline, 0), device_part(baseline), LaunchKind.DEVICE_ONLY)
    add(launch(baseline, 0), loader_part(baseline), LaunchKind.LOADER_ONLY)
    if heats:
        device = {
            key(part): _entrant(part, rate(part), COLD_S if compiles(part) else 0.5)
            for c in found.values()
            for part in [device_part(c)]
        }
        for name, entrant in device.items():
            peak = peak_bytes(entrant.config)
            if capacity_bytes is not None and peak > capacity_bytes:
                device[name] = ShownEntrant(config=entrant.config, status=TrialStatus.OOM, cause="no memory")
        loader = {
            key(part): _entrant(part, _LOADER_PER_S * max(1, workers_of(part)), None)
            for c in found.values()
            for part in [PARTS["loader"](c)]
        }
        sides: dict[Side, dict[str, ShownEntrant]] = {"device": device, "loader": loader}
        for side, entrants in sides.items():
            lines.append(_heat(len(lines) - 1, side, list(entrants.values())).model_dump_json(exclude_none=True))
    path.write_text("\n".join(lines) + "\n")
    return list(found.values())


def _entrant(config: Config, per_s: float, first_step_s: float | None) -> ShownEntrant:
    batch = int(config["batch_size"])
    seconds = [batch / per_s * (1.03 if number % 2 else 1.0) for number in range(_ROUNDS)]
    return ShownEntrant(
        config=dict(config),
        status=TrialStatus.COMPLETE,
        first_step_s=first_step_s,
        turns=tuple((1, batch, s) for s in seconds),
    )


def _heat(number: int, side: Side, entrants: list[ShownEntrant]) -> Row:
    return Row(
        number=number,
        began_s=10.0 * number,
        kind=LaunchKind.HEAT,
        config=entrants[0].config,
        status=TrialStatus.COMPLETE,
        wall_s=60.0,
        phase_s={},
        startup_s=0.5,
        side=side,
        entrants=tuple(entrants),
        between_s=_BETWEEN_S * _ROUNDS * len(entrants),
    )


def _out_of_memory(capacity_bytes: int) -> TrialResult:
    return TrialResult(
        launch="recorded",
        status=TrialStatus.OOM,
        phase=Phase.COMPILE,
        cause="no memory",
        wall_s=1.5,
        phase_s={"load": 0.1, "build": 0.4, "compile": 0.9},
        peak_bytes=capacity_bytes,
    )


def _measured(config: Config, per_s: float, peak: int, *, warm: bool) -> TrialResult:
    compiled = compiles(config)
    compile_s = (WARM_S if warm else COLD_S) if compiled else 0.5
    measurement = make_measurement(
        per_s,
        batch_size=int(config["batch_size"]),
        compile_s=compile_s,
        compile_cache_warm=warm if compiled else None,
        peak_allocated_bytes=peak,
    )
    measure_s = measurement.measured_s + 0.2
    phases = {"load": 0.1, "build": 0.4, "compile": compile_s, "warmup": 0.5, "measure": measure_s}
    return TrialResult(
        launch="recorded",
        status=TrialStatus.COMPLETE,
        measurement=measurement,
        phase_s=phases,
        wall_s=sum(phases.values()) + 0.3,
    )
