"""Bringing a folder's files into the kernel's page cache, so that the first launch reads as fast as the last.

How much of a file is there already is asked with mincore(2). Since Linux 5.2 the kernel answers that for files one
owns or may write to, and calls all of any other file resident; those are simply read.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.clock import Clock

_CHUNK_BYTES = 4 * 2**20
#: Asking about a smaller file takes as long as reading it from the cache.
_WORTH_ASKING_BYTES = 2**20
#: Of mincore's byte per page; the other bits are reserved.
_LOWEST_BIT = bytes(byte & 1 for byte in range(256))
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte)]


class _Cold(Exception):
    """Not all of it will be in the cache."""


def warm(
    folder: Path,
    *,
    limit_bytes: int,
    limit_s: float,
    clock: Clock,
    on_progress: Callable[[int, int], None] | None = None,
) -> str:
    """Read all files below ``folder``, unless they are in the page cache already.

    Never raises for what is found there: a file that cannot be read, or a link that leads out of the folder, leaves
    the answer ``cold``, since what a training would read there is not known to be cached.

    Args:
        folder: may be a link itself.
        limit_bytes: more than this is not read at all, because it would push itself out of the cache again.
        limit_s: reading ends after this many seconds.
        on_progress: called with the bytes seen to so far, and all bytes there are.

    Returns:
        ``warm`` when every regular file was read, or was there already, within the limits; else ``cold``.
    """
    ends = clock.now() + limit_s
    try:
        files = dict(_files(folder.resolve(strict=True), clock, ends))
        total = sum(files.values())
        if total > limit_bytes:
            return "cold"
        done = 0
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for path, size in files.items():
            done += _see_to(path, size, buffer, clock, ends)
            if on_progress is not None:
                on_progress(min(done, total), total)
    except (_Cold, OSError):
        return "cold"
    return "warm"


def _files(root: Path, clock: Clock, ends: float) -> Iterator[tuple[str, int]]:
    """The regular files below ``root`` with their sizes.

    Raises:
        _Cold: there is a link that leads out of it, or a folder that cannot be read, or it took too long.
    """
    todo = [str(root)]
    while todo:
        if clock.now() > ends:
            raise _Cold
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    # What it leads to inside is come upon there.
                    if not Path(entry.path).resolve().is_relative_to(root):
                        raise _Cold
                elif entry.is_dir():
                    todo.append(entry.path)
                elif entry.is_file():
                    yield entry.path, entry.stat().st_size


def _see_to(path: str, size: int, buffer: memoryview, clock: Clock, ends: float) -> int:
    """Have one file in the cache; returns its bytes.

    Raises:
        _Cold: the time is up. OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if size >= _WORTH_ASKING_BYTES and _resident(descriptor, size):
            return size
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while clock.now() <= ends:
            if not os.readv(descriptor, [buffer]):
                return size
    finally:
        os.close(descriptor)
    raise _Cold


def _resident(descriptor: int, size: int) -> bool:
    """Whether all of a file is in the page cache; False where the kernel would not say."""
    if os.fstat(descriptor).st_uid != os.geteuid() and not os.access(f"/proc/self/fd/{descriptor}", os.W_OK):
        return False
    pages = -(-size // mmap.PAGESIZE)
    answer = (ctypes.c_ubyte * pages)()
    try:
        # A private mapping is writable, and ctypes takes the address of no other. Nothing is written.
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapping:
            start = ctypes.c_char.from_buffer(mapping)
            refused = _libc.mincore(ctypes.addressof(start), size, answer)
            del start  # a mapping with a pointer into it cannot be closed
    except (OSError, ValueError):
        return False
    return not refused and b"\0" not in bytes(answer).translate(_LOWEST_BIT)
