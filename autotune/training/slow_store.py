"""A slow store in front of a folder: opening a file in it takes as long as a network would.

The waiting is real and reproducible: each file costs one latency, and its size at the bandwidth of one reader's
connection, as with an object store that is read by whole objects (several readers do not share a bandwidth). It is
done where Python opens files (an audit hook, PEP 578), which is where Pillow, NumPy and most data sets read; a
library that opens files by itself, such as HDF5's, is not slowed.

A cache in front of it is shown as it is after the first epoch: it holds as large a part of the files as fits, the same
ones all the time, and these do not wait. So no launch is faster because another one has read before it.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from autotune.base.records import DataRef, SlowStore
from autotune.workload.wrapping import Wrapper

#: Folders that are slow in this process, with a separator at the end.
_slow: dict[str, SlowStore] = {}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class _Front(Wrapper):
    """What stands in front of a data set, in whichever process reads it."""

    def __init__(self, inner: Dataset[Any], folder: str, store: SlowStore) -> None:
        super().__init__(inner)
        self._folder = folder
        self._store = store

    def _see_to_it(self) -> None:
        # A worker that was not forked begins without hooks.
        if os.path.join(os.path.abspath(self._folder), "") not in _slow:
            slow_down(self._folder, self._store)


class Stored(_Front, Dataset[Any]):
    """A data set whose files lie in a slow store."""

    def __getitem__(self, index: Any) -> Any:
        self._see_to_it()
        return self.inner[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        self._see_to_it()
        return self.many(indices)


class StoredStream(_Front, IterableDataset[Any]):
    """The same for one that is iterated."""

    def __iter__(self) -> Iterator[Any]:
        self._see_to_it()
        return iter(self.inner)


def slow_down(folder: str, store: SlowStore) -> None:
    """Let this process, and those that it forks, wait for each file that they open in a folder."""
    if not _slow:
        sys.addaudithook(_wait)
    # A link in the folder counts by its own name, and the folder may be reached by a link.
    for name in (os.path.abspath(folder), os.path.realpath(folder)):
        _slow[os.path.join(name, "")] = store


def behind_store(dataset: Dataset[Any], data: DataRef) -> Dataset[Any]:
    """Put the store of `data`, if there is one, in front of the files that a data set reads."""
    if data.store is None or data.path is None:
        return dataset
    front = StoredStream if isinstance(dataset, IterableDataset) else Stored
    return front(dataset, data.path, data.store)


def _wait(event: str, args: tuple[Any, ...]) -> None:
    if event != "open":
        return
    path, _, flags = args
    if not isinstance(path, str | bytes | os.PathLike) or (isinstance(flags, int) and flags & _WRITING):
        return
    name = os.path.abspath(os.fsdecode(path))
    found = _inside(name) or _inside(os.path.realpath(name))
    if found is None:
        return
    within, store = found
    if is_cached(within, store.cached):
        return
    try:
        size = os.stat(name).st_size
    except OSError:
        # Whoever opens it is told.
        return
    time.sleep(store.latency_s + size / store.bytes_per_s)


def _inside(name: str) -> tuple[str, SlowStore] | None:
    """Return a file's name below a slow folder, with the store; ``None`` if it is in none."""
    return next(((name.removeprefix(f), store) for f, store in _slow.items() if name.startswith(f)), None)


def is_cached(name: str, fraction: float) -> bool:
    """Return whether a file is among the `fraction` that a cache holds, by its name below the folder."""
    return zlib.crc32(os.fsencode(name)) < fraction * 2**32
