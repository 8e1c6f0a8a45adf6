"""What the child asks of Linux directly: death signals, subreaping, limits, memory high-water marks, descendants."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import threading
import time
import weakref
from multiprocessing.process import BaseProcess
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
#: From a worker's sockets closing until the kernel has it down as dead.
_DEATH_S = 1.0
#: Programs that remove what others leave in /dev/shm once those are dead.
_TIDIERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
#: What multiprocessing has started from here and somebody still holds.
_started: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


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
        # A kernel without CONFIG_PROC_CHILDREN, or no such process.
        return [child for child in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(child) == pid]


def _parent_of(pid: int) -> int | None:
    try:
        # The name of the program stands in brackets and may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def tidies_up(pid: int) -> bool:
    """Whether a process waits for the others' end, to remove what they leave in shared memory."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _TIDIERS)


def report_processes(descriptor: int) -> None:
    """Have every process that comes from this one report its pid as a line ``{"forked": 123}`` on ``descriptor``.

    What forks reports itself, however deep. What multiprocessing starts in its other ways (spawn, forkserver) is
    reported by who starts it.
    """
    pipe = os.fstat(descriptor)

    def report(pid: int) -> None:
        # The user's code may have closed it, and opened a file of its own under the same number.
        with contextlib.suppress(OSError):
            now = os.fstat(descriptor)
            if (now.st_dev, now.st_ino) == (pipe.st_dev, pipe.st_ino):
                os.write(descriptor, b'{"forked": %d}\n' % pid)

    start = BaseProcess.start

    def start_and_report(process: BaseProcess) -> None:
        start(process)
        _started.add(process)
        if process.pid is not None:
            report(process.pid)

    os.register_at_fork(after_in_child=lambda: report(os.getpid()))
    BaseProcess.start = start_and_report  # type: ignore[assignment, method-assign]


def stop_raising_for_workers() -> None:
    """End PyTorch's way of turning a worker's death into an exception wherever the main thread happens to be.

    Once a launch has failed, another exception in the middle of reporting the first would leave it without a report.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def dead_workers() -> list[int]:
    """Exit codes, as `os.waitstatus_to_exitcode`, of the loader workers that ended in another way than they should.

    A worker's death is known by its closed sockets a little earlier than to the kernel: waits for it that long.
    """
    stop_raising_for_workers()
    deadline = time.monotonic() + _DEATH_S
    while True:
        codes = [code for process in list(_started) if (code := _exit_code(process))]
        if codes or time.monotonic() > deadline:
            return codes
        time.sleep(0.01)


def _exit_code(process: BaseProcess) -> int | None:
    try:
        return process.exitcode if process.daemon else None
    except (AssertionError, ValueError):
        return None  # a parent's child, inherited by a fork; or closed


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
    stop_raising_for_workers()
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
