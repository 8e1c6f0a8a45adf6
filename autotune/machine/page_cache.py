"""Reads a folder's files into the kernel's page cache, so that all launches read as fast, or drops them.

mincore(2) tells how much of a file is cached already. Since Linux 5.2 the kernel answers truthfully only for files
that the caller owns or may write to, and reports any other file as fully resident; such files are simply read.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.base.clock import Clock
from autotune.machine.host import read_host

#: By default, data larger than this fraction of the free memory is not read: the training itself would evict a cache
#: that fills all of it.
CACHE_FRACTION = 0.5
#: Default time limit for reading, in seconds.
WARM_S = 60.0
_CHUNK_BYTES = 4 * 2**20
#: For a smaller file the query takes as long as reading it from the cache.
_WORTH_ASKING_BYTES = 2**20
#: Files that are looked at to see whether the kernel has dropped them.
_LOOKED_AT = 64
#: How often, and with which pause in between, a file is asked for that is looked at.
_TRIES, _PAUSE_S = 3, 0.1
#: mincore returns one byte per page, of which only the lowest bit is defined.
_LOWEST_BIT = bytes(byte & 1 for byte in range(256))
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte)]


class _Cold(Exception):
    """Not all of the folder will be in the cache."""


def warm(
    folder: Path,
    *,
    limit_bytes: int | None = None,
    limit_s: float = WARM_S,
    clock: Clock,
    on_progress: Callable[[int, int], None] | None = None,
) -> str:
    """Read all files below ``folder`` that are not in the page cache yet.

    Never raises because of the folder's content. A file that cannot be read, or a link out of the folder, makes the
    answer ``cold``, since what a training would read there may not be cached.

    Args:
        folder: may itself be a link.
        limit_bytes: read nothing if the files are larger in total, because they would evict each other; ``None`` for
            `CACHE_FRACTION` of the free memory.
        limit_s: stop reading after this many seconds.
        on_progress: called with the bytes done so far and the total.

    Returns:
        ``warm`` if every regular file was read or already cached within the limits, else ``cold``.
    """
    ends = clock.now() + limit_s
    if limit_bytes is None:
        limit_bytes = int(CACHE_FRACTION * read_host().available_bytes)
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


def evict(folder: Path, *, limit_s: float, clock: Clock) -> bool:
    """Ask the kernel to drop all files below ``folder`` from the page cache (posix_fadvise(2), POSIX_FADV_DONTNEED).

    Pages that are mapped, dirty, or in use by others stay. A network file system may have caches of its own.

    Returns:
        Whether every regular file was asked for in time, and no page of the first ones is left.
    """
    ends = clock.now() + limit_s
    looked = 0
    try:
        for path, size in _files(folder.resolve(strict=True), clock, ends):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                look = looked < _LOOKED_AT and size >= mmap.PAGESIZE
                looked += look
                if not _dropped(descriptor, size if look else None, clock):
                    return False
            finally:
                os.close(descriptor)
    except (_Cold, OSError):
        return False
    return looked > 0


def _dropped(descriptor: int, size: int | None, clock: Clock) -> bool:
    """Ask the kernel to drop a file of ``size`` bytes, and again if any page is left; ``None`` does not look.

    A page that was read or looked at a moment ago is still in use by the kernel, and stays.
    """
    for again in range(_TRIES):
        if again:
            clock.sleep(_PAUSE_S)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if size is None or _resident_pages(descriptor, size) == 0:
            return True
    return False


def _files(root: Path, clock: Clock, ends: float) -> Iterator[tuple[str, int]]:
    """Yield the regular files below ``root`` with their sizes.

    Raises:
        _Cold: a link leads out of ``root``, or time is up.
    """
    todo = [str(root)]
    while todo:
        if clock.now() > ends:
            raise _Cold
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    # The target of a link inside the folder is listed at its own place.
                    if not Path(entry.path).resolve().is_relative_to(root):
                        raise _Cold
                elif entry.is_dir():
                    todo.append(entry.path)
                elif entry.is_file():
                    yield entry.path, entry.stat().st_size


def _see_to(path: str, size: int, buffer: memoryview, clock: Clock, ends: float) -> int:
    """Bring one file into the cache; return its size.

    Raises:
        _Cold: time is up. OSError: the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if size >= _WORTH_ASKING_BYTES and _resident_pages(descriptor, size) == -(-size // mmap.PAGESIZE):
            return size
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while clock.now() <= ends:
            if not os.readv(descriptor, [buffer]):
                return size
    finally:
        os.close(descriptor)
    raise _Cold


def _resident_pages(descriptor: int, size: int) -> int | None:
    """Return how many pages of a file are in the page cache; ``None`` if the kernel does not tell."""
    if os.fstat(descriptor).st_uid != os.geteuid() and not os.access(f"/proc/self/fd/{descriptor}", os.W_OK):
        return None
    pages = -(-size // mmap.PAGESIZE)
    answer = (ctypes.c_ubyte * pages)()
    try:
        # ctypes can take the address of a writable mapping only, so map privately. Nothing is written.
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapping:
            start = ctypes.c_char.from_buffer(mapping)
            refused = _libc.mincore(ctypes.addressof(start), size, answer)
            del start  # a mapping with a pointer into it cannot be closed
    except (OSError, ValueError):
        return None
    return None if refused else bytes(answer).translate(_LOWEST_BIT).count(1)
