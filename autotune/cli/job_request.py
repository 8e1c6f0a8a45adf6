"""The request of a job, from options or a file, for the daemon or for Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from autotune.base.errors import UnknownNameError, UsageError, WorkloadError, by_exit_code
from autotune.base.parsing import size_bytes
from autotune.base.records import JobRequest, WorkloadRef
from autotune.cli.jobs import moment, window_of
from autotune.cli.options import flag, make_spec, was_typed
from autotune.cli.search import refuse_beside_replay
from autotune.cluster.slurm_queue import Allocation, allocation
from autotune.search.replay import read_surface
from autotune.search.request import check_request
from autotune.search.study_folders import check_study_name
from autotune.search.subject import script_of
from autotune.study.storage_url import SECRET_VARIABLES
from autotune.workload.catalog import find_objective, find_workload, source_hash

# Checks a workload on submission, in a separate process, so that it does not fail hours later.

#: A check is given up after this many seconds. Importing torch takes most of a usual one.
LIMIT_S = 60.0
_BYTES = 2**16


def unchecked_workloads(requests: Sequence[JobRequest]) -> list[str]:
    """Check the user's own workloads; return a sentence for each that could not be checked.

    Raises:
        AutotuneError: one of them is not a workload.
    """
    # Built-in workloads need no check, and a file of jobs may name the same workload many times.
    workloads = {
        (ref.model_dump_json(), tuple(sorted(request.environment.items()))): (ref, request.environment)
        for request in requests
        if request.replay is None and request.spec.command is None and request.label != request.spec.model
        for ref in [find_workload(request.spec.model, request.spec.args)]
    }
    sentences = [check_workload(ref, environment) for ref, environment in workloads.values()]
    return [sentence for sentence in sentences if sentence is not None]


def check_workload(ref: WorkloadRef, environment: Mapping[str, str], *, limit_s: float = LIMIT_S) -> str | None:
    """Import a workload in a child process, in the environment of its job.

    Returns:
        Why it could not be checked, as a sentence; ``None`` if it is a workload.

    Raises:
        WorkloadError: it cannot be imported, or is not a workload.
        UsageError: it does not accept these arguments.
    """
    with tempfile.TemporaryFile() as answer:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autotune.child.check_workload", str(answer.fileno())],
                env=dict(environment),
                pass_fds=[answer.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as failed:
            return f"{ref.name} was not checked: no process could be started ({failed.strerror})."
        try:
            process.communicate(ref.model_dump_json().encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"{ref.name} was not checked: importing it took longer than {limit_s:.0f} s."
        finally:
            # Also end whatever it has started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answer.seek(0)
        text = answer.read(_BYTES)
    try:
        report = json.loads(text)
    except ValueError:
        raise WorkloadError(
            f"{ref.name} cannot be imported: it ended its process with {_ended(process.returncode)}",
            advice=f"`python -c 'import {ref.module}'` may show why.",
        ) from None
    if report:
        error = by_exit_code(report["exit_code"])(report["message"], advice=report.get("advice"))
        error.detail = report.get("detail")
        raise error
    return None


def _ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


# ``autotune submit --to slurm``: what a job requests from Slurm.

QUEUES = ("daemon", "slurm")
#: Options of `submit` that only Slurm's queue supports.
_SLURMS = ("partition", "gres", "time", "cpus", "mem", "account", "qos", "sbatch")
#: Those that only the daemon's queue supports, each with what to write for Slurm.
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


def _refuse_other_queues(ctx: Any, to: str) -> None:
    """Refuse options that belong to the other queue, and a queue that there is not."""
    if to not in QUEUES:
        raise UnknownNameError("queue", to, QUEUES)
    for name in _DAEMONS if to == "slurm" else _SLURMS:
        if was_typed(ctx, name):
            if to == "slurm":
                raise UsageError(f"{flag(name)} is for the daemon's queue, not for Slurm's", advice=_DAEMONS[name])
            raise UsageError(f"{flag(name)} is for Slurm's queue", advice="--to slurm puts the search there.")


# The request of a job, from the words of a command line after ``autotune submit``.

#: Environment variables that locate programs, libraries and data. They are passed on to the job; ``--env`` adds more.
_FORWARDED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|HOME|LANG|LC_.*|TMPDIR|CC|CXX|CUDA_HOME|CUDA_DEVICE_ORDER"
    r"|PGPASSFILE|HF_HOME|TORCH_HOME|XDG_(CACHE|DATA|CONFIG)_HOME|OMP_NUM_THREADS|NO_COLOR"
)
#: A century. Anything longer is a typing error.
_MOST_HOURS = 100 * 366 * 24
_MOST_BYTES = 2**60
#: Options of a search that a submitted one cannot have, each with what is so of those, and what to do.
_NOT_SUBMITTED = {
    "on": ("runs where its job is started", "`autotune search --on` launches on a Ray cluster from here."),
    "workers": ("runs alone", "`autotune search --workers` is for machines that work on one study."),
    "devices": ("has one device", "leave it out, or search with `autotune search --devices`."),
}
#: Parameters that concern the call, not the job.
CALL_OPTIONS = ("to", "dry_run", "again", "state_dir", "as_json", "words")


def request_of(ctx: Any, to: str) -> tuple[JobRequest, Allocation]:
    """Return the request of a job, and what it requests from Slurm if it is for Slurm's queue."""
    params = ctx.params
    variables = _given_variables(params["env"] or ())
    _refuse_other_queues(ctx, to)
    slurm_allocation = allocation(params, variables)
    when = _when(params, variables)
    if params["track"]:
        raise UsageError("--track is not for searches that are submitted", advice="`autotune jobs` shows them.")
    replay: Path | None = params["replay"]
    if replay is not None and to == "slurm":
        raise UsageError("--replay needs no node", advice="`autotune search --replay` runs in virtual time, here.")
    spec = make_spec(params, params["words"] or ())
    for name, (each, advice) in _NOT_SUBMITTED.items():
        if getattr(spec, name) is not None:
            raise UsageError(f"--{name} is not for searches that are submitted, each of which {each}", advice=advice)
    if spec.device.partition(":")[2].isdigit():
        raise UsageError(
            f"--device {spec.device} means another card where the job runs, perhaps",
            advice="--gres gpu:h200:1 asks Slurm for one."
            if to == "slurm"
            else "name it by UUID, --device cuda:GPU-…, or by model, --gpu h200; `autotune doctor` lists them.",
        )
    if spec.device == "cpu" and params["gpu"] != "any":
        raise UsageError(f"--device cpu and --gpu {params['gpu']} contradict each other")
    check_study_name(spec.name)
    sources = {}
    if replay is None:
        ref = check_request(spec)
        label = ref.name
        # Built-in workloads are not watched: they change only with autotune itself.
        script = None if spec.command is None else script_of(spec.command)
        watched = str(script.absolute()) if script is not None else ref.path if spec.model == ref.path else None
        if watched is not None:
            sources[watched] = ref.sha256
    else:
        refuse_beside_replay(params, names=("study", "studies_dir"))
        read_surface(replay)
        for objective in spec.objectives:
            find_objective(objective)
        label = f"replay-{replay.stem}"
    for objective in spec.objectives:
        if objective.endswith(".py"):
            sources[objective] = source_hash(Path(objective))
    request = JobRequest(
        spec=spec,
        label=label,
        studies_dir=os.path.realpath(Path(params["studies_dir"]).expanduser()),
        replay=None if replay is None else str(replay.expanduser().absolute()),
        folder=str(Path.cwd()),
        python=sys.executable,
        sources=sources,
        **when,
    )
    return request, slurm_allocation


