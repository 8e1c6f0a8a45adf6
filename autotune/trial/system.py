"""What the child asks of Linux directly: death signals, subreaping, limits, memory high-water marks."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import threading
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however the parent dies.

    The signal fires when the *thread* that made this process ends: only for children of main threads.
    """
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was in place
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Have orphans among this process's descendants handed to it instead of to init."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """The direct children of a single-threaded process, zombies included."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def status_bytes(field: str) -> int:
    """A memory field of ``/proc/self/status`` (``VmData``, ``VmHWM``, ``VmRSS``) in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def limit_data(extra_bytes: int) -> None:
    """Let this process grow its private writable memory by ``extra_bytes`` and no further.

    The soft limit only: what this process forks (loader workers) raises it back to the hard one, because the limit
    stands for the device's memory, and workers do not live there. Compilers that it executes keep the soft limit,
    which leaves them the template's size and more.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = status_bytes("VmData") + extra_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    os.register_at_fork(after_in_child=_lift_data_limit)


def _lift_data_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def workers_die_with_leader() -> None:
    """Have whatever this process forks from its main thread die with it, loader workers first of all.

    Without this a worker stuck in ``__getitem__`` outlives a killed leader for ever. Workers forked by another
    thread keep their own ways: the death signal would fire when that thread ends.
    """
    from_main = False

    def note() -> None:
        nonlocal from_main
        from_main = threading.current_thread() is threading.main_thread()

    def bind() -> None:
        if from_main:
            die_with_parent()

    os.register_at_fork(before=note, after_in_child=bind)


def flush_c_streams() -> None:
    """Write out what C code printed into its own buffers (``os._exit`` would drop it)."""
    _libc.fflush(None)


def end_daemonic_children() -> None:
    """Kill what multiprocessing would end at this process's exit, without the grace it gives.

    A failed launch's traceback keeps the loader's iterator alive, so nobody has told its workers to stop; at exit
    PyTorch would wait five seconds for each of them.
    """
    # PyTorch's handler turns a worker's death into an exception.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
