"""`autotune submit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from autotune.base.errors import AutotuneError, UsageError
from autotune.base.layout import DaemonFiles, find_daemon
from autotune.base.records import SCHEMA_VERSION, JobRequest
from autotune.cli.daemon import StateDir, client
from autotune.cli.job_request import CALL_OPTIONS, request_of, unchecked_workloads
from autotune.cli.jobs import rows_of
from autotune.cli.matrix import ENDINGS, Asked, Plan, cells_of, planned
from autotune.cli.options import Command, Json, NoInput, Track, search_options, typed_words
from autotune.cli.output import plain_table, print_json, print_rich
from autotune.cluster.slurm_commands import require_sbatch
from autotune.cluster.slurm_queue import SlurmQueue
from autotune.daemon.client import Client
from autotune.profile.in_force import Store, look_here
from autotune.space.formatting import count, model_name
from autotune.study.request import OPTIONS

# ``autotune submit FILE.yaml``: each cell becomes a job in the queue that its target names, unless it was one before.

#: Jobs per call of the daemon, which limits the size of a call.
_AT_ONCE = 20


def _submit_cells(cells: Sequence[Asked], files: DaemonFiles, *, again: bool, dry_run: bool, as_json: bool) -> None:
    """Submit the searches of a file, and print what has become of each.

    Raises:
        AutotuneError: a queue refuses, or does not answer. Jobs submitted before that stay, and the same command
            submits the rest.
    """
    jobs = rows_of(files, must_answer=not dry_run and any(cell.to == "daemon" for cell in cells))
    # Slurm has been queried by now, so that the profiles of its ended jobs are in force.
    plans = planned(cells, jobs, Store(files.profiles).all(), look_here(), again=again)
    names: dict[str, str] = {}
    fault = None
    if not dry_run:
        try:
            _submit(files, plans, names)
        except AutotuneError as error:
            fault = error
    if as_json and fault is None:
        rows = [_as_json(plan, names.get(plan.study or "")) for plan in plans]
        print_json({"schema_version": SCHEMA_VERSION, "cells": rows})
        return
    if fault is not None:
        if names:
            submitted = f"{count(len(names), 'job')} had been submitted before; the same command submits the rest."
            fault.advice = f"{submitted} {fault.advice or ''}".rstrip()
        raise fault
    _print(plans, names, dry_run=dry_run)


def _submit(files: DaemonFiles, plans: Sequence[Plan], names: dict[str, str]) -> None:
    """Submit the cells to queue; add the names of their jobs to ``names``, by study, as they are accepted."""
    requests = [_request(plan) for plan in plans if plan.study is not None and plan.asked.to == "daemon"]
    slurm_plans = [plan for plan in plans if plan.study is not None and plan.asked.to != "daemon"]
    if slurm_plans:
        require_sbatch()
    for sentence in unchecked_workloads([*requests, *map(_request, slurm_plans)]):
        typer.echo(f"autotune: {sentence}", err=True)
    for start in range(0, len(requests), _AT_ONCE):
        for job in Client(files).submit(*requests[start : start + _AT_ONCE]):
            names[job.request.spec.name] = str(job.id)
    queue = SlurmQueue(files)
    for plan in slurm_plans:
        note = queue.submit(_request(plan), plan.asked.allocation)
        names[note.row.study] = note.name


def _request(plan: Plan) -> JobRequest:
    request = plan.asked.request
    return request.model_copy(update={"spec": request.spec.model_copy(update={"name": plan.study or ""})})


def _as_json(plan: Plan, job: str | None) -> Mapping[str, object]:
    cell = plan.asked.cell
    return {
        "model": cell.model,
        "batch_size": cell.batch,
        "target": cell.target,
        "queue": plan.asked.to,
        "left_out": plan.study is None,
        "job": job or (None if plan.job is None else plan.job.name),
        "study": plan.study or (None if plan.job is None else plan.job.study),
        "why": plan.why,
    }


def _print(plans: Sequence[Plan], names: Mapping[str, str], *, dry_run: bool) -> None:
    table = plain_table("model", "batch", "target", "with", "job", "why", wrap=("with", "why"))
    for plan in plans:
        cell = plan.asked.cell
        job = "-" if plan.study is None else f"to {plan.asked.to}" if dry_run else names[plan.study]
        batch = "any" if cell.batch is None else str(cell.batch)
        table.add_row(Text(model_name(cell.model)), batch, cell.target, Text(cell.more), Text(job), Text(plan.why))
    print_rich(table)
    queued = sum(plan.study is not None for plan in plans)
    left = f"; {count(len(plans) - queued, 'cell')} left out" if queued < len(plans) else ""
    did = "would be submitted" if dry_run else "submitted"
    typer.echo(f"\n{count(queued, 'job')} {did}{left}.")
    if queued and not dry_run:
        typer.echo("`autotune jobs` lists them.")


@search_options([one for one in OPTIONS if one.name != "dry_run"])
def command(
    typed: Mapping[str, Any],
    ctx: typer.Context,
    priority: Annotated[int, typer.Option("--priority", help="The highest goes first.", min=-(10**6), max=10**6)] = 0,
    gpu: Annotated[str, typer.Option("--gpu", help="any, a part of a model's name, or a UUID.", metavar="GPU")] = "any",
    not_before: Annotated[
        str | None, typer.Option("--not-before", help="22:00, 2026-11-23T22:00, or +2h.", metavar="TIME")
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", help="Run only between these times of day.", metavar="22:00-07:00")
    ] = None,
    max_hours: Annotated[float | None, typer.Option("--max-hours", help="End it after running so long.")] = None,
    after: Annotated[
        int | None, typer.Option("--after", help="Wait until this job is done.", metavar="JOB", min=1)
    ] = None,
    on_reboot: Annotated[str, typer.Option("--on-reboot", help="resume or pause.", metavar="POLICY")] = "resume",
    on_done: Annotated[
        str | None, typer.Option("--on-done", help="A command or an http(s) address to tell.", metavar="COMMAND|URL")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Memory of the machine it may use.", metavar="16GiB")
    ] = None,
    cores: Annotated[int | None, typer.Option("--cores", help="Cores it may use.", min=1)] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="Give it a variable; may be repeated.", metavar="NAME[=VALUE]")
    ] = None,
    keep_fresh: Annotated[
        bool, typer.Option("--keep-fresh", help="Search again when driver, torch, GPU or workload have changed.")
    ] = False,
    to: Annotated[str, typer.Option("--to", help="Whose queue: daemon or slurm.", metavar="QUEUE")] = "daemon",
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm's.", metavar="NAME")] = None,
    gres: Annotated[str | None, typer.Option("--gres", help="Slurm's, such as gpu:h100:1.", metavar="GRES")] = None,
    time: Annotated[
        str | None, typer.Option("--time", help="Of one run of the job, for Slurm.", metavar="DURATION")
    ] = None,
    cpus: Annotated[int | None, typer.Option("--cpus", help="Cores, for Slurm.", min=1)] = None,
    mem: Annotated[str | None, typer.Option("--mem", help="Memory of the node, for Slurm.", metavar="16GiB")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Slurm's.", metavar="NAME")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Slurm's.", metavar="NAME")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", help="A further option of sbatch; may be repeated.", metavar="KEY[=VALUE]"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Of a file: say what would be submitted; submit nothing.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Of a file: submit also what has a profile, or was searched.")
    ] = False,
    words: Command = None,
    track: Track = None,
    state_dir: StateDir = None,
    as_json: Json = False,
    no_input: NoInput = False,
) -> None:
    """Leave a search to the daemon, or to Slurm; with FILE.yaml, many. Takes all that `autotune search` takes, and a
    command behind --."""
    try:
        Path.cwd()
    except OSError:
        raise UsageError("this folder is not there any more", advice="change to one that is.") from None
    if words is not None and len(words) == 1 and words[0].endswith(ENDINGS):
        given = typed_words(ctx, [name for name in ctx.params if name not in CALL_OPTIONS])
        _, cells = cells_of(Path(words[0]), ctx.parent, to=to, given=given)
        _submit_cells(cells, find_daemon(state_dir), again=again, dry_run=dry_run, as_json=as_json)
        return
    if dry_run:
        raise UsageError("--dry-run submits nothing", advice="`autotune search --dry-run` says what would be tried.")
    if again:
        raise UsageError("--again is for a file", advice="without it, what is submitted twice is searched twice.")
    request, allocation = request_of(ctx, to)
    daemon = None if to == "slurm" else client(state_dir)
    # Fail before importing the workload if nothing can take the job.
    if daemon is None:
        require_sbatch()
    else:
        daemon.status()
    for sentence in unchecked_workloads([request]):
        typer.echo(f"autotune: {sentence}", err=True)
    if daemon is None:
        note = SlurmQueue(find_daemon(state_dir)).submit(request, allocation)
        name, study, waits = note.name, note.row.study, None
        row = {"id": note.id, "study": study, "state": note.state.value, "queue": note.row.queue}
    else:
        (job,) = daemon.submit(request)
        name, study, waits = str(job.id), job.request.spec.name, daemon.waits_for(job.id)
        row = {"id": job.id, "study": study, "state": job.state.value}
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "jobs": [row]})
        return
    typer.echo(f"job {name}: {study}{'' if waits is None else f'; it waits: {waits}'}")
    typer.echo(f"`autotune jobs show {name}` says more, `autotune jobs wait {name}` waits for its end.")
