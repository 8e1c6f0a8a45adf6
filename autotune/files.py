"""Files that survive a crash: atomic replacement, a lock that dies with its holder, swept temporaries."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import MachineError

_TEMPORARY = ".tmp-"
#: How a file system says that nothing more fits: the disk, or this user's part of it.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Less room than this is none: a launch's result takes as much.
ROOM_BYTES = 2**20
#: Exit code of a process that could not write what it had to say (sysexits.h, EX_IOERR).
CANNOT_WRITE = os.EX_IOERR
FREE_SOME_SPACE = "free some space; nothing is lost, and `autotune resume` goes on from here."


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content`` so that a reader, or a crash, sees the old file or the new one.

    Temporary in the same folder, fsync, rename, fsync of the folder (the rename itself is data of
    the folder). The parent folder must exist.

    Raises:
        MachineError: the folder cannot be written, or the disk is full. The old file is intact.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            # mkstemp makes files private; what lands is as readable as any file this user writes.
            os.fchmod(stream.fileno(), 0o666 & ~_umask())
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        temporary = None
        sync_folder(path.parent)
    except OSError as error:
        raise MachineError(
            f"cannot write {path}: {error.strerror or error}",
            advice="free some space or choose another folder; what was there before is unchanged.",
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: that a file was made, renamed or removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # The only portable way to read the umask is to set it; this is not done in threads.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def no_room(error: BaseException) -> bool:
    """Whether an error, or what it came from, is a full disk."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in _FULL:
            return True
        found = found.__cause__ or found.__context__
    return False


def has_room(folder: Path, size_bytes: int = ROOM_BYTES) -> bool:
    """Whether so much still fits into ``folder``, found out by writing them: quotas and reserves do not show in the
    figures of a file system. True where it fails for another reason than room."""
    try:
        with tempfile.NamedTemporaryFile(prefix=_TEMPORARY, dir=folder) as stream:
            # Some file systems store zeros in no space at all.
            stream.write(os.urandom(size_bytes))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return not no_room(error)
    return True


def sweep_temporaries(folder: Path) -> int:
    """Remove what a killed `write_atomic` left in ``folder`` and below; returns how many files.

    Call it only while holding the folder's lock: a live writer's temporary looks the same.
    """
    count = 0
    for leftover in folder.rglob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            leftover.unlink()
            count += 1
    return count


@contextlib.contextmanager
def exclusive_lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold an advisory lock on ``path``; yields whether it was free.

    Args:
        wait: until it is. For locks that are held for a moment.

    The kernel drops the lock when the holder dies, however it dies, so there are no stale locks. It is
    not inherited by children (the descriptor is close-on-exec, and ``flock`` is released by the last
    duplicate, which is why forked children of ours must exec).

    Raises:
        MachineError: the lock's file cannot be made.
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
        else:
            yield True
    finally:
        os.close(descriptor)
