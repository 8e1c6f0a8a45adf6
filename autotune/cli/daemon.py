"""`autotune daemon`."""

from __future__ import annotations

import collections
import contextlib
import inspect
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.base.clock import SystemClock
from autotune.base.errors import DaemonUnreachableError, MachineError, UsageError
from autotune.base.files import exclusive_lock, make_folder, write_atomic
from autotune.base.layout import DaemonFiles, find_daemon
from autotune.base.parsing import duration_s, size_bytes
from autotune.base.records import SCHEMA_VERSION
from autotune.cli.options import Json, takes, typed_words
from autotune.cli.output import print_json
from autotune.daemon.client import Client
from autotune.space.formatting import listed, seconds_text

StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="Folder of the daemon's state.",
        metavar="DIR",
        envvar="AUTOTUNE_STATE_DIR",
        show_envvar=True,
    ),
]


def client(state_dir: Path | None) -> Client:
    """Return a client of the daemon with this state folder; ``None`` stands for the user's default."""
    return Client(find_daemon(state_dir))


app = typer.Typer(help="The daemon: searches that wait for a quiet machine.", no_args_is_help=True)

Quiet = Annotated[
    str, typer.Option("--quiet-for", help="A device has to have been idle for so long.", metavar="DURATION")
]
Utilization = Annotated[
    int, typer.Option("--idle-utilization", help="A card used less is idle, in percent.", min=0, max=100)
]
Memory = Annotated[str, typer.Option("--idle-memory", help="A card with less in use is idle.", metavar="SIZE")]
Cores = Annotated[
    float | None,
    typer.Option("--idle-cores", help="The CPU is idle while others use fewer cores.  [default: a tenth]", min=0.0),
]
MetricsFile = Annotated[
    Path | None, typer.Option("--metrics-file", help="Keep the metrics in a file, as text.", metavar="FILE.prom")
]
Web = Annotated[str | None, typer.Option("--web", help="A read-only page at this address.", metavar="127.0.0.1:PORT")]

#: Time limit for a started daemon to answer, and for a stopped one to end.
_PATIENCE_S = 40.0


@app.command()
def run(
    quiet_for: Quiet = "60s",
    idle_utilization: Utilization = 5,
    idle_memory: Memory = "1GiB",
    idle_cores: Cores = None,
    metrics_file: MetricsFile = None,
    web: Web = None,
    state_dir: StateDir = None,
) -> None:
    """Be the daemon, in the foreground: for systemd, or for looking on."""
    from autotune.daemon.devices import Settings
    from autotune.daemon.page import TOKEN, require_token
    from autotune.daemon.service import run as serve

    if web is not None:
        require_token(web, os.environ.get(TOKEN))
    settings = Settings(
        quiet_s=0.0 if quiet_for in ("0", "0s") else duration_s(quiet_for, "--quiet-for"),
        utilization_percent=idle_utilization,
        memory_bytes=size_bytes(idle_memory, "--idle-memory"),
        busy_cores=idle_cores,
        metrics=None if metrics_file is None else metrics_file.expanduser().absolute(),
        web=web,
    )
    serve(find_daemon(state_dir), settings)


#: The parameters of `run`, but for the state folder.
_OF_RUN = list(inspect.signature(run, eval_str=True).parameters.values())[:-1]


