"""Child processes: those started here, and orphans adopted from jobs that ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

_PR_SET_CHILD_SUBREAPER = 36
#: An environment variable set for ``--on-done`` notices only; it tells them apart from jobs.
NOTICE = "AUTOTUNE_JOB_STATE"


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants, so that orphans become its children and not init's.

    See ``PR_SET_CHILD_SUBREAPER`` in prctl(2).
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _has(process: psutil.Process, variable: str) -> bool:
    try:
        return variable in process.environ()
    except (psutil.Error, OSError):
        return False


class Children:
    """Starts processes and keeps track of them. Not thread-safe.

    Args:
        adopts: become a subreaper and treat every unknown child as an orphan of a job. Only the daemon may do so; in
            other processes, unknown children belong to the caller.
    """

    def __init__(self, *, adopts: bool = False) -> None:
        self._adopts = adopts
        if adopts:
            adopt_orphans()
        self._ours: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process in a new session.

        Raises:
            OSError: the process cannot be started.
            ValueError: an argument is not valid for a system call, such as one with a null byte.
        """
        self._ours = {pid: process for pid, process in self._ours.items() if process.poll() is None}
        process = subprocess.Popen(command, start_new_session=True, **options)
        self._ours[process.pid] = process
        return process

    def end_orphans(self) -> bool:
        """Kill and reap adopted orphans; return whether any was still alive.

        They are left over from jobs that have ended: a running job adopts its own orphans. Processes left behind by an
        ``--on-done`` notice are kept, because the user may have intended that.
        """
        alive = False
        if not self._adopts:
            return alive
        for child in psutil.Process().children():
            if child.pid in self._ours or _has(child, NOTICE):
                continue
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(child.pid, os.WNOHANG)[0]:
                    continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            alive = True
        return alive
