"""Removes files that dead processes left in shared memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")
#: File names that contain their creator's pid: PyTorch's tensors, multiprocessing's heaps, CUDA's shared memory (with
#: the pid in hexadecimal).
_NAMES = (re.compile(r"torch_(\d+)_.*"), re.compile(r"pym-(\d+)-.*"))
_CUDA = re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\..*")


def remove_leftovers(pids: Iterable[int], *, folder: Path = SHM) -> list[str]:
    """Remove files that dead processes left in shared memory; return their names.

    Only files that have one of ``pids`` in their name and belong to this user are removed, and only if no process has
    that pid now: it may have been reused.

    Args:
        pids: of processes that belonged to this study.
    """
    ours = set(pids)
    removed: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            maker = _maker(entry.name)
            if maker not in ours or is_alive(maker):
                continue
            # Another cleanup may have removed it already.
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    os.unlink(entry.path)
                    removed.append(entry.name)
    return sorted(removed)


def _maker(name: str) -> int | None:
    for pattern in _NAMES:
        if found := pattern.fullmatch(name):
            return int(found[1])
    found = _CUDA.fullmatch(name)
    return int(found[1], 16) if found else None


def is_alive(pid: int) -> bool:
    """Return whether a process is running. A zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
