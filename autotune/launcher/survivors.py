"""Processes that an earlier run left behind, found by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from autotune.base.clock import Clock
from autotune.base.errors import MachineError
from autotune.launcher.leftovers import remove_leftovers

#: Set in the environment of every process of a study.
STUDY_MARK = "AUTOTUNE_STUDY"
#: The same of one launcher, of which a study may have several.
LAUNCHER_MARK = "AUTOTUNE_LAUNCHER"
#: Set in the environment of every process of a daemon job's run.
JOB_MARK = "AUTOTUNE_JOB"
#: A killed process exits within milliseconds unless it is stuck in the kernel.
END_S = 30.0


def end_survivors(mark: str, clock: Clock, variable: str = STUDY_MARK) -> int:
    """Kill processes left by an earlier run of a study and remove their shared memory; return how many there were.

    Only processes with the mark in their environment are killed. The caller must hold the study's lock, so that no live
    search owns them.

    Raises:
        MachineError: a process could not be killed (stuck in the kernel).
    """
    ended: set[int] = set()
    deadline = clock.now() + END_S
    while True:
        alive = kill_marked(variable, mark)
        if not alive:
            remove_leftovers(ended)
            return len(ended)
        ended |= alive
        if clock.now() > deadline:
            raise MachineError(
                f"processes of an earlier run cannot be ended: {', '.join(map(str, sorted(alive)))}",
                advice="a driver or a network file system that does not answer keeps them; a reboot ends them.",
            )
        clock.sleep(0.05)


def kill_marked(variable: str, mark: str) -> set[int]:
    """Kill every process but this one whose environment holds ``variable=mark``; return the pids that were running.

    Reuse of a pid is harmless: the signal goes to the process whose environment was read.

    Raises:
        MachineError: the processes cannot be listed, because descriptors or memory have run out.
    """
    wanted = f"{variable}={mark}".encode()
    try:
        return {pid for pid in _processes() if pid != os.getpid() and _killed(pid, wanted)}
    except OSError as error:
        # If the processes cannot be read, do not report that there are none.
        raise MachineError(f"cannot look for processes of an earlier run: {error.strerror}") from error


def _killed(pid: int, wanted: bytes) -> bool:
    # Open the handle first: the environment read afterwards is that of the same process, or of none.
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if wanted not in _environment(pid):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    finally:
        os.close(handle)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    # Empty for zombies and for other users' processes, which cannot be ours.
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
