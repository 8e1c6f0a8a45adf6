"""`autotune jobs`."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.text import Text

from autotune.base.clock import SystemClock
from autotune.base.errors import DaemonUnreachableError, MachineError, NoVerdictError, UsageError
from autotune.base.layout import DaemonFiles, find_daemon
from autotune.base.parsing import duration_s
from autotune.base.records import ENDED, SCHEMA_VERSION, Done, Job, JobRow, JobState, Running
from autotune.cli.daemon import StateDir, client
from autotune.cli.options import Json, refuse_group_options
from autotune.cli.output import print_json, print_rich
from autotune.cluster.slurm_queue import PREFIX, SlurmJob, SlurmQueue, SlurmRow
from autotune.daemon.client import Client
from autotune.daemon.runner import follow, tell
from autotune.report.document import pairs
from autotune.report.panel import observer_for
from autotune.space.formatting import count, one_line, seconds_text
from autotune.workload.catalog import source_hash

# ``autotune jobs``: list, inspect, control and watch the daemon's jobs, and those in Slurm's queue, which are named
# ``slurm:NUMBER``.


def _slurms_number(text: str) -> int | None:
    """Return the number of a Slurm job; ``None`` if the text does not name one."""
    if not text.startswith(PREFIX):
        return None
    number = text.removeprefix(PREFIX)
    if not number.isascii() or not number.isdigit():
        raise UsageError(
            f"{text!r} is no job of Slurm's", advice=f"write it as {PREFIX}17; `autotune jobs` lists them."
        )
    return int(number)


def _daemons_number(text: str) -> int:
    """Return the number of one of the daemon's jobs, for a command that only works on those."""
    number = _slurms_number(text)
    if number is not None:
        raise UsageError(
            f"{text} is in Slurm's queue, which this command does not reach",
            advice=f"`scontrol hold {number}`, `scontrol release {number}` and `scontrol requeue {number}` do.",
        )
    return int(text)


app = typer.Typer(invoke_without_command=True, no_args_is_help=False)
Id = Annotated[int, typer.Argument(help="A job's number.", metavar="ID", parser=_daemons_number)]
#: For the commands that also work on Slurm's jobs.
AnyId = Annotated[str, typer.Argument(help="A job's number, or slurm:NUMBER.", metavar="ID")]

#: Number of ended jobs that are listed without ``--all``.
_LATEST = 20
#: Interval in seconds at which `wait` asks the daemon for a job's state.
_EVERY_S = 0.5
#: Shortest and longest interval in seconds at which `wait` polls Slurm, whose controller has other things to do. In
#: between, the interval is a tenth of the time waited so far.
_SLURM_SOONEST_S, _SLURM_LATEST_S = 5.0, 60.0
#: Exit code of `wait` after ``--timeout``, as in timeout(1).
_TIMED_OUT = 124
_STYLES = {
    JobState.RUNNING: "bold cyan",
    JobState.PAUSED: "yellow",
    JobState.DONE: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "dim",
}


