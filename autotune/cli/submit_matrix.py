"""``autotune submit matrix.yaml``: each cell becomes a job, in the queue that its target names, unless it has been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Column
from rich.text import Text

from autotune.cli.matrix import Plan, cells_of, planned
from autotune.cli.output import print_json, print_rich
from autotune.cli.workload_check import unchecked_workloads
from autotune.cluster.slurm_commands import require_sbatch
from autotune.cluster.slurm_queue import SlurmQueue
from autotune.daemon.rpc.client import Client
from autotune.base.errors import AutotuneError, DaemonUnreachableError
from autotune.space.formatting import count, model_name
from autotune.base.layout import DaemonFiles, find_daemon
from autotune.profile.here import look_here
from autotune.profile.store import Store
from autotune.base.records import SCHEMA_VERSION, JobRequest, JobRow
from autotune.report.lines import FittingTable

#: Jobs in one call of the daemon, which takes no call of any size.
_AT_ONCE = 20


def submit_matrix(
    path: Path,
    root: Any,
    to: str,
    given: Sequence[str],
    *,
    state_dir: Path | None,
    again: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Submit the cells of a matrix, and say of each what has become of it.

    Args:
        root: the context of `autotune` itself.
        to, given: queue and options where the file says nothing else.

    Raises:
        UsageError: the file is no matrix; nothing is submitted.
        AutotuneError: a queue refuses, or does not answer. What was submitted before stays, and the same command
            submits the rest.
    """
    _, asked = cells_of(path, root, to=to, given=given)
    files = find_daemon(state_dir)
    jobs = _jobs(files, must_answer=not dry_run and any(one.to == "daemon" for one in asked))
    # Slurm is asked first: the profiles of its jobs that have ended are then in force.
    plans = planned(asked, jobs, Store(files.profiles).all(), look_here(), again=again)
    names: dict[str, str] = {}
    fault = None
    if not dry_run:
        try:
            _submit(files, plans, names)
        except AutotuneError as error:
            fault = error
    if as_json and fault is None:
        cells = [_as_json(plan, names.get(plan.study or "")) for plan in plans]
        print_json({"schema_version": SCHEMA_VERSION, "cells": cells})
        return
    if fault is not None:
        if names:
            before = f"{count(len(names), 'job')} had been submitted before; the same command submits the rest."
            fault.advice = f"{before} {fault.advice or ''}".rstrip()
        raise fault
    _print(plans, names, dry_run=dry_run)


def _jobs(files: DaemonFiles, *, must_answer: bool) -> list[JobRow]:
    """Return the jobs of both queues. Without a daemon there are none of its own, unless it ``must_answer``."""
    found: list[JobRow] = []
    try:
        found += Client(files).rows()
    except DaemonUnreachableError:
        if must_answer:
            raise
    seen = SlurmQueue(files).look()
    for trouble in seen.troubles:
        typer.echo(f"autotune: {trouble}", err=True)
    return [*found, *(job.row for job in seen.jobs)]


def _submit(files: DaemonFiles, plans: Sequence[Plan], names: dict[str, str]) -> None:
    """Submit the cells that are to be queued; add what their jobs are called, by study, as they are accepted."""
    ours = [_request(plan) for plan in plans if plan.study is not None and plan.asked.to == "daemon"]
    theirs = [plan for plan in plans if plan.study is not None and plan.asked.to != "daemon"]
    if theirs:
        require_sbatch()
    for sentence in unchecked_workloads([*ours, *map(_request, theirs)]):
        typer.echo(f"autotune: {sentence}", err=True)
    for at in range(0, len(ours), _AT_ONCE):
        for job in Client(files).submit(*ours[at : at + _AT_ONCE]):
            names[job.request.spec.name] = str(job.id)
    queue = SlurmQueue(files)
    for plan in theirs:
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
    columns = [Column(title, no_wrap=True) for title in ("model", "batch", "target")]
    last = [Column("job", no_wrap=True), Column("why", overflow="fold")]
    table = FittingTable(*columns, *last, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for plan in plans:
        cell = plan.asked.cell
        job = "-" if plan.study is None else f"to {plan.asked.to}" if dry_run else names[plan.study]
        batch = "any" if cell.batch is None else str(cell.batch)
        table.add_row(Text(model_name(cell.model)), batch, cell.target, Text(job), Text(plan.why))
    print_rich(table)
    queued = sum(plan.study is not None for plan in plans)
    left = f"; {count(len(plans) - queued, 'cell')} left out" if queued < len(plans) else ""
    did = "would be submitted" if dry_run else "submitted"
    typer.echo(f"\n{count(queued, 'job')} {did}{left}.")
    if queued and not dry_run:
        typer.echo("`autotune jobs` lists them.")
