"""The check of a workload when it is submitted, in a process of its own, so that it does not fail hours later."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from autotune.base.errors import WorkloadError, by_exit_code
from autotune.base.records import JobRequest, WorkloadRef
from autotune.workload.catalog import find_workload

#: A check is given up after this many seconds. Most of a usual one is the import of torch.
LIMIT_S = 60.0
_BYTES = 2**16


def unchecked_workloads(requests: Sequence[JobRequest]) -> list[str]:
    """Check the workloads that are the user's own; return a sentence for each that could not be checked.

    Raises:
        AutotuneError: one of them is no workload.
    """
    # Built-in workloads need no check, and a file of jobs may name one workload many times.
    own = {
        (ref.model_dump_json(), tuple(sorted(request.environment.items()))): (ref, request.environment)
        for request in requests
        if request.replay is None and request.spec.command is None and request.label != request.spec.model
        for ref in [find_workload(request.spec.model, request.spec.args)]
    }
    found = [check_workload(ref, environment) for ref, environment in own.values()]
    return [sentence for sentence in found if sentence is not None]


def check_workload(ref: WorkloadRef, environment: Mapping[str, str], *, limit_s: float = LIMIT_S) -> str | None:
    """Import a workload in a child process, in the environment of its job.

    Returns:
        why it could not be checked, as a sentence; ``None`` if it is a workload.

    Raises:
        WorkloadError: it cannot be imported, or is no workload.
        UsageError: it does not take these arguments.
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
            # Whatever it has started ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answer.seek(0)
        text = answer.read(_BYTES)
    try:
        found = json.loads(text)
    except ValueError:
        raise WorkloadError(
            f"{ref.name} cannot be imported: it ended its process with {_ended(process.returncode)}",
            advice=f"`python -c 'import {ref.module}'` may show why.",
        ) from None
    if found:
        error = by_exit_code(found["exit_code"])(found["message"], advice=found.get("advice"))
        error.detail = found.get("detail")
        raise error
    return None


def _ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
