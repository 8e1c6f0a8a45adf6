"""Our tables next to Optuna's in ``study.db``: for people; they can be rebuilt from the launches' folders."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Any

import sqlite_utils

from autotune.knobs import spell
from autotune.layout import StudyFiles
from autotune.records import TrialResult, TrialSpec
from autotune.study.database import writing
from autotune.study.history import read_launches


class LaunchTables:
    """Our tables in ``study.db``: one row per launch, per setting of a launch, and per entrant of a heat."""

    def __init__(self, files: StudyFiles) -> None:
        self._files = files

    def add(self, spec: TrialSpec, result: TrialResult) -> None:
        """Insert a launch, replacing an earlier row of the same name."""
        measurement = result.measurement
        row: dict[str, Any] = {
            "launch": spec.launch,
            "kind": spec.kind.value,
            "trial": spec.number,
            "repeats": spec.repeats,
            "status": result.status.value,
            "phase": result.phase.value if result.phase else None,
            "cause": result.cause,
            "samples_per_s": measurement.samples_per_s if measurement else result.rate_seen_per_s,
            "ci95_low_per_s": measurement.ci95_per_s[0] if measurement else None,
            "ci95_high_per_s": measurement.ci95_per_s[1] if measurement else None,
            "loader_wait_fraction": measurement.loader_wait_fraction if measurement else None,
            "peak_memory_bytes": measurement.peak_bytes if measurement else result.peak_bytes,
            "compile_s": measurement.compile_s if measurement else None,
            "measured_s": measurement.measured_s if measurement else result.heat and result.heat.measured_s,
            "wall_s": result.wall_s,
            "waited_s": result.waited_s,
            "exit_code": result.exit_code,
            "config": json.dumps(spec.config),
        }
        entrants = _entrants(spec, result)
        settings = [{"launch": spec.launch, "knob": n, "value": spell(v)} for n, v in spec.config.items()]
        with (
            writing(self._files),
            contextlib.closing(sqlite3.connect(self._files.database, timeout=30)) as connection,
        ):
            database = sqlite_utils.Database(connection)
            launches = database["autotune_launches"]
            launches.insert(row, pk="launch", replace=True, alter=True)  # type: ignore[union-attr, unused-ignore]
            if settings:
                database["autotune_settings"].insert_all(  # type: ignore[union-attr, unused-ignore]
                    settings, pk=("launch", "knob"), replace=True
                )
            if entrants:
                database["autotune_entrants"].insert_all(  # type: ignore[union-attr, unused-ignore]
                    entrants, pk=("launch", "entrant"), replace=True, alter=True
                )
            connection.commit()

    def measured_s(self) -> float:
        """Return the seconds inside kept windows, over all launches of the study."""
        with contextlib.closing(sqlite3.connect(self._files.database, timeout=30)) as connection:
            (total,) = connection.execute("select total(measured_s) from autotune_launches").fetchone()
        return float(total)

    def rebuild(self) -> int:
        """Insert every launch found in the folders; return their number."""
        count = 0
        for spec, result in read_launches(self._files):
            self.add(spec, result)
            count += 1
        return count


def _entrants(spec: TrialSpec, result: TrialResult) -> list[dict[str, Any]]:
    """Return one row for each entrant of a heat."""
    if result.heat is None:
        return []
    return [
        {
            "launch": spec.launch,
            "entrant": number,
            "side": result.heat.side,
            "status": entrant.status.value,
            "cause": entrant.cause,
            "ratio": entrant.ratio,
            "ci95_low": entrant.ratio_ci95 and entrant.ratio_ci95[0],
            "ci95_high": entrant.ratio_ci95 and entrant.ratio_ci95[1],
            "turns": sum(turn is not None for turn in entrant.turns),
            "first_step_s": entrant.first_step_s,
            "peak_memory_bytes": entrant.peak_bytes,
            "config": json.dumps(entrant.config),
        }
        for number, entrant in enumerate(result.heat.entrants)
    ]
