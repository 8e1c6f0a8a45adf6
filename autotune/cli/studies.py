"""``autotune studies``: list the studies of a folder."""

from __future__ import annotations

import contextlib

import typer

from autotune.base.errors import AutotuneError, MachineError
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.base.records import SCHEMA_VERSION, Finding
from autotune.cli.options import Json, StudiesDir
from autotune.cli.output import print_json, print_rich
from autotune.report import StudyRow, studies_table
from autotune.search import load_outcome
from autotune.study.loop import read_failure
from autotune.study.request import read_request
from autotune.study.tables import read_trials


def studies(studies_dir: StudiesDir = DEFAULT_STUDIES, as_json: Json = False) -> None:
    """List the studies of a folder."""
    rows = [_row(StudyFiles(f.parent.absolute())) for f in sorted(studies_dir.glob("*/study.yaml"))]
    if as_json:
        entries = [
            {
                "study": r.name,
                "model": r.model,
                "state": r.state,
                "trials": r.trials,
                "speedup": r.best_speedup,
                "created": r.created,
                "path": r.path,
            }
            for r in rows
        ]
        print_json({"schema_version": SCHEMA_VERSION, "studies": entries})
    elif rows:
        print_rich(studies_table(rows))
    else:
        typer.echo(f"{studies_dir} holds no study yet; `autotune search --model resnet50` makes one.")


def _row(files: StudyFiles) -> StudyRow:
    # One damaged study must not hide the others.
    model, created, state, trials, speedup = "?", "", "unreadable", 0, None
    with contextlib.suppress(AutotuneError):
        spec = read_request(files)
        model, created = spec.model, spec.created
        outcome = load_outcome(files)
        trials = len(read_trials(files))
        failure = read_failure(files)
        # A study that the machine stopped can be resumed as it is.
        failed = failure is not None and failure.exit_code != MachineError.exit_code
        state = "failed" if failed else "unfinished"
        if outcome is not None:
            state = {Finding.OPEN: "no verdict", Finding.LIKELY: "likely"}.get(outcome.found, "done")
            speedup = None if outcome.found is Finding.OPEN else outcome.best.speedup
    return StudyRow(
        name=files.name,
        model=model,
        state=state,
        trials=trials,
        best_speedup=speedup,
        created=created,
        path=str(files.folder),
    )
