"""Who was started by this process, and who has become its child because its own parent died."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

_PR_SET_CHILD_SUBREAPER = 36
#: In the environment of notices, and of nothing else.
NOTICE = "AUTOTUNE_JOB_STATE"


def adopt_orphans() -> None:
    """Let what loses its parent below this process become this process's child, and not the machine's (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _has(process: psutil.Process, variable: str) -> bool:
    try:
        return variable in process.environ()
    except (psutil.Error, OSError):
        return False


class Children:
    """Starts processes, and keeps in mind which. For one thread.

    Args:
        adopts: this process is the daemon: whatever else is its child was left behind by a job. Elsewhere other
        children
            are somebody's.
    """

    def __init__(self, *, adopts: bool = False) -> None:
        self._adopts = adopts
        if adopts:
            adopt_orphans()
        self._ours: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """A process in a session of its own.

        Raises:
            OSError, ValueError: it cannot be started; the second for a text that no system call takes.
        """
        self._ours = {pid: process for pid, process in self._ours.items() if process.poll() is None}
        process = subprocess.Popen(command, start_new_session=True, **options)
        self._ours[process.pid] = process
        return process

    def end_orphans(self) -> bool:
        """Kill and wait for children that nobody here has started; returns whether one still lived.

        They are what a job's process has left behind: as long as that lives, it adopts its own. What a notice has left
        behind is its user's wish.
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
