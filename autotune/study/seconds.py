"""Accounts for the time of a study, from the results in its launches' folders."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.base.layout import StudyFiles
from autotune.base.records import LaunchKind, LedgerRow, Phase, TrialResult, TrialSpec
from autotune.study.launch_files import read_launches

BETWEEN = "between launches"
_PURPOSES = {
    LaunchKind.PROBE: "probing",
    LaunchKind.MEASURE: "verifying",
    LaunchKind.TRAIN_CHECK: "checking that it trains",
    LaunchKind.HOLD: "holding",
    LaunchKind.DEVICE_ONLY: "ceilings",
    LaunchKind.LOADER_ONLY: "ceilings",
    LaunchKind.HEAT: "heats",
}
_ORDER = (
    *("probing", "heats", "searching", "checking that it trains", "comparing data", "verifying"),
    *("holding", "ceilings", "ablation", BETWEEN),
)


def seconds_by_purpose(files: StudyFiles, elapsed_s: float) -> tuple[LedgerRow, ...]:
    """Return one row per purpose, in the order of a search. The last row is the time between launches.

    A killed launch counts with what is known of it. A repeated launch counts once, because its folder holds the last
    attempt only. Time of an interrupted run that is not covered by a launch's folder counts as between launches.
    """
    rows: dict[str, LedgerRow] = {}
    results = []
    for spec, result in read_launches(files):
        purpose = _purpose(spec)
        row = rows.get(purpose) or LedgerRow(purpose=purpose, launches=0, seconds=0.0)
        rows[purpose] = _add(row, result)
        results.append(result)
    between_s = max(0.0, elapsed_s - _covered_s(results))
    rows[BETWEEN] = LedgerRow(purpose=BETWEEN, launches=0, seconds=between_s, rest_s=between_s)
    return tuple(rows[name] for name in _ORDER if name in rows)


def _covered_s(results: Sequence[TrialResult]) -> float:
    """Return the seconds in which any launch ran: several may have run side by side.

    Those of older versions do not tell when they began, and ran one after another.
    """
    covered_s = sum(r.wall_s for r in results if r.began_s is None)
    until_s = -math.inf
    for began_s, ended_s in sorted((r.began_s, r.began_s + r.wall_s) for r in results if r.began_s is not None):
        covered_s += max(0.0, ended_s - max(began_s, until_s))
        until_s = max(until_s, ended_s)
    return covered_s


def _purpose(spec: TrialSpec) -> str:
    if spec.number is not None:
        return "searching"
    if spec.launch.startswith("data-"):
        return "comparing data"
    if spec.launch.startswith("ablate-"):
        return "ablation"
    return _PURPOSES[spec.kind]


def _add(row: LedgerRow, result: TrialResult) -> LedgerRow:
    phases = result.phase_s
    start_s = phases.get(Phase.LOAD, 0.0) + phases.get(Phase.BUILD, 0.0)
    compile_s = phases.get(Phase.COMPILE, 0.0)
    kept_s = result.measurement.measured_s if result.measurement is not None else 0.0
    if result.heat is not None:
        kept_s = result.heat.measured_s
        # The models are compiled in turn, which the phases do not add up.
        compile_s = sum(e.first_step_s or 0.0 for e in result.heat.entrants)
    # Steps cut from the front of the windows by steady-state detection count as warm-up.
    warmup_s = phases.get(Phase.WARMUP, 0.0)
    if result.measurement is not None:
        warmup_s = max(warmup_s, result.measurement.warmup_s)
    parts_s = [start_s, compile_s, warmup_s, kept_s]
    if sum(parts_s) > result.wall_s:
        # Phases and steps are timed by different clocks, and the first steps of a heat may be inside its turns.
        parts_s = [part * result.wall_s / sum(parts_s) for part in parts_s]
    start_s, compile_s, warmup_s, kept_s = parts_s
    return LedgerRow(
        purpose=row.purpose,
        launches=row.launches + 1,
        seconds=row.seconds + result.wall_s,
        start_s=row.start_s + start_s,
        compile_s=row.compile_s + compile_s,
        warmup_s=row.warmup_s + warmup_s,
        kept_s=row.kept_s + kept_s,
        rest_s=row.rest_s + result.wall_s - sum(parts_s),
    )
