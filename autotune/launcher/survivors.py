"""Processes that an earlier run of a study left behind, found by the study's mark in their environment."""

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
#: A killed process is gone within milliseconds, unless it is stuck in the kernel.
END_S = 30.0


def end_survivors(mark: str, clock: Clock) -> int:
    """Kill what an earlier run of a study left alive, and remove what it has in shared memory; returns how many
    processes.

    Only processes that carry the study's mark in their environment are touched. Call it while holding the study's
    lock: then no live search owns them.

    Raises:
        MachineError: one of them could not be ended (stuck in the kernel).
    """
    wanted = f"{STUDY_MARK}={mark}".encode()
    ended: set[int] = set()
    deadline = clock.now() + END_S
    while True:
        alive = [pid for pid in _processes() if pid != os.getpid() and wanted in _environment(pid)]
        if not alive:
            remove_leftovers(ended)
            return len(ended)
        if clock.now() > deadline:
            raise MachineError(
                f"processes of an earlier run cannot be ended: {', '.join(map(str, sorted(alive)))}",
                advice="a driver or a network file system that does not answer keeps them; a reboot ends them.",
            )
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            ended.add(pid)
        clock.sleep(0.05)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    # Empty for zombies and for processes of others, which cannot be ours.
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
