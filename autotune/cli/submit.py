"""``autotune submit``: submit a search to the daemon."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from autotune.catalog import find_objective, source_hash
from autotune.cli.daemon_client import StateDir, client
from autotune.cli.options import Json, make_spec, was_typed
from autotune.cli.output import print_json
from autotune.cli.replay import refuse_beside_replay
from autotune.cli.workload_check import unchecked_workloads
from autotune.errors import AutotuneError, UsageError
from autotune.files import read_regular
from autotune.parsing import duration_s, size_bytes
from autotune.records import SCHEMA_VERSION, JobRequest
from autotune.replay import read_surface
from autotune.search.request import check_request, check_study_name
from autotune.search.script import script_of

#: Environment variables that locate programs, libraries and data. They are passed on to the job; ``--env`` adds more.
_FORWARDED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|HOME|LANG|LC_.*|TMPDIR|CC|CXX|CUDA_HOME|CUDA_DEVICE_ORDER"
    r"|HF_HOME|TORCH_HOME|XDG_(CACHE|DATA|CONFIG)_HOME|OMP_NUM_THREADS|NO_COLOR"
)
_YAML_BYTES = 2**20
#: A century. What is longer is a slip.
_MOST_HOURS = 100 * 366 * 24
_MOST_BYTES = 2**60
#: Options that concern the call, not the job.
_CALL_OPTIONS = ("file", "state_dir", "as_json")


@dataclass(frozen=True)
class When:
    """The options of `submit` itself: when a job may run, and with which resources."""

    priority: int
    gpu: str
    not_before: float | None
    window: tuple[int, int] | None
    max_s: float | None
    after: int | None
    on_reboot: Literal["resume", "pause"]
    on_done: str | None
    host_memory_bytes: int | None
    cores: int | None
    environment: dict[str, str]
    keep_fresh: bool


def command(
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
    file: Annotated[
        Path | None, typer.Option("--file", help="Several jobs, as YAML; see the documentation.", metavar="FILE.yaml")
    ] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Leave a search to the daemon. Takes everything that `autotune search` takes, a command behind -- as well."""
    try:
        Path.cwd()
    except OSError:
        raise UsageError("this folder is not there any more", advice="change to one that is.") from None
    if file is not None:
        # Options on the command line are defaults for all jobs of the file.
        given = [*_typed(ctx), *ctx.args]
        requests = []
        for number, words in enumerate(read_jobs(file), 1):
            with _error_prefix(f"{file}, job {number}"):
                requests.append(_parsed(ctx, [*given, *words]))
    else:
        requests = [_request(ctx, ctx.params, ctx.args)]
    asked = client(state_dir)
    # Where no daemon runs, nothing is imported.
    asked.status()
    for sentence in unchecked_workloads(requests):
        typer.echo(f"autotune: {sentence}", err=True)
    jobs = asked.submit(*requests)
    if as_json:
        rows = [{"id": job.id, "study": job.request.spec.name, "state": job.state.value} for job in jobs]
        print_json({"schema_version": SCHEMA_VERSION, "jobs": rows})
        return
    for job in jobs:
        waits = asked.waits_for(job.id)
        typer.echo(f"job {job.id}: {job.request.spec.name}{'' if waits is None else f'; it waits: {waits}'}")
    one = f"`autotune jobs show {jobs[0].id}` says more, `autotune jobs wait {jobs[0].id}` waits for its end."
    typer.echo(one if len(jobs) == 1 else "`autotune jobs` lists them.")


def read_jobs(path: Path) -> list[list[str]]:
    """Read the jobs of a YAML file, each as the words of a command line after ``autotune submit``.

    The file has a list ``jobs`` of mappings from options to values, and optionally a mapping ``defaults`` that applies
    to all of them. A list of values repeats the option, and a mapping stands for NAME=VALUE.

    Raises:
        UsageError: the file cannot be read, or does not have this form.
    """
    try:
        found = YAML(typ="safe", pure=True).load(read_regular(path, _YAML_BYTES, follow=True).decode())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    jobs = found.get("jobs") if isinstance(found, dict) else None
    defaults = found.get("defaults", {}) if isinstance(found, dict) else None
    well_formed = isinstance(jobs, list) and jobs and isinstance(defaults, dict)
    if not well_formed or not all(isinstance(job, dict) for job in cast(list[Any], jobs)):
        raise UsageError(
            f"{path} holds no list of jobs", advice="write `jobs:`, and under it `- model: resnet50` for each."
        )
    unknown = set(found) - {"jobs", "defaults"}
    if unknown:
        raise UsageError(f"{path}: {sorted(map(str, unknown))[0]!r} is neither jobs nor defaults")
    return [_words({**cast(dict[str, Any], defaults), **job}, path) for job in cast(list[dict[str, Any]], jobs)]


def _words(options: Mapping[str, Any], path: Path) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        option = f"--{str(name).replace('_', '-')}"
        for one in _settings(value) if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            if isinstance(one, dict | list) or one is None:
                raise UsageError(f"{path}: {name} has no value that an option can have")
            if one is not False:
                words += [option] if one is True else [option, str(one)]
    return words


def _settings(value: Mapping[str, Any]) -> list[str]:
    """Return ``batch_size=32,64`` for ``{batch_size: [32, 64]}``."""
    texts = {name: one if isinstance(one, list) else [one] for name, one in value.items()}
    return [
        f"{name}={','.join(str(v).lower() if isinstance(v, bool) else str(v) for v in vs)}"
        for name, vs in texts.items()
    ]


