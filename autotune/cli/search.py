"""``autotune search`` and ``autotune resume``."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.dry_run import say_beforehand
from autotune.cli.parsing import duration_s, lists, pairs, size_bytes
from autotune.cli.replay import search_surface
from autotune.cli.running import (
    STUDIES,
    Json,
    NoInput,
    StudiesDir,
    asked_to_stop,
    environment,
    keep_profile,
    print_outcome,
)
from autotune.clock import timestamp
from autotune.errors import UsageError
from autotune.records import StudySpec
from autotune.samplers import SAMPLERS
from autotune.search import find_study
from autotune.search import fork as fork_study
from autotune.search import resume as resume_study
from autotune.search import search as search_study

Model = Annotated[str, typer.Option("--model", help="A name, FILE.py, or package.module:NAME.", metavar="MODEL")]
Args = Annotated[
    list[str] | None, typer.Option("--arg", help="For the workload itself; may be repeated.", metavar="KEY=VALUE")
]
Data = Annotated[str, typer.Option("--data", help="A folder, generated, or synthetic.", metavar="DATA")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N or cuda:GPU-UUID.", metavar="DEVICE")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="The baseline's batch size.", min=1)]
ImageSize = Annotated[int | None, typer.Option("--image-size", help="Side of an image in pixels.", min=1)]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Search only these values of a knob.", metavar="KNOB=V1,V2")
]
Fix = Annotated[list[str] | None, typer.Option("--fix", help="Pin a knob.", metavar="KNOB=VALUE")]
Base = Annotated[list[str] | None, typer.Option("--baseline", help="What is run today.", metavar="KNOB=VALUE")]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", help="Device memory a trial may use.", metavar="6GiB")
]


def make_spec(
    *,
    model: str,
    args: list[str] | None,
    data: str,
    device: str,
    batch_size: int | None,
    image_size: int | None,
    narrowed: list[str] | None,
    fixed: list[str] | None,
    baseline: list[str] | None,
    memory_limit: str | None,
    study: str = "",
    budget: str = "10m",
    trials: int | None = None,
    objective: str = "throughput",
    sampler: str = "auto",
    seed: int = 0,
    allow_busy: bool = False,
) -> StudySpec:
    """A request from what was typed.

    Raises:
        UsageError: something in it is no value of its kind.
    """
    spec = StudySpec(
        name=study,
        mark=uuid.uuid4().hex,
        created=timestamp(),
        model=str(Path(model).expanduser().absolute()) if model.endswith(".py") else model,
        args=pairs(args or [], "--arg"),
        data=data if data in ("generated", "synthetic") else str(Path(data).expanduser().absolute()),
        objective=str(Path(objective).expanduser().absolute()) if objective.endswith(".py") else objective,
        device=device,
        batch_size=batch_size,
        image_size=image_size,
        budget_s=duration_s(budget),
        trials=trials,
        sampler=sampler,
        seed=seed,
        memory_limit_bytes=size_bytes(memory_limit) if memory_limit is not None else None,
        allow_busy=allow_busy,
        narrowed=lists(narrowed or [], "--set"),
        fixed=pairs(fixed or [], "--fix"),
        baseline=pairs(baseline or [], "--baseline"),
    )
    stated = spec.baseline.get("batch_size")
    if batch_size is not None and stated is not None and stated != str(batch_size):
        raise UsageError(f"--batch-size {batch_size} and --baseline batch_size={stated} contradict each other")
    both = sorted(spec.narrowed.keys() & spec.fixed.keys())
    if both:
        raise UsageError(f"{both[0]} is given both to --set and to --fix")
    return spec


def search(
    model: Annotated[
        str | None, typer.Option("--model", help="A name, FILE.py, or package.module:NAME.", metavar="MODEL")
    ] = None,
    arg: Args = None,
    data: Data = "generated",
    study: Annotated[str, typer.Option("--study", help="Name of the study.  [default: a fresh number]")] = "",
    studies_dir: StudiesDir = STUDIES,
    budget: Annotated[str, typer.Option("--budget", help="How long to search.", metavar="DURATION")] = "10m",
    trials: Annotated[int | None, typer.Option("--trials", help="End after this many trials.", min=1)] = None,
    objective: Annotated[str, typer.Option("--objective", help="A name or FILE.py; higher is better.")] = "throughput",
    device: Device = "auto",
    batch_size: BatchSize = None,
    image_size: ImageSize = None,
    baseline: Base = None,
    set_: Set = None,
    fix: Fix = None,
    memory_limit: MemoryLimit = None,
    sampler: Annotated[str, typer.Option("--sampler", help=f"{', '.join(SAMPLERS)}.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.", min=0)] = 0,
    allow_busy: Annotated[bool, typer.Option("--allow-busy", help="Measure although others use the cores.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be tried; measure nothing.")] = False,
    replay: Annotated[
        Path | None, typer.Option("--replay", help="Search a recorded surface in virtual time.", metavar="SURFACE")
    ] = None,
    as_json: Json = False,
    no_input: NoInput = False,
) -> None:
    """Search for the fastest way to train a model on this machine."""
    if model is None and replay is None:
        raise UsageError("--model says what to train", advice="--model resnet50, --model mine.py; or --replay SURFACE.")
    spec = make_spec(
        model=model or "recorded",
        args=arg,
        data=data,
        study=study,
        budget=budget,
        trials=trials,
        objective=objective,
        device=device,
        batch_size=batch_size,
        image_size=image_size,
        baseline=baseline,
        narrowed=set_,
        fixed=fix,
        memory_limit=memory_limit,
        sampler=sampler,
        seed=seed,
        allow_busy=allow_busy,
    )
    if replay is not None:
        given = {
            "model": model,
            "arg": arg,
            "data": data,
            "study": study,
            "studies_dir": studies_dir,
            "device": device,
            "batch_size": batch_size,
            "image_size": image_size,
            "baseline": baseline,
            "memory_limit": memory_limit,
            "allow_busy": allow_busy,
            "dry_run": dry_run,
        }
        search_surface(replay, spec, given, as_json=as_json)
        return
    if dry_run:
        say_beforehand(spec, as_json=as_json)
        return
    with asked_to_stop() as stop:
        found = search_study(spec, studies_dir, environment(stop))
    keep_profile(found)
    print_outcome(found, as_json=as_json)


def resume(
    study: Annotated[str, typer.Argument(help="Name or folder of a study.", metavar="STUDY")],
    studies_dir: StudiesDir = STUDIES,
    fork: Annotated[
        bool, typer.Option("--fork", help="Start a new study that first tries what was best in this one.")
    ] = False,
    as_json: Json = False,
    no_input: NoInput = False,
) -> None:
    """Go on with a study where it stands."""
    files = find_study(study, studies_dir)
    with asked_to_stop() as stop:
        again = fork_study if fork else resume_study
        found = again(files, environment(stop))
    keep_profile(found)
    print_outcome(found, as_json=as_json)