@app.command()
@takes(_OF_RUN)
def start(typed: Mapping[str, Any], ctx: typer.Context, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Start the daemon in the background. Takes everything that `autotune daemon run` takes."""
    files = find_daemon(state_dir)
    if files.lock.exists() and not _is_free(files):
        raise UsageError("a daemon runs already", advice="`autotune daemon status` asks it.")
    stderr_path = files.state / "daemon.stderr"
    advice = "--state-dir names another folder."
    make_folder(files.state, advice, mode=0o700)
    try:
        stream = stderr_path.open("wb")
    except OSError as error:
        raise MachineError(f"cannot write {stderr_path}: {error.strerror}", advice=advice) from error
    with stream:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune", *_run_words(ctx, state_dir, typed)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            start_new_session=True,
        )
    clock = SystemClock()
    deadline = clock.now() + _PATIENCE_S
    while True:
        with contextlib.suppress(DaemonUnreachableError):
            status = Client(files).status()
            # A daemon with another process id was started by someone else in the meantime.
            if status["pid"] == process.pid:
                break
        if process.poll() is not None or clock.now() > deadline:
            detail = "\n".join(stderr_path.read_text(errors="replace").splitlines()[-5:])
            raise MachineError("the daemon did not start", detail=detail or None)
        clock.sleep(0.1)
    if as_json:
        print_json(status)
    else:
        typer.echo(f"the daemon runs, process {status['pid']}")


@app.command()
def stop(
    now: Annotated[bool, typer.Option("--now", help="Kill what runs instead of letting it end by itself.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """End the daemon. What runs is ended with everything measured kept, and goes on at the next start."""
    files = find_daemon(state_dir)
    pid = Client(files).stop(now=now)
    clock = SystemClock()
    deadline = clock.now() + _PATIENCE_S
    while not _is_free(files):
        if clock.now() > deadline:
            raise MachineError(f"the daemon (process {pid}) does not end", advice="`autotune daemon logs` may say why.")
        clock.sleep(0.1)
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "pid": pid, "state": "ended"})
    else:
        typer.echo("the daemon has ended")


@app.command()
def status(state_dir: StateDir = None, as_json: Json = False) -> None:
    """Say how the daemon is, and what each device does."""
    report = client(state_dir).status()
    if as_json:
        print_json(report)
        return
    typer.echo(f"{report['state']}, process {report['pid']}, for {seconds_text(report['uptime_s'])}")
    if report["trouble"]:
        typer.echo(f"nothing is started: {report['trouble']}")
    jobs = [f"{number} {state}" for state, number in report["jobs"].items() if number]
    typer.echo(f"jobs: {listed(jobs) if jobs else 'none'}")
    for device in report["devices"]:
        name = device["name"] if device["name"] == "cpu" else f"{device['name']} ({device['model']})"
        why = f": {device['why']}" if device["why"] else ""
        typer.echo(f"{name}: {device['state']}{why}")
    if report["page"]:
        typer.echo(f"page: {report['page']}")
    for note in report["notes"]:
        typer.echo(f"note: {note}")


@app.command()
def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", help="So many of the last ones.", min=1, max=10**6)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Show the daemon's log."""
    from autotune.daemon.runner import follow as follow_file

    path = find_daemon(state_dir).log
    if not path.exists():
        raise UsageError(f"there is no log at {path}", advice="no daemon has run yet.")
    with path.open(errors="replace") as stream:
        for line in collections.deque(stream, lines):
            typer.echo(line, nl=False)
    if not follow:
        return
    clock = SystemClock()
    for text in follow_file(path, from_end=True):
        if text is None:
            clock.sleep(0.2)
        else:
            typer.echo(text)


@app.command()
@takes(_OF_RUN)
def install(
    typed: Mapping[str, Any],
    ctx: typer.Context,
    folder: Annotated[
        Path | None, typer.Option("--unit-dir", help="Where the unit goes.  [default: systemd's for this user]")
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Write a systemd user unit. Takes everything that `autotune daemon run` takes."""
    from autotune.daemon.page import TOKEN, require_token
    from autotune.daemon.service import unit

    web, metrics = typed["web"], typed["metrics_file"]
    if web is not None:
        require_token(web, os.environ.get(TOKEN))
    if metrics is not None and not metrics.is_absolute():
        raise UsageError(f"--metrics-file {metrics} is not absolute", advice="a unit runs in no folder of yours.")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    place = folder or config / "systemd" / "user"
    make_folder(place, "--unit-dir names another folder.")
    path = place / "autotune.service"
    # The state folder is written out, because a unit does not inherit the environment of the user who installs it.
    words = _run_words(ctx, find_daemon(state_dir).state, typed)
    write_atomic(path, unit([sys.executable, "-P", "-m", "autotune", *words]))
    if os.environ.get(TOKEN):
        typer.echo(f"{TOKEN} is not written there: set it with `systemctl --user edit autotune`")
    typer.echo(f"written: {path}")
    typer.echo("start it, now and at every login:  systemctl --user daemon-reload")
    typer.echo("                                   systemctl --user enable --now autotune")
    typer.echo("and without a login:               loginctl enable-linger")


def _run_words(ctx: typer.Context, state_dir: Path | None, typed: Mapping[str, Any]) -> list[str]:
    where = [] if state_dir is None else ["--state-dir", str(state_dir.expanduser().absolute())]
    return ["daemon", "run", *where, *typed_words(ctx, typed)]


def _is_free(files: DaemonFiles) -> bool:
    with exclusive_lock(files.lock) as free:
        return free