@contextlib.contextmanager
def _error_prefix(where: str) -> Iterator[None]:
    """Prefix the message of every error with ``where``."""
    try:
        yield
    except AutotuneError as error:
        raise UsageError(f"{where}: {error}", advice=error.advice) from error
    except Exception as error:
        # Errors of the command-line parser: Typer may use click or its own copy of it, so the class is not known.
        if not hasattr(error, "format_message"):
            raise
        raise UsageError(f"{where}: {error.format_message().rstrip('.')}") from error


def _typed(ctx: typer.Context) -> list[str]:
    """Return the options of `submit` itself on the command line, as words, without `_CALL_OPTIONS`."""
    words: list[str] = []
    for name, value in ctx.params.items():
        if name in _CALL_OPTIONS or not was_typed(ctx, name):
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    return words


def _parsed(ctx: typer.Context, words: list[str]) -> JobRequest:
    """Return the request of one job of a file. Its words are parsed as a command line."""
    with ctx.command.make_context("submit", list(words), parent=ctx.parent) as own:
        for name in _CALL_OPTIONS:
            if was_typed(own, name):
                raise UsageError(f"--{name.replace('_', '-').removeprefix('as-')} cannot stand in a list of jobs")
        return _request(own, own.params, own.args)


def _request(ctx: Any, params: Mapping[str, Any], words: list[str]) -> JobRequest:
    when = _when(params)
    search = ctx.parent.command.commands["search"]
    with search.make_context("search", list(words), parent=ctx.parent) as own:
        asked = own.params
    if asked["dry_run"]:
        raise UsageError("--dry-run submits nothing", advice="`autotune search --dry-run` says what would be tried.")
    replay: Path | None = asked["replay"]
    spec = make_spec(asked, asked["words"] or ())
    if spec.device.partition(":")[2].isdigit():
        raise UsageError(
            f"--device {spec.device} means another card for the daemon, perhaps",
            advice="name it by UUID, --device cuda:GPU-…, or by model, --gpu h200; `autotune doctor` lists them.",
        )
    if spec.device == "cpu" and when.gpu != "any":
        raise UsageError(f"--device cpu and --gpu {when.gpu} contradict each other")
    check_study_name(spec.name)
    sources = {}
    if replay is None:
        ref = check_request(spec)
        label = ref.name
        # Built-in workloads are not watched: they change with autotune itself.
        script = None if spec.command is None else script_of(spec.command)
        watched = str(script.absolute()) if script is not None else ref.path if spec.model == ref.path else None
        if watched is not None:
            sources[watched] = ref.sha256
    else:
        refuse_beside_replay(asked, names=("study", "studies_dir"))
        read_surface(replay)
        find_objective(spec.objective)
        label = f"replay-{replay.stem}"
    if spec.objective.endswith(".py"):
        sources[spec.objective] = source_hash(Path(spec.objective))
    return JobRequest(
        spec=spec,
        label=label,
        studies_dir=os.path.realpath(Path(asked["studies_dir"]).expanduser()),
        replay=None if replay is None else str(replay.expanduser().absolute()),
        folder=str(Path.cwd()),
        python=sys.executable,
        sources=sources,
        **vars(when),
    )


def _when(params: Mapping[str, Any]) -> When:
    policy, target = params["on_reboot"], params["on_done"] or ""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", target) and not target.startswith(("http://", "https://")):
        raise UsageError(f"--on-done {target!r} is neither a command nor an http(s) address")
    if policy not in ("resume", "pause"):
        raise UsageError(f"--on-reboot is resume or pause, not {policy!r}")
    hours, memory = params["max_hours"], params["host_memory"]
    if memory is not None and size_bytes(memory, "--host-memory") > _MOST_BYTES:
        raise UsageError(f"--host-memory {memory} is more than any machine has")
    if hours is not None and not 0 < hours <= _MOST_HOURS:
        raise UsageError(f"--max-hours must be above zero and at most {_MOST_HOURS:,}, not {hours:g}")
    return When(
        priority=params["priority"],
        gpu=params["gpu"],
        not_before=None if params["not_before"] is None else moment(params["not_before"], datetime.now().astimezone()),
        window=None if params["window"] is None else window_of(params["window"]),
        max_s=None if hours is None else 3600 * hours,
        after=params["after"],
        on_reboot=policy,
        on_done=params["on_done"],
        host_memory_bytes=None if memory is None else size_bytes(memory, "--host-memory"),
        cores=params["cores"],
        environment=_environment(params["env"] or ()),
        keep_fresh=params["keep_fresh"],
    )


def _environment(asked: Any) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if _FORWARDED.fullmatch(name)}
    for one in asked:
        name, equals, value = one.partition("=")
        if not equals:
            if name not in os.environ:
                raise UsageError(f"--env {name}: there is no such variable here", advice="--env NAME=VALUE sets one.")
            value = os.environ[name]
        found[name] = value
    return found


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
        today = now.replace(hour=minute // 60, minute=minute % 60, second=0, microsecond=0)
        seconds = (today if today > now else today + timedelta(days=1)).timestamp()
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
    found = minute_of_day(opens, "--window"), minute_of_day(closes, "--window")
    if found[0] == found[1]:
        raise UsageError(f"--window {text!r} begins when it ends", advice="leave it out to run at any time.")
    return found


def minute_of_day(text: str, option: str) -> int:
    """Convert ``22:00`` to minutes after midnight.

    Raises:
        UsageError: the text is not a time of day.
    """
    found = re.fullmatch(r"\s*(\d{1,2}):(\d{2})\s*", text)
    if not found or int(found[1]) > 24 or int(found[2]) > 59 or 60 * int(found[1]) + int(found[2]) > 24 * 60:
        raise UsageError(f"{option}: {text!r} is no time of day", advice="write it as 22:00.")
    return (60 * int(found[1]) + int(found[2])) % (24 * 60)