def _when(params: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a request that the options of `submit` itself fill: when a job may run, and with what."""
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
    not_before, window = params["not_before"], params["window"]
    as_typed = ("priority", "gpu", "after", "on_reboot", "on_done", "cores", "keep_fresh")
    return {name: params[name] for name in as_typed} | {
        "not_before": None if not_before is None else moment(not_before, datetime.now().astimezone()),
        "window": None if window is None else window_of(window),
        "max_s": None if hours is None else 3600 * hours,
        "host_memory_bytes": None if memory is None else size_bytes(memory, "--host-memory"),
        "environment": {**{n: v for n, v in os.environ.items() if _FORWARDED.fullmatch(n)}, **given},
    }


def _given_variables(asked: Any) -> dict[str, str]:
    variables = {}
    for variable in asked:
        name, equals, value = variable.partition("=")
        if name in SECRET_VARIABLES:
            raise UsageError(
                f"--env {name} would be stored with the job, for everybody who reads it",
                advice="the file that PGPASSFILE names, or ~/.pgpass, is where a job finds a password.",
            )
        if not equals:
            if name not in os.environ:
                raise UsageError(f"--env {name}: there is no such variable here", advice="--env NAME=VALUE sets one.")
            value = os.environ[name]
        variables[name] = value
    return variables


def option_words(name: str, value: Any, repeatable: Collection[str]) -> list[str]:
    """Return an option of a file as words of a command line.

    Args:
        repeatable: the options that can have several values, as typed.

    Raises:
        UsageError: an option cannot have this value.
    """
    words: list[str] = []
    for item in _settings(value) if isinstance(value, dict) else value if isinstance(value, list) else [value]:
        if isinstance(item, dict | list) or item is None:
            raise UsageError(f"{name} has no value that an option can have")
        if item is not False:
            words += [flag(name)] if item is True else [flag(name), str(item)]
    # If an option that cannot be repeated were, only its last value would count.
    if isinstance(value, dict | list) and flag(name) not in repeatable:
        raise UsageError(f"{name} has one value, not several")
    return words


def _settings(value: Mapping[str, Any]) -> list[str]:
    """Return ``batch_size=32,64`` for ``{batch_size: [32, 64]}``."""
    texts = {name: item if isinstance(item, list) else [item] for name, item in value.items()}
    for name, items in texts.items():
        if any(item is None for item in items):
            raise UsageError(f"{name} has no value that an option can have")
    return [
        f"{name}={','.join(str(v).lower() if isinstance(v, bool) else str(v) for v in vs)}"
        for name, vs in texts.items()
    ]
