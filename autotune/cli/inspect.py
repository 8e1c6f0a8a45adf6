"""``autotune show``, ``studies``, ``export`` and ``space``: looking at what is there."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from autotune.cli.running import STUDIES, Json, StudiesDir, asked_to_stop, environment, print_json
from autotune.cli.search import (
    Args,
    Base,
    BatchSize,
    Data,
    Device,
    Fix,
    ImageSize,
    MemoryLimit,
    Model,
    Set,
    make_spec,
)
from autotune.errors import AutotuneError, UsageError
from autotune.files import write_atomic
from autotune.knobs import KNOBS
from autotune.layout import StudyFiles
from autotune.profile import export as export_profile
from autotune.profile import read
from autotune.records import SCHEMA_VERSION, Trial
from autotune.report import StudyRow, space_table, studies_table, trials_table
from autotune.search import find_study, load_outcome, make_space
from autotune.study.failure import read_failure
from autotune.study.history import read_launch, read_trials
from autotune.study.request import read_request

Study = Annotated[str, typer.Argument(help="Name or folder of a study.", metavar="STUDY")]


def show(study: Study, studies_dir: StudiesDir = STUDIES, as_json: Json = False) -> None:
    """Show the trials of a study."""
    files = find_study(study, studies_dir)
    trials = read_trials(files)
    if as_json:
        print_json(
            {"schema_version": SCHEMA_VERSION, "study": files.name, "trials": [_trial_json(files, t) for t in trials]}
        )
        return
    if not trials:
        typer.echo(f"{files.name} has no finished trial yet.")
        return
    Console().print(trials_table(trials, trials[0].config))


def _trial_json(files: StudyFiles, trial: Trial) -> dict[str, Any]:
    # The folder holds the per-step numbers; the database remembers the trial even if the folder is gone.
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


def studies(studies_dir: StudiesDir = STUDIES, as_json: Json = False) -> None:
    """List the studies of a folder."""
    rows = [_row(StudyFiles(f.parent.absolute())) for f in sorted(studies_dir.glob("*/study.yaml"))]
    if as_json:
        listed = [
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
        print_json({"schema_version": SCHEMA_VERSION, "studies": listed})
    elif rows:
        Console().print(studies_table(rows))
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
        state = "done" if outcome else "failed" if read_failure(files) else "unfinished"
        speedup = outcome.best.speedup if outcome else None
    return StudyRow(
        name=files.name,
        model=model,
        state=state,
        trials=trials,
        best_speedup=speedup,
        created=created,
        path=str(files.folder),
    )


def export(
    study: Study,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout if not given.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="yaml or json.  [default: json for a .json file, else yaml]")
    ] = None,
    studies_dir: StudiesDir = STUDIES,
) -> None:
    """Write the profile of a finished study."""
    chosen = format_ or ("json" if output is not None and output.suffix == ".json" else "yaml")
    files = find_study(study, studies_dir)
    if not files.profile.exists():
        raise UsageError(f"{files.name} has no profile yet", advice=f"finish it with: autotune resume {study}")
    text = export_profile(read(files.profile), chosen)
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_output(output, text)


def write_output(output: Path, text: str) -> None:
    """Write what a command would print into a file, and say so.

    Raises:
        UsageError: the file's folder is not there.
        MachineError: it cannot be written.
    """
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {str(output.parent)!r} to write {output.name} into")
    write_atomic(output, text)
    typer.echo(f"wrote {output}", err=True)


def space(
    model: Model,
    arg: Args = None,
    data: Data = "generated",
    device: Device = "auto",
    batch_size: BatchSize = None,
    image_size: ImageSize = None,
    baseline: Base = None,
    set_: Set = None,
    fix: Fix = None,
    memory_limit: MemoryLimit = None,
    as_json: Json = False,
) -> None:
    """Show the knobs, their legal values here, and why others are refused."""
    spec = make_spec(
        model=model,
        args=arg,
        data=data,
        device=device,
        batch_size=batch_size,
        image_size=image_size,
        baseline=baseline,
        narrowed=set_,
        fixed=fix,
        memory_limit=memory_limit,
    )
    with asked_to_stop() as stop, tempfile.TemporaryDirectory(prefix="autotune-space-") as folder:
        found = make_space(spec, environment(stop), Path(folder))
    if not as_json:
        Console().print(space_table(found))
        return
    print_json(
        {
            "schema_version": SCHEMA_VERSION,
            "baseline": dict(found.baseline),
            "inactive": dict(found.inactive),
            "knobs": {
                name: {
                    "changes_maths": name not in KNOBS or KNOBS[name].changes_maths,
                    "choices": [{"value": c.value, "refused": c.refused} for c in choices],
                }
                for name, choices in found.choices.items()
            },
        }
    )
