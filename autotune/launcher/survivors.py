"""Processes that an earlier run left behind, found by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from autotune.clock import Clock
from autotune.errors import MachineError
from autotune.launcher.leftovers import remove_leftovers

#: In the environment of every process of a study.
STUDY_MARK = "AUTOTUNE_STUDY"
#: In that of every process of a run of one of the daemon's jobs.
JOB_MARK = "AUTOTUNE_JOB"
#: A killed process is gone within milliseconds, unless it is stuck in the kernel.
END_S = 30.0


def end_survivors(mark: str, clock: Clock, variable: str = STUDY_MARK) -> int:
    """Kill what an earlier run of a study left alive, and remove what it has in shared memory; returns how many
    processes.

    Only processes that carry the study's mark in their environment are touched. Call it while holding the study's
    lock: then no live search owns them.

    Raises:
        MachineError: one of them could not be ended (stuck in the kernel).
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
    """Kill every process but this one whose environment holds ``variable=mark``; returns those that had not ended yet.

    A number that another process gets meanwhile harms nobody: the signal goes to the one whose environment was read.

    Raises:
        MachineError: it cannot be found out who lives, because there are no descriptors or no memory left.
    """
    wanted = f"{variable}={mark}".encode()
    try:
        return {pid for pid in _processes() if pid != os.getpid() and _killed(pid, wanted)}
    except OSError as error:
        # Who cannot look must not say that nobody is there.
        raise MachineError(f"cannot look for processes of an earlier run: {error.strerror}") from error


def _killed(pid: int, wanted: bytes) -> bool:
    # First a handle on whatever has this number now: what is read afterwards is that process's, or nobody's.
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
    # Empty for zombies and for processes of others, which cannot be ours.
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
