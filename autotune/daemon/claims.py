"""Claims on devices, and the child processes that hold them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

# Claims on devices, seen by the daemons of all users of the machine: no two of them run jobs on one device.
#
# A claim is an advisory lock (flock(2)) on a file in a folder that every user can write, by default ``/tmp``. The
# kernel releases it when the last process that holds it ends: the daemon, and the job's process, which inherits it,
# because a job outlives a daemon that is killed. The files are empty, are never removed, and belong to their creator.

#: The lock of the processor. A job on it holds the lock alone; jobs on cards, which need cores too, share it.
_PROCESSOR = "cpu"
#: Attempts to open a file that others create or remove at the same moment.
_ATTEMPTS = 5


class Unclaimed(Exception):
    """A device cannot be claimed now. The message is a clause that says why."""


class Claims:
    """The claims of one daemon.

    Args:
        folder: the folder of the locks, on a local disk; ``None`` if no other daemon has to be considered.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._held: dict[str, tuple[int, ...]] = {}

    def take(self, device: str) -> None:
        """Claim a device for a job.

        Raises:
            Unclaimed: a job of another daemon runs there, or a lock's file cannot be opened.
        """
        if device not in self._held:
            self._held[device] = self._locked(device)

    def release(self, device: str) -> None:
        """Give up the claim on a device, if there is one."""
        for descriptor in self._held.pop(device, ()):
            os.close(descriptor)

    def filenos(self, device: str) -> tuple[int, ...]:
        """Return the descriptors that the process of a job on the device has to inherit."""
        return self._held.get(device, ())

    def obstacle(self, device: str) -> str | None:
        """Return why a device cannot be claimed now, as a clause; ``None`` if it can."""
        if device in self._held:
            return None
        try:
            descriptors = self._locked(device)
        except Unclaimed as unclaimed:
            return str(unclaimed)
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _locked(self, device: str) -> tuple[int, ...]:
        """Return the descriptors of a device's locks."""
        if self._folder is None:
            return ()
        with contextlib.ExitStack() as undo:
            descriptors = []
            for name, how in _locks(device):
                descriptors.append(_lock(self._folder / f"autotune-{name}.lock", how, alone=name == device))
                undo.callback(os.close, descriptors[-1])
            undo.pop_all()
            return tuple(descriptors)


def _locks(device: str) -> Iterator[tuple[str, int]]:
    """Yield the names of a device's locks, each with how it is taken."""
    if device == _PROCESSOR:
        yield _PROCESSOR, fcntl.LOCK_EX
    else:
        yield _PROCESSOR, fcntl.LOCK_SH
        yield device, fcntl.LOCK_EX


def _lock(path: Path, how: int, *, alone: bool) -> int:
    for _ in range(_ATTEMPTS):
        try:
            descriptor = _open(path)
        except FileExistsError:
            continue
        except OSError as error:
            raise Unclaimed(f"{path}, by which daemons agree, cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            # A lock on a file that was removed meanwhile is a lock that nobody else sees.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                # Cleaners of temporary files spare recent ones.
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            where = "runs on it" if alone else "uses the processor"
            raise Unclaimed(f"a job of another daemon {where} (its lock is {path})") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise Unclaimed(f"{path}, by which daemons agree, is taken away again and again")


def _open(path: Path) -> int:
    """Open a lock's file, creating it if it does not exist.

    Raises:
        FileExistsError: another process created it at the same moment.
        OSError: it cannot be opened, or is not a regular file.
    """
    # Follow no link and wait for no pipe: any user of the machine can put one there.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        # Whatever the umask is, other users must be able to lock it.
        os.fchmod(descriptor, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no file")
    return descriptor


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
            try:
                os.kill(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                # It is another user's by now, as after `sudo`, and uses no device of ours.
                continue
            alive = True
        return alive
