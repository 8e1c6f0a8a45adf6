"""Crash-safe files: atomic replacement, locks that are released when their holder dies, and cleanup of leftovers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from autotune.base.errors import MachineError

_TEMPORARY = ".tmp-"
#: Error numbers for a full disk or an exhausted quota.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: With less free space than this the disk counts as full: a launch's result takes about as much.
ROOM_BYTES = 2**20
#: Exit code of a process that could not write its output (sysexits.h, EX_IOERR).
CANNOT_WRITE = os.EX_IOERR
FREE_SOME_SPACE = "free some space; nothing is lost, and `autotune resume` goes on from here."


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content`` so that readers see either the old or the new file, even after a crash.

    Writes a temporary file in the same folder, then fsync, rename, and fsync of the folder (which holds the
    rename). The parent folder must exist.

    Raises:
        MachineError: the folder cannot be written, or the disk is full. The old file is intact.
    """
    data = content.encode() if isinstance(content, str) else content

    def fill(stream: IO[bytes]) -> str:
        stream.write(data)
        return path.name

    _create(path.parent, fill, path)


def create_atomic(folder: Path, fill: Callable[[IO[bytes]], str]) -> Path:
    """Write a file as `write_atomic` does, by a function that writes to a stream and returns the file's name.

    For files that are too large to be kept in memory, or whose names depend on what is in them.

    Raises:
        MachineError: the folder cannot be written, or the disk is full. No file has come or gone.
    """
    return _create(folder, fill, folder)


def _create(folder: Path, fill: Callable[[IO[bytes]], str], named: Path) -> Path:
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=folder)
        with os.fdopen(descriptor, "wb") as stream:
            path = folder / fill(stream)
            stream.flush()
            # mkstemp creates private files; give the result the permissions of any file this user creates.
            os.fchmod(stream.fileno(), 0o666 & ~_umask())
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        temporary = None
        sync_folder(folder)
    except OSError as error:
        raise MachineError(
            f"cannot write {named}: {error.strerror or error}",
            advice="free some space or choose another folder; what was there before is unchanged.",
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return path


def open_regular(path: Path, *, own: bool = False, follow: bool = False) -> IO[bytes]:
    """Open a file for reading that another process wrote or a user named, which may be anything: a device is not read,
    and a pipe does not block.

    Args:
        own: it must belong to this user or to root. For what is believed, or even run, because we wrote it.
        follow: a link may lead to the file.

    Raises:
        OSError: there is no such file, it is no regular file, or it belongs to somebody else (EPERM).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink() and not follow:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from error
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if own and status.st_uid not in (os.geteuid(), 0) and status.st_uid != _owner_of_new_files(path.parent):
            raise PermissionError(errno.EPERM, f"it belongs to {_user(status.st_uid)}, not to you", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _owner_of_new_files(folder: Path) -> int | None:
    """Return whom a file belongs to that this process makes in a folder; ``None`` if it can make none.

    Servers of network file systems, and containers, give all files of a folder to one user, who need not be ours.
    """
    try:
        with tempfile.TemporaryFile(prefix=_TEMPORARY, dir=folder) as stream:
            return os.fstat(stream.fileno()).st_uid
    except OSError:
        return None


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"


def read_regular(path: Path, limit_bytes: int, *, tail: bool = False, own: bool = False, follow: bool = False) -> bytes:
    """Read a file as `open_regular` opens it, and no more of it than the limit.

    Args:
        tail: read the last ``limit_bytes`` of a longer file instead of refusing it.

    Raises:
        OSError: as by `open_regular`, or the file is too large (EFBIG).
    """
    with open_regular(path, own=own, follow=follow) as stream:
        if os.fstat(stream.fileno()).st_size > limit_bytes:
            if not tail:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
            stream.seek(-limit_bytes, os.SEEK_END)
        return stream.read(limit_bytes)


def make_folder(folder: Path, advice: str, *, mode: int | None = None) -> None:
    """Make a folder and its parents, unless it is there, and give it a mode.

    Raises:
        MachineError: that is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if mode is not None:
            os.chmod(folder, mode)
    except OSError as error:
        raise MachineError(f"cannot make {folder}: {error.strerror}", advice=advice) from error


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk after a file was created, renamed or removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        status = Path("/proc/self/status").read_text()
        return int(status.split("\nUmask:")[1].split()[0], 8)
    # The only portable way to read it is to set it, and meanwhile another thread may create a file. Searches, which
    # have threads, run on Linux only.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def no_room(error: BaseException) -> bool:
    """Return whether an error, or one it was raised from, is due to a full disk."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def has_room(folder: Path, size_bytes: int = ROOM_BYTES) -> bool:
    """Return whether ``size_bytes`` still fit into ``folder``, by writing them, because quotas and reserved blocks do
    not show in a file system's statistics. True if writing fails for any other reason."""
    try:
        with tempfile.NamedTemporaryFile(prefix=_TEMPORARY, dir=folder) as stream:
            # Random bytes, because some file systems store zeros in no space at all.
            stream.write(os.urandom(size_bytes))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return not no_room(error)
    return True


def sweep_temporaries(folder: Path) -> int:
    """Remove temporaries of a killed `write_atomic` from ``folder`` and below; return the number of files.

    Call it only while holding the folder's lock, because temporaries of a live writer look the same.
    """
    count = 0
    for leftover in folder.rglob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            leftover.unlink()
            count += 1
    return count


@contextlib.contextmanager
def exclusive_lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold an advisory lock on ``path``; yields whether it could be taken.

    Args:
        wait: block until the lock is free. For locks that are held only briefly.

    The kernel releases the lock when the holder dies, however it dies, so there are no stale locks. Executed children
    do not inherit it, because the descriptor is close-on-exec. Forked children do (``flock`` is released with the last
    duplicate of the descriptor), so autotune's children must exec.

    Raises:
        MachineError: the lock file cannot be created.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise MachineError(f"cannot lock {path}: {error.strerror}", advice="the folder must be writable.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        except OSError as error:
            # Some network file systems have no locks.
            raise MachineError(
                f"cannot lock {path}: {error.strerror}", advice="its file system must have locks."
            ) from error
        else:
            yield True
    finally:
        os.close(descriptor)
