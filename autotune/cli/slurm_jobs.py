"""``autotune jobs`` for jobs in Slurm's queue, which are named ``slurm:NUMBER``."""

from __future__ import annotations

import signal
from pathlib import Path

import typer
from rich.console import Group

from autotune.base.clock import Clock
from autotune.base.errors import MachineError, UsageError
from autotune.base.layout import find_daemon
from autotune.base.records import ENDED, JobState
from autotune.cli.output import print_json, print_rich
from autotune.cluster.slurm_queue import PREFIX, SlurmJob, SlurmQueue
from autotune.report.document import pairs
from autotune.space.formatting import one_line

#: Shortest and longest interval in seconds at which `wait` polls Slurm, whose controller has other things to do. In
#: between, the interval is a tenth of the time waited so far.
_SOONEST_S, _LATEST_S = 5.0, 60.0


def slurm_queue(state_dir: Path | None) -> SlurmQueue:
    """Return the jobs submitted with this state folder; ``None`` stands for the user's default."""
    return SlurmQueue(find_daemon(state_dir))


def slurms_number(text: str) -> int | None:
    """Return the number of a Slurm job; ``None`` if the text does not name one.

    Raises:
        UsageError: it has the prefix of one, but no number.
    """
    if not text.startswith(PREFIX):
        return None
    number = text.removeprefix(PREFIX)
    if not number.isascii() or not number.isdigit():
        raise UsageError(
            f"{text!r} is no job of Slurm's", advice=f"write it as {PREFIX}17; `autotune jobs` lists them."
        )
    return int(number)


def refuse_slurms(text: str) -> int:
    """Return the number of one of the daemon's jobs, for a command that only works on those.

    Raises:
        UsageError: the job is Slurm's.
        ValueError: the text is not a number.
    """
    number = slurms_number(text)
    if number is not None:
        raise UsageError(
            f"{text} is in Slurm's queue, which this command does not reach",
            advice=f"`scontrol hold {number}`, `scontrol release {number}` and `scontrol requeue {number}` do.",
        )
    return int(text)


def show(job: SlurmJob, *, as_json: bool) -> None:
    """Print everything about a job."""
    if as_json:
        print_json({**job.model_dump(mode="json"), "queue": job.row.queue})
        return
    facts = [
        ("job", f"{job.name}, {job.state.value}"),
        ("why", job.why or ""),
        ("exit code", "" if job.exit_code is None else str(job.exit_code)),
        ("model", job.model),
        ("study", job.study),
        ("node", job.node),
        ("submitted", job.submitted),
        ("since", job.row.since or ""),
        ("log", job.log),
    ]
    print_rich(
        Group(*pairs((name, one_line(value), name in ("model", "study", "log")) for name, value in facts if value))
    )


def print_state(job: SlurmJob, *, as_json: bool) -> None:
    """Print what has become of a job."""
    if as_json:
        show(job, as_json=True)
    else:
        typer.echo(f"job {job.name} is {job.state.value}{f': {job.why}' if job.why else ''}")


def cancel(queue: SlurmQueue, number: int, *, as_json: bool) -> None:
    """End a job for good, and print its state."""
    job = queue.cancel(number)
    if as_json or job.state in ENDED:
        print_state(job, as_json=as_json)
    else:
        typer.echo(f"job {job.name} is asked to end; it will be {JobState.CANCELLED.value}")


def log(job: SlurmJob) -> None:
    """Print what a job's processes wrote."""
    path = Path(job.log)
    written = path.read_text(errors="replace") if path.exists() else ""
    typer.echo(written, nl=False)
    if not written:
        typer.echo(f"job {job.name} has written nothing yet", err=True)


def wait(queue: SlurmQueue, number: int, clock: Clock, *, deadline: float | None, as_json: bool) -> SlurmJob | None:
    """Wait until a job has ended, and print what has become of it; return ``None`` if it has not by the deadline."""
    job, began = queue.job(number), clock.now()
    while job.state not in ENDED:
        if deadline is not None and clock.now() >= deadline:
            typer.echo(f"autotune: job {job.name} is {job.state.value}", err=True)
            return None
        every_s = min(_LATEST_S, max(_SOONEST_S, (clock.now() - began) / 10))
        clock.sleep(every_s if deadline is None else min(every_s, max(0.1, deadline - clock.now())))
        try:
            job = queue.job(number)
        except MachineError as error:
            # Slurm's controller may be restarting.
            typer.echo(f"autotune: {error}", err=True)
    print_state(job, as_json=as_json)
    return job


def exit_code_of(job: SlurmJob) -> int:
    """Return the exit code of `wait` for a job that has ended."""
    if job.state is JobState.CANCELLED:
        return 128 + signal.SIGINT
    return job.exit_code or 0 if job.state is JobState.DONE else job.exit_code or MachineError.exit_code