@app.callback()
def jobs(
    ctx: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="List every job that has ended, too.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """List the daemon's jobs and Slurm's, or do something with one of them."""
    if ctx.invoked_subcommand is not None:
        refuse_group_options(ctx)
        return
    files = find_daemon(state_dir)
    # Either queue may be empty: a machine of a cluster needs no daemon.
    rows = rows_of(files, must_answer=SlurmQueue(files).is_empty())
    if as_json:
        dumped = [{"queue": "daemon", **row.model_dump(mode="json")} for row in rows]
        print_json({"schema_version": SCHEMA_VERSION, "jobs": dumped})
        return
    if not rows:
        typer.echo("no job yet; `autotune submit --model NAME` leaves one to the daemon.")
        return
    waiting = [row for row in rows if row.state not in ENDED]
    ended = sorted((row for row in rows if row.state in ENDED), key=lambda row: (isinstance(row, SlurmRow), row.id))
    shown = ended if every else ended[-_LATEST:]
    _print_rows([*shown, *sorted(waiting, key=lambda row: row.state is not JobState.RUNNING)])
    if len(shown) < len(ended):
        typer.echo(f"and {count(len(ended) - len(shown), 'job')} that ended earlier; --all lists them.")


def rows_of(files: DaemonFiles, *, must_answer: bool) -> list[JobRow]:
    """Return the jobs of both queues. If there is no daemon, its jobs are left out, unless it ``must_answer``."""
    rows: list[JobRow] = []
    try:
        rows += Client(files).rows()
    except DaemonUnreachableError:
        if must_answer:
            raise
    listing = SlurmQueue(files).look()
    for trouble in listing.troubles:
        typer.echo(f"autotune: {trouble}", err=True)
    return [*rows, *(job.row for job in listing.jobs)]


def _number(job: str) -> int:
    """Return the number of one of the daemon's jobs."""
    try:
        return int(job)
    except ValueError:
        raise UsageError(f"{job[:60]!r} is no job's number", advice="`autotune jobs` lists them.") from None


def _slurm(state_dir: Path | None) -> SlurmQueue:
    return SlurmQueue(find_daemon(state_dir))


@app.command()
def show(name: AnyId, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Show everything about a job."""
    slurm_number = _slurms_number(name)
    if slurm_number is not None:
        slurm_job = _slurm(state_dir).job(slurm_number)
        value, facts = _as_json(slurm_job), _slurms_facts(slurm_job)
    else:
        number, daemon = _number(name), client(state_dir)
        job, waits = daemon.job(number), daemon.waits_for(number)
        value = {**_as_json(job), "waits": waits}
        facts = _facts(job, waits, find_daemon(state_dir).queue.job(number).log)
    if as_json:
        print_json(value)
        return
    print_rich(
        Group(*pairs((title, one_line(text), title in ("model", "study", "log")) for title, text in facts if text))
    )


@app.command()
def cancel(name: AnyId, state_dir: StateDir = None, as_json: Json = False) -> None:
    """End a job for good; what was measured stays in its study."""
    slurm_number = _slurms_number(name)
    if slurm_number is None:
        _print_job(client(state_dir).cancel(_number(name)), as_json)
        return
    job = _slurm(state_dir).cancel(slurm_number)
    _print_job(job, as_json, pending=None if job.state in ENDED else JobState.CANCELLED)


@app.command()
def pause(number: Id, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Set a job aside; what was measured is kept."""
    _print_job(client(state_dir).pause(number), as_json)


@app.command()
def resume(number: Id, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Let a paused job go on."""
    _print_job(client(state_dir).resume(number), as_json)


@app.command()
def retry(number: Id, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Queue a job again that failed or was cancelled; it goes on with its study."""
    daemon = client(state_dir)
    sources = {path: source_hash(Path(path)) for path in daemon.job(number).request.sources}
    _print_job(daemon.retry(number, sources), as_json)


@app.command()
def log(name: AnyId, state_dir: StateDir = None) -> None:
    """Print what a job's processes wrote."""
    slurm_number = _slurms_number(name)
    if slurm_number is not None:
        path, silent = Path(_slurm(state_dir).job(slurm_number).log), f"job {name} has written nothing yet"
    else:
        number = _number(name)
        client(state_dir).job(number)
        path = find_daemon(state_dir).queue.job(number).log
        silent = f"job {number} has written nothing; `autotune jobs attach {number}` shows what it says"
    written = path.read_text(errors="replace") if path.exists() else ""
    typer.echo(written, nl=False)
    if not written:
        typer.echo(silent, err=True)


@app.command(name="let-go")
def let_go(number: Id, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Do not keep the job's profile fresh any more."""
    job = client(state_dir).let_go(number)
    if as_json:
        _print_job(job, as_json)
    else:
        typer.echo(f"the profile of job {number} is not kept fresh any more")


@app.command()
def wait(
    name: AnyId,
    timeout: Annotated[str | None, typer.Option("--timeout", help="Give up after this.", metavar="DURATION")] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Wait until a job has ended; the exit code is its own (130 if it was cancelled, 124 after --timeout)."""
    clock = SystemClock()
    began = clock.now()
    deadline = math.inf if timeout is None else began + duration_s(timeout, "--timeout")
    slurm_number = _slurms_number(name)
    if slurm_number is None:
        number, daemon = _number(name), client(state_dir)
    job: Job | SlurmJob = daemon.job(number) if slurm_number is None else _slurm(state_dir).job(slurm_number)
    while job.state not in ENDED:
        if clock.now() >= deadline:
            typer.echo(f"autotune: job {name} is {job.state.value} after {timeout}", err=True)
            raise typer.Exit(_TIMED_OUT)
        if slurm_number is None:
            clock.sleep(_EVERY_S)
            # The daemon may be restarted in the meantime.
            job = _retry_unreachable(lambda: daemon.job(number), clock)
            continue
        every_s = min(_SLURM_LATEST_S, max(_SLURM_SOONEST_S, (clock.now() - began) / 10))
        clock.sleep(min(every_s, max(0.1, deadline - clock.now())))
        try:
            job = _slurm(state_dir).job(slurm_number)
        except MachineError as error:
            # Slurm's controller may be restarting.
            typer.echo(f"autotune: {error}", err=True)
    _print_job(job, as_json)
    if exit_code_of(job):
        raise typer.Exit(exit_code_of(job))


@app.command()
def attach(number: Id, state_dir: StateDir = None) -> None:
    """Watch a running job, or see what one that has ended told last; Ctrl-C stops watching and leaves it alone."""
    clock = SystemClock()
    daemon = client(state_dir)
    job = daemon.job(number)
    events = find_daemon(state_dir).queue.job(number).events
    if job.state is not JobState.RUNNING and not (job.state in ENDED and events.exists()):
        raise UsageError(f"job {number} is {job.state.value}", advice=f"`autotune jobs show {number}` says more.")
    console = Console(stderr=True)
    observer = observer_for(console.is_terminal, clock)
    asked_at = clock.now()
    try:
        for line in follow(events):
            if line is not None:
                tell(line, observer)
                continue
            if job.state in ENDED:
                break
            if clock.now() - asked_at >= 2 * _EVERY_S:
                asked_at = clock.now()
                job = _retry_unreachable(lambda: daemon.job(number), clock)
                if job.state is not JobState.RUNNING:
                    break
            clock.sleep(_EVERY_S / 2)
    except KeyboardInterrupt:
        typer.echo(f"\njob {number} goes on", err=True)
        return
    finally:
        observer.ends()
    _print_job(job, as_json=False)


def exit_code_of(job: Job | SlurmJob) -> int:
    """Return the exit code of `wait` for a job that has ended."""
    if job.state is JobState.CANCELLED:
        return 128 + signal.SIGINT
    if isinstance(job, Job) and isinstance(job.status, Done):
        return NoVerdictError.exit_code if job.status.open else 0
    code = job.exit_code if isinstance(job, SlurmJob) else getattr(job.status, "exit_code", None)
    return code or (MachineError.exit_code if job.state is JobState.FAILED else 0)


def _retry_unreachable(ask: Callable[[], Job], clock: SystemClock, limit_s: float = 20.0) -> Job:
    deadline = clock.now() + limit_s
    while True:
        try:
            return ask()
        except DaemonUnreachableError:
            if clock.now() >= deadline:
                raise
            clock.sleep(_EVERY_S)


def _print_job(job: Job | SlurmJob, as_json: bool, pending: JobState | None = None) -> None:
    """Print what has become of a job, or its ``pending`` state, if it is asked to end."""
    if as_json:
        print_json(_as_json(job))
        return
    if isinstance(job, SlurmJob):
        name, why = job.name, job.why
    else:
        name, why = str(job.id), getattr(job.status, "why", None) or getattr(job.status, "found", None)
        pending = _pending(job)
    if pending is not None:
        typer.echo(f"job {name} is asked to end; it will be {pending.value}")
    else:
        typer.echo(f"job {name} is {job.state.value}{f': {why}' if why else ''}")


def _as_json(job: Job | SlurmJob) -> dict[str, Any]:
    return job.model_dump(mode="json") | ({"queue": job.row.queue} if isinstance(job, SlurmJob) else {})


def _print_rows(rows: list[JobRow]) -> None:
    """Print a line for each job. Nothing is truncated: on a terminal that is too narrow, the reasons get lines of their
    own, and the terminal wraps what is still too long."""
    cells = [
        ("job", "state", "study", "priority", "device", "since"),
        *(
            (
                *(row.name, row.state.value, row.study, str(row.priority or "")),
                (row.device or "") if isinstance(row, SlurmRow) else _device(row.device),
                _when(row.ended or row.since or row.submitted),
            )
            for row in rows
        ),
    ]
    # Columns that would be empty are left out.
    used = [column for column in zip(*cells, strict=True) if any(column[1:])]
    wide = [max(map(cell_len, column)) for column in used]
    console = Console(highlight=False)
    reasons = ["", *(" ".join(row.reason.split()) for row in rows)]
    room = console.width - sum(wide) - 2 * len(wide) if console.is_terminal else None
    narrow = room is not None and max(map(cell_len, reasons)) > room
    for line, (row, reason) in enumerate(zip([None, *rows], reasons, strict=True)):
        padded = [set_cell_size(column[line], size) for column, size in zip(used, wide, strict=True)]
        text = Text("  ".join(padded), style="bold" if row is None else "")
        if row is not None:
            text.stylize(_STYLES.get(row.state, ""), wide[0] + 2, wide[0] + 2 + wide[1])
        if reason and not narrow:
            text.append(f"  {reason}")
        text.rstrip()
        console.print(text, soft_wrap=True)
        if reason and narrow:
            console.print(Text(f"{' ' * wide[0]}  {reason}"), soft_wrap=True)


def _facts(job: Job, waits: str | None, log: Path) -> list[tuple[str, str]]:
    request, status, pending = job.request, job.status, _pending(job)
    spec = request.spec
    window = (
        "" if request.window is None else "–".join(f"{minute // 60:02}:{minute % 60:02}" for minute in request.window)
    )
    return [
        ("job", f"{job.id}, {job.state.value}" + ("" if pending is None else f", and will be {pending.value}")),
        ("found", getattr(status, "found", None) or ""),
        ("why", getattr(status, "why", None) or ""),
        ("waits", waits or ""),
        ("exit code", str(getattr(status, "exit_code", None) or "")),
        ("model", request.replay or spec.model),
        ("study", "" if request.replay else f"{request.studies_dir}/{spec.name}"),
        ("budget", seconds_text(spec.budget_s)),
        ("device", _device(getattr(status, "device", None) or job.placed)),
        ("submitted", _when(job.submitted)),
        ("since", _when(getattr(status, "since", "") or getattr(status, "ended", ""))),
        ("ran", f"{count(job.runs, 'time')}, {seconds_text(job.spent_s)} in all" if job.runs else ""),
        ("priority", str(request.priority or "")),
        ("not before", "" if request.not_before is None else _local(datetime.fromtimestamp(request.not_before))),
        ("window", window),
        ("after", "" if request.after is None else f"job {request.after}"),
        ("at most", "" if request.max_s is None else f"{seconds_text(request.max_s)} of running"),
        ("on done", f"{request.on_done} ({job.notice})" if request.on_done else ""),
        ("fresh", "searched again when the machine or the workload changes" if request.keep_fresh else ""),
        ("log", str(log) if job.runs else ""),
    ]


def _slurms_facts(job: SlurmJob) -> list[tuple[str, str]]:
    return [
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


def _pending(job: Job) -> JobState | None:
    pending = job.status.then if isinstance(job.status, Running) else None
    return None if pending is None else pending.state


def _device(name: str | None) -> str:
    # The first group of a UUID is enough to distinguish the cards of one machine.
    return "-".join((name or "").split("-")[:2])


def _when(moment: str) -> str:
    return _local(datetime.fromisoformat(moment).astimezone()) if moment else ""


def _local(moment: datetime) -> str:
    year = "" if moment.year == datetime.now().year else " %Y"
    return moment.strftime(f"%d %b{year} %H:%M")


# Times of day and moments, as the options of `autotune submit` take them.


def moment(text: str, now: datetime) -> float:
    """Convert ``22:00`` (its next occurrence), an ISO 8601 date and time, or ``+2h`` to UNIX seconds.

    Args:
        now: the current time with its time zone, which applies to times without one.

    Raises:
        UsageError: the text is none of these.
    """
    if text.startswith("+"):
        seconds = now.timestamp() + duration_s(text[1:], "--not-before")
    elif re.fullmatch(r"\d{1,2}:\d{2}", text):
        minute = minute_of_day(text, "--not-before")
        # In this machine's zone without one, so that `timestamp` uses the UTC offset of that day and not of today.
        is_local = now.utcoffset() == now.astimezone().utcoffset()
        zone = None if is_local else now.tzinfo
        today = now.replace(hour=minute // 60, minute=minute % 60, second=0, microsecond=0, tzinfo=zone)
        days = (today + timedelta(days=passed) for passed in range(2))
        seconds = next(day.timestamp() for day in days if day.timestamp() > now.timestamp())
    else:
        try:
            # timestamp() reads a time without a zone in this machine's zone, with the UTC offset at that time.
            seconds = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError):
            raise UsageError(
                f"--not-before {text!r} is no time", advice="write it as 22:00, 2026-11-23T22:00 or +2h."
            ) from None
    try:
        datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--not-before {text!r} is further ahead than the calendar reaches") from None
    return seconds


def window_of(text: str) -> tuple[int, int]:
    """Convert ``22:00-07:00`` to two times of day, in minutes after midnight.

    Raises:
        UsageError: the text is not a window, or the window is empty.
    """
    opens, dash, closes = text.partition("-")
    if not dash:
        raise UsageError(f"--window {text!r} is no window", advice="write it as 22:00-07:00.")
    minutes = minute_of_day(opens, "--window"), minute_of_day(closes, "--window")
    if minutes[0] == minutes[1]:
        raise UsageError(f"--window {text!r} begins when it ends", advice="leave it out to run at any time.")
    return minutes


def minute_of_day(text: str, option: str) -> int:
    """Convert ``22:00`` to minutes after midnight.

    Raises:
        UsageError: the text is not a time of day.
    """
    match = re.fullmatch(r"\s*(\d{1,2}):(\d{2})\s*", text)
    if not match or int(match[1]) > 24 or int(match[2]) > 59 or 60 * int(match[1]) + int(match[2]) > 24 * 60:
        raise UsageError(f"{option}: {text!r} is no time of day", advice="write it as 22:00.")
    return (60 * int(match[1]) + int(match[2])) % (24 * 60)
