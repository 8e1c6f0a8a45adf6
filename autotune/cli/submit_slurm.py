"""``autotune submit --to slurm``: what a job asks Slurm for, and its submission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from autotune.base.errors import AutotuneError, UnknownNameError, UsageError
from autotune.base.layout import find_daemon
from autotune.base.records import SCHEMA_VERSION, JobRequest
from autotune.cli.options import was_typed
from autotune.cli.output import print_json
from autotune.cli.workload_check import unchecked_workloads
from autotune.cluster.slurm_commands import require_sbatch
from autotune.cluster.slurm_queue import Allocation, SlurmQueue, allocation

QUEUES = ("daemon", "slurm")
#: Options of `submit` that only Slurm understands.
_SLURMS = ("partition", "gres", "time", "cpus", "mem", "account", "qos", "sbatch")
#: Those that only the daemon understands, and what to write for Slurm.
_DAEMONS = {
    "priority": "--sbatch nice=100 lowers it.",
    "gpu": "--gres gpu:h100:1 asks for a card.",
    "not_before": "--sbatch begin=22:00.",
    "window": "a partition or a reservation of the cluster may have hours.",
    "max_hours": "--time limits one run of the job, and --budget the search.",
    "after": "--sbatch dependency=afterok:NUMBER.",
    "on_reboot": "Slurm starts a job again whose node has died.",
    "on_done": "--sbatch mail-type=END.",
    "host_memory": "--mem 16GiB.",
    "cores": "--cpus 8.",
    "keep_fresh": "leave it out.",
}


def allocation_of(ctx: Any, to: str, environment: Mapping[str, str]) -> Allocation:
    """Return what a command line asks Slurm for; nothing if its job is the daemon's.

    Args:
        environment: variables that the job is given by name.

    Raises:
        UsageError: there is no such queue, a value is invalid, or an option is the other queue's.
    """
    if to not in QUEUES:
        raise UnknownNameError("queue", to, QUEUES)
    for name in _DAEMONS if to == "slurm" else _SLURMS:
        if was_typed(ctx, name):
            flag = f"--{name.replace('_', '-')}"
            if to == "slurm":
                raise UsageError(f"{flag} is for the daemon's queue, not for Slurm's", advice=_DAEMONS[name])
            raise UsageError(f"{flag} is for Slurm's queue", advice="--to slurm puts the search there.")
    asked = {name: ctx.params[name] for name in _SLURMS}
    return allocation(**{**asked, "sbatch": asked["sbatch"] or ()}, environment=environment)


def submit_to_slurm(state_dir: Path | None, asked: Sequence[tuple[JobRequest, Allocation]], *, as_json: bool) -> None:
    """Submit searches to Slurm, one after the other, and say what they are called.

    Raises:
        AutotuneError: one of them cannot be submitted. Those before it are, and are named.
    """
    require_sbatch()
    for sentence in unchecked_workloads([request for request, _ in asked]):
        typer.echo(f"autotune: {sentence}", err=True)
    queue = SlurmQueue(find_daemon(state_dir))
    jobs = []
    for request, wanted in asked:
        try:
            jobs.append(queue.submit(request, wanted))
        except AutotuneError as error:
            if jobs:
                error.advice = f"{', '.join(job.name for job in jobs)} had been submitted before. {error.advice or ''}"
            raise
    if as_json:
        rows = [{"id": j.id, "study": j.row.study, "state": j.state.value, "queue": j.row.queue} for j in jobs]
        print_json({"schema_version": SCHEMA_VERSION, "jobs": rows})
        return
    for job in jobs:
        typer.echo(f"job {job.name}: {job.row.study}")
    one = f"`autotune jobs show {jobs[0].name}` says more, `autotune jobs wait {jobs[0].name}` waits for its end."
    typer.echo(one if len(jobs) == 1 else "`autotune jobs` lists them.")
