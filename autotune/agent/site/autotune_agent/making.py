"""Times how long a loader takes to make a batch, wherever that happens."""

from __future__ import annotations

import mmap
import os
import struct
import time
from functools import wraps
from typing import Any

#: Data sets that are counted; a script may make its data set anew for each epoch.
_DATASETS = 64
#: Workers that are told apart; those beyond share places, and what one of two writes at once may be lost.
_PLACES = 512
_SHAPE = struct.Struct("dq")


class Making:
    """Adds up the seconds and the number of batches of each data set, in memory that forked workers share.

    Workers that are spawned are not seen.
    """

    def __init__(self) -> None:
        # A forked worker's data set lies where that of its parent does.
        self._counts: dict[int, mmap.mmap] = {}

    def install(self) -> None:
        """Time all batches that are made from now on, here or in workers that are forked."""
        from torch.utils.data._utils import fetch

        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            self._time(kind)

    def _time(self, kind: Any) -> None:
        theirs = kind.fetch

        @wraps(theirs)
        def timed(fetcher: Any, *args: Any) -> Any:
            counts = self._counts.get(id(fetcher.dataset))
            if counts is None:
                return theirs(fetcher, *args)
            began = time.perf_counter()
            batch = theirs(fetcher, *args)
            _add(counts, time.perf_counter() - began)
            return batch

        kind.fetch = timed

    def expect(self, dataset: Any) -> None:
        """Count the batches of a data set whose loader is about to be iterated over."""
        if id(dataset) not in self._counts:
            while len(self._counts) >= _DATASETS:
                del self._counts[next(iter(self._counts))]
            self._counts[id(dataset)] = mmap.mmap(-1, _PLACES * _SHAPE.size)

    def stop(self) -> None:
        """Count no longer."""
        self._counts = {}

    def made(self, dataset: Any) -> tuple[float, int]:
        """Return the seconds in which batches of a data set were made, added up over workers, and their number."""
        counts = self._counts.get(id(dataset))
        if counts is None:
            return 0.0, 0
        found = list(_SHAPE.iter_unpack(counts[:]))
        return sum(seconds for seconds, _ in found), sum(number for _, number in found)


def _add(counts: mmap.mmap, more_s: float) -> None:
    at = os.getpid() % _PLACES * _SHAPE.size
    seconds, number = _SHAPE.unpack_from(counts, at)
    _SHAPE.pack_into(counts, at, seconds + more_s, number + 1)
