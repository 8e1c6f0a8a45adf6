"""``autotune show``: list the trials and heats of a study."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from autotune.base.errors import UsageError
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.base.records import SCHEMA_VERSION, Trial
from autotune.cli.options import Json, StudiesDir, Study, study_of
from autotune.cli.output import print_bytes, print_json, print_rich
from autotune.knobs import spell
from autotune.report import heat_table, trials_table
from autotune.search import NEWEST
from autotune.study.history import read_launch
from autotune.study.tables import read_heats, read_trials

#: The columns of ``--csv`` before those of the knobs, which are in docs/json.md.
FIGURES = (
    *("trial", "status", "phase", "cause", "score", "samples_per_s", "low_per_s", "high_per_s", "peak_bytes"),
    *("host_bytes", "loader_wait_fraction", "energy_j", "startup_s", "compile_s", "warmup_s", "measured_s", "wall_s"),
    "repeats",
)
Csv = Annotated[
    bool, typer.Option("--csv", help="Print a line per trial, for a spreadsheet or pandas (columns: docs/json.md).")
]


def show(
    study: Study = NEWEST, studies_dir: StudiesDir = DEFAULT_STUDIES, as_json: Json = False, as_csv: Csv = False
) -> None:
    """Show the trials and heats of a study."""
    if as_json and as_csv:
        raise UsageError("--json and --csv ask for two formats", advice="leave one of them out.")
    files = study_of(study, studies_dir)
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
    if as_csv:
        print_bytes(trials_csv(trials))
        return
    if not trials:
        typer.echo(f"{files.name} has no finished trial yet.")
        return
    print_rich(trials_table(trials, trials[0].config))
    for heat in heats:
        print_rich(heat_table(heat, trials[0].config))


def trials_csv(trials: Sequence[Trial]) -> str:
    """Return the trials as CSV (RFC 4180, with plain line feeds): a line of column names, then one per trial.

    The last columns are the knobs, spelled as on the command line. What is not known, or does not apply, is empty.
    """
    knobs = dict.fromkeys(name for trial in trials for name in trial.config)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*FIGURES, *knobs], lineterminator="\n")
    writer.writeheader()
    for trial in trials:
        writer.writerow({**_figures(trial), **{name: spell(value) for name, value in trial.config.items()}})
    return text.getvalue()


def _figures(trial: Trial) -> dict[str, Any]:
    result, m = trial.result, trial.result.measurement
    values = {
        "trial": trial.number,
        "status": result.status.value,
        "phase": result.phase.value if result.phase else None,
        "cause": result.cause,
        "score": trial.score,
        "samples_per_s": trial.rate_per_s,
        "peak_bytes": result.peak_bytes,
        "wall_s": result.wall_s,
        "repeats": trial.repeats,
    }
    if m is not None:
        values |= {"low_per_s": m.ci95_per_s[0], "high_per_s": m.ci95_per_s[1], "peak_bytes": m.peak_bytes}
        values |= {"host_bytes": m.host_memory_bytes, "loader_wait_fraction": m.loader_wait_fraction}
        values |= {"energy_j": m.energy_j, "startup_s": m.startup_s, "compile_s": m.compile_s}
        values |= {"warmup_s": m.warmup_s, "measured_s": m.measured_s}
    return values


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
        "wall_s": result.wall_s,
        "phase_seconds": result.phase_s,
        "predicted": trial.predicted.model_dump(mode="json") if trial.predicted else None,
    }
