"""``autotune show``: list the trials and heats of a study."""

from __future__ import annotations

from typing import Any

import typer

from autotune.cli.options import Json, StudiesDir, Study
from autotune.cli.output import print_json, print_rich
from autotune.layout import DEFAULT_STUDIES, StudyFiles
from autotune.records import SCHEMA_VERSION, Trial
from autotune.report import heat_table, trials_table
from autotune.search import find_study
from autotune.study.history import read_launch
from autotune.study.reading import read_heats, read_trials


def show(study: Study, studies_dir: StudiesDir = DEFAULT_STUDIES, as_json: Json = False) -> None:
    """Show the trials and heats of a study."""
    files = find_study(study, studies_dir)
    trials, heats = read_trials(files), read_heats(files)
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "study": files.name,
                "trials": [_trial_json(files, t) for t in trials],
                "heats": [heat.model_dump(mode="json") for heat in heats],
            }
        )
        return
    if not trials:
        typer.echo(f"{files.name} has no finished trial yet.")
        return
    print_rich(trials_table(trials, trials[0].config))
    for heat in heats:
        print_rich(heat_table(heat, trials[0].config))


def _trial_json(files: StudyFiles, trial: Trial) -> dict[str, Any]:
    # The folder has the values of each step. If it has been removed, the database still has the trial.
    _, full = read_launch(files.trial(trial.number))
    result = full or trial.result
    return {
        "number": trial.number,
        "config": trial.config,
        "status": result.status.value,
        "phase": result.phase.value if result.phase else None,
        "cause": result.cause,
        "advice": result.advice,
        "score": trial.score,
        "repeats": trial.repeats,
        "rate_seen_per_s": result.rate_seen_per_s,
        "peak_bytes": result.peak_bytes,
        "measurement": result.measurement.model_dump(mode="json") if result.measurement else None,
        "phase_seconds": result.phase_s,
        "predicted": trial.predicted.model_dump(mode="json") if trial.predicted else None,
    }
