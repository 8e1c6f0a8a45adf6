"""Direct calls to Linux: death signals, subreaping, limits, memory high-water marks, descendants."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import weakref
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NoReturn

import psutil

#: In the message of PyTorch's error if /dev/shm is full.
SHM_TEXT = "unable to allocate shared memory(shm)"
_PR_SET_PDEATHSIG = 1
#: Types of file systems, from linux/magic.h: tmpfs, ramfs.
_IN_MEMORY = (0x01021994, 0x858458F6)
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
#: How long to wait, after a worker's sockets close, for the kernel to report it dead.
_DEATH_S = 1.0
#: How long a loader waits for a batch before its workers are looked at again. PyTorch: 5 s.
_LOOK_S = 1.0
#: Exit codes of a loader worker that could not send a batch: for lack of shared memory, or for another reason.
NO_SHARED_MEMORY, LOST_BATCH = 72, 73
#: Programs that remove files of dead processes from /dev/shm.
_TIDIERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
#: Processes started through multiprocessing that are still referenced.
_started: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however the parent dies.

    The signal fires when the *thread* that started this process ends, so use it only in children of threads that last.
    """
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the request took effect
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Make this process, instead of init, adopt orphans among its descendants."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int, *, proc: Path = Path("/proc")) -> list[int]:
    """The direct children of a process, zombies included."""
    threads, found = proc / str(pid) / "task", list[int]()
    with contextlib.suppress(OSError):  # no such process
        for task in os.listdir(threads):
            # Each thread lists those it has started; orphans are adopted by the main one. It may have just ended.
            with contextlib.suppress(OSError):
                found += map(int, (threads / task / "children").read_text().split())
    if not found and not (threads / str(pid) / "children").exists():
        # A kernel without CONFIG_PROC_CHILDREN.
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
    return found


def other_threads() -> list[str]:
    """Return the names of this process's threads except the main one."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = []
    for task in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it has just ended
            if task != os.getpid():
                found.append(python.get(task) or Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return found


def tidies_up(pid: int) -> bool:
    """Return whether a process removes other processes' shared memory after they have died."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _TIDIERS)


def report_processes(descriptor: int) -> None:
    """Make every descendant of this process report its pid as a line ``{"forked": 123}`` on ``descriptor``.

    A forked process reports itself, at any depth. A process that multiprocessing starts by spawn or forkserver is
    reported by its parent.
    """
    pipe = os.fstat(descriptor)

    def report(pid: int) -> None:
        # User code may have closed the descriptor and opened a file under the same number.
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


def raise_for_workers_between_batches() -> None:
    """Make PyTorch tell of a loader worker's death where the next batch is asked for, or while it is waited for.

    Its own handler of SIGCHLD raises wherever the main thread is just then. If that is between taking a queue's lock
    and the block that releases it, ending the loader waits for that lock for ever, as does multiprocessing at exit.
    """
    from torch.utils.data import _utils
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    handling: Any = _utils.signal_handling
    iterator: Any = _MultiProcessingDataLoaderIter
    look = iterator._try_get_data

    def look_at_workers_first(loader: Any, timeout: float = _LOOK_S) -> Any:
        handling._error_if_any_worker_fails()
        return look(loader, timeout)

    iterator._try_get_data = look_at_workers_first
    handling._SIGCHLD_handler_set = True


def dead_workers() -> list[int]:
    """Return the exit codes, as `os.waitstatus_to_exitcode`, of loader workers that ended abnormally.

    A worker's sockets close slightly before the kernel reports it dead; this waits up to a second for that.
    """
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
        return None  # a child of the parent, inherited through fork; or closed


def is_in_memory(folder: Path) -> bool:
    """Return whether the files of a folder are kept in memory, as those of a tmpfs are."""
    # Of `struct statfs`, the first field is the type; no architecture has one of more bytes.
    found = (ctypes.c_long * 64)()
    return _libc.statfs(os.fsencode(folder), found) == 0 and found[0] in _IN_MEMORY


def status_bytes(field: str) -> int:
    """Return a memory field of ``/proc/self/status`` (``VmData``, ``VmHWM``, ``VmRSS``) in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def limit_data(extra_bytes: int) -> None:
    """Limit the growth of this process's private writable memory to ``extra_bytes``.

    Only the soft limit is set. Forked processes (loader workers) raise it back to the hard limit, because the limit
    stands for the device's memory, which workers do not use. Executed compilers keep the soft limit, which is at
    least the size of the template.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # No limit can be larger than this.
    wanted = min(status_bytes("VmData") + extra_bytes, 2**63 - 1)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    os.register_at_fork(after_in_child=lift_data_limit)


def lift_data_limit() -> None:
    """Raise the limit of `limit_data` back to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def workers_die_with_leader() -> None:
    """Make processes that this process forks from its main thread, such as loader workers, die with it.

    Otherwise a worker stuck in ``__getitem__`` would outlive a killed leader for ever. Processes forked by another
    thread are left alone: their death signal would fire when that thread ends.
    """
    from_main = False

    def note() -> None:
        nonlocal from_main
        from_main = threading.current_thread() is threading.main_thread()

    def bind() -> None:
        if from_main:
            die_with_parent()

    os.register_at_fork(before=note, after_in_child=bind)


def workers_exit_on_lost_batches() -> None:
    """Make forked loader workers exit when they cannot send a batch.

    A worker's queue sends from a thread of its own, which prints an error and goes on, and the training would wait for
    that batch for ever. Shared memory that is too small shows so for tensors that a collate function has not put there.
    """
    go_on = Queue._on_queue_feeder_error  # type: ignore[attr-defined]

    def report(error: BaseException, batch: object) -> None:
        go_on(error, batch)
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            sys.stderr.flush()
            os._exit(NO_SHARED_MEMORY if SHM_TEXT in str(error) else LOST_BATCH)

    Queue._on_queue_feeder_error = staticmethod(report)  # type: ignore[attr-defined]


def flush_c_streams() -> None:
    """Flush the buffers of C stdio, which ``os._exit`` would drop."""
    _libc.fflush(None)


def end_daemonic_children() -> None:
    """Kill the children that multiprocessing would terminate on exit, without waiting for them.

    A failed launch's traceback keeps the loader's iterator alive, so its workers have not been told to stop; at exit
    PyTorch would wait five seconds for each of them.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def reset_peak() -> None:
    """Set this process's VmHWM back to its VmRSS, where the kernel allows it."""
    with contextlib.suppress(OSError):
        # proc(5): 5 resets the peak resident set size.
        Path("/proc/self/clear_refs").write_text("5")


def leave(code: int) -> NoReturn:
    """End this process as a forked one ends: run the exit handlers but skip interpreter teardown.

    It would copy most of the template's pages, which takes a second per launch, and the result is already written.
    """
    end_daemonic_children()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # User code may have closed them.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    flush_c_streams()
    os._exit(code)
