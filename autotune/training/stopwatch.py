"""How long each batch takes to make, timed in the process that makes it, and sent with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autotune.workload.wrapping import Wrapper

Collate = Callable[[list[Any]], Any]


class Made(NamedTuple):
    """How a batch was made, sent with it by the process that made it.

    Attributes:
        seconds: that it took. idle_s: of these, how long the process neither ran nor waited for a core: it waited for
            files or the network. 0 if the kernel does not tell; a little less for rounding.
        finished_s: when, on the monotonic clock, which all processes of a Linux machine share.
    """

    seconds: float
    idle_s: float
    finished_s: float


class Stopwatch(Wrapper, Dataset[Any]):
    """Times how long each batch takes to make, inside the worker.

    One object is both data set and collate function: the fetch starts in ``__getitems__`` and ends in `collate`, which
    the same process calls next. What is sent is the batch and a `Made`.
    """

    def __init__(self, inner: Dataset[Any], collate: Collate) -> None:
        super().__init__(inner)
        self._collate = collate
        self._began = 0.0
        self._busy: float | None = None

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]

    def start(self) -> None:
        """Begin a batch."""
        self._began, self._busy = time.monotonic(), _busy_s()

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        self.start()
        return self.many(indices)

    def collate(self, samples: Any) -> tuple[Any, Made]:
        batch = self._collate(samples)
        busy, before, finished = _busy_s(), self._busy, time.monotonic()
        seconds = finished - self._began
        idle_s = 0.0 if busy is None or before is None else seconds - (busy - before)
        return batch, Made(seconds, idle_s, finished)


class StreamStopwatch(Wrapper, IterableDataset[Any]):
    """A `Stopwatch` for a data set that is iterated: the fetch starts with the first sample of a batch."""

    def __init__(self, inner: IterableDataset[Any], collate: Collate) -> None:
        super().__init__(inner)
        self._watch = Stopwatch(inner, collate)
        self._running = False

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.inner)
        # The last batch of an epoch was begun, and not filled.
        self._running = False
        while True:
            if not self._running:
                self._watch.start()
                self._running = True
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield sample

    def collate(self, samples: Any) -> tuple[Any, Made]:
        self._running = False
        return self._watch.collate(samples)


def _busy_s() -> float | None:
    """Return for how many seconds this worker, or else this thread, has run or waited for a core, so far; ``None`` if
    the kernel does not tell (https://docs.kernel.org/scheduler/sched-stats.html)."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            waited_ns = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    # What has run is in that file, too, but only up to the scheduler's last tick. A worker's threads all make batches;
    # in the training's process, those of its kernels wait actively for their next work.
    ran_s = time.thread_time() if get_worker_info() is None else time.process_time()
    return ran_s + waited_ns / 1e9


def stopwatch(dataset: Dataset[Any], collate: Collate) -> tuple[Dataset[Any], Collate]:
    """Wrap a data set and its collate function in a `Stopwatch`, for the ``wrap`` argument of `open_loader`."""
    if isinstance(dataset, IterableDataset):
        stream = StreamStopwatch(dataset, collate)
        return stream, stream.collate
    watch = Stopwatch(dataset, collate)
    return watch, watch.collate
