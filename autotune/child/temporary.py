"""The temporary folder of a launch: for the sockets of its processes, and for what a script writes but is to leave no
trace."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autotune.machine import system

#: Folders of killed launches are found by it. The user's id excludes those of other users.
_PREFIX = f"autotune-launch-{os.geteuid()}-"
#: For temporary files on a disk, where the usual folder for them is in memory.
_ON_DISK = Path("/var/tmp")


def base() -> Path:
    """Return the folder for temporary files: one on a disk rather than in memory, because what a script writes may be
    large, unless the environment names one."""
    usual = Path(tempfile.gettempdir())
    is_set = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    if is_set or not system.is_in_memory(usual):
        return usual
    usable = os.access(_ON_DISK, os.W_OK | os.X_OK) and not system.is_in_memory(_ON_DISK)
    return _ON_DISK if usable else usual


@contextlib.contextmanager
def launch_folder() -> Iterator[Path | None]:
    """Create a folder for a launch, and remove it at the end; yield ``None`` if there is no room for one.

    While this process lives, the folder is not mistaken for one that a killed launch has left.
    """
    held = None
    with contextlib.suppress(OSError):
        held = _held(base())
    try:
        yield None if held is None else held[0]
    finally:
        if held is not None:
            remove(held[0])
            os.close(held[1])


def sweep(folder: Path) -> None:
    """Remove what killed launches of this user have left in a folder for temporary files."""
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(left)
            finally:
                os.close(descriptor)


def _held(folder: Path) -> tuple[Path, int]:
    """Create a folder; return it with a descriptor whose lock shows that it is in use."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            # Another search mistook it for an abandoned one before it was locked.
            os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a folder with everything in it, as far as this user may, even if the modes of folders in it forbid
    that."""
    waiting = [str(folder)]
    for place in waiting:
        with contextlib.suppress(OSError):
            # An overlay leaves a folder that nobody may read, and a script may remove the permission to write.
            if os.lstat(place).st_mode & stat.S_IRWXU != stat.S_IRWXU:
                os.chmod(place, stat.S_IRWXU)
            with os.scandir(place) as entries:
                waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    shutil.rmtree(folder, ignore_errors=True)
