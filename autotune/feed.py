"""Batches for a loop that is timed, with their wait times, epoch turn times and worker speed.

`Feed` takes them from a loader; `Resident` cycles through a few batches kept on the device. `Drain` tells when the
batches made before the first step are used up, and `longest_whole_s` whether whole epochs are to be measured. The
measuring loop and ``autotune train`` use the same ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset

#: A step "waited" if waiting for the loader took more than this fraction of it.
WAITED = 0.05
#: An epoch turn longer than this is forced for timing only if it could change the rate by more than
#: `TURN_MATTERS`; otherwise it stays unknown.
TURN_AFFORDABLE_S = 2.0
TURN_MATTERS = 1e-3
#: An epoch of at most this many full queues has no steady part. Epochs without one are measured whole, unless they take
#: longer than `LONGEST_EPOCH_S`.
NEVER_STEADY = 2
LONGEST_EPOCH_S = 45.0
#: In an epoch of more full queues than this, its beginning and end do not matter.
MOSTLY_STEADY = 20

Collate = Callable[[list[Any]], Any]


class Stopwatch(Dataset[Any]):
    """Times how long each batch takes to make, inside the worker.

    One object is both data set and collate function: the fetch starts in ``__getitems__`` and ends in `collate`, which
    the same process calls next. The batch is sent as ``(batch, seconds, finished)``; ``finished`` is on the monotonic
    clock, which all processes of a Linux machine share.
    """

    def __init__(self, inner: Dataset[Any], collate: Collate) -> None:
        self.inner = inner
        self._collate = collate
        self._began = 0.0

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        self._began = time.monotonic()
        many = getattr(self.inner, "__getitems__", None)
        return list(many(indices)) if many else [self.inner[i] for i in indices]

    def collate(self, samples: list[Any]) -> tuple[Any, float, float]:
        batch = self._collate(samples)
        finished = time.monotonic()
        return batch, finished - self._began, finished


def stopwatch(dataset: Dataset[Any], collate: Collate) -> tuple[Dataset[Any], Collate]:
    """Wrap a data set and its collate function in a `Stopwatch`, for the ``wrap`` argument of `open_loader`."""
    watch = Stopwatch(dataset, collate)
    return watch, watch.collate


@dataclass(frozen=True)
class Delivery:
    """One batch and how it was delivered.

    Attributes:
        wait_s: how long the loop waited for it.
        made_s: how long the worker took to make it.
        finished_s: when it was finished, on the monotonic clock.
        ready: it was finished before it was requested, so the wait is only the time to take it from the queue.
    """

    batch: Any
    wait_s: float
    made_s: float
    finished_s: float
    ready: bool


class Source(Protocol):
    """Supplies a loop with batches.

    Attributes:
        workers: number of processes that make batches in the background.
        head_start: number of batches in the queue when it is full.
        epoch_batches: number of batches in an epoch; ``None`` if it never ends.
        turns_s: seconds from the end of each epoch to the first batch of the next.
    """

    workers: int
    head_start: int
    epoch_batches: int | None
    turns_s: list[float]

    @property
    def epoch_over(self) -> bool:
        """Whether the next batch is the first of a new epoch."""
        ...

    def next(self) -> Delivery:
        """Return the next batch, starting a new epoch if this one is over."""
        ...


class Feed:
    """Endless batches from a loader, epoch after epoch. The workers start on construction."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.workers = loader.num_workers
        self.head_start = loader.num_workers * (loader.prefetch_factor or 0)
        self._started = time.monotonic()
        self._iterator: Iterator[Any] = iter(loader)
        self.epoch_batches: int | None = len(loader)
        self._left = len(loader)
        #: Seconds from starting the workers to the first finished batch.
        self.first_batch_s: float | None = None
        self.turns_s: list[float] = []

    @property
    def epoch_over(self) -> bool:
        return self._left == 0

    def next(self) -> Delivery:
        asked = time.monotonic()
        turned = self.epoch_over
        batch, made_s, finished = self._turn() if turned else next(self._iterator)
        self._left -= 1
        now = time.monotonic()
        if self.first_batch_s is None:
            self.first_batch_s = finished - self._started if self.loader.num_workers else now - asked
        if turned:
            self.turns_s.append(now - asked)
        return Delivery(batch, now - asked, made_s, finished, finished <= asked)

    def force_turn(self) -> None:
        """End this epoch early and time the start of the next one. Batches in flight are discarded."""
        asked = time.monotonic()
        self._turn()
        self.turns_s.append(time.monotonic() - asked)

    def close(self) -> None:
        """Stop the workers and wait for them to exit. No more batches are available afterwards."""
        shut_down = getattr(self._iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        self._iterator = iter(())

    def _turn(self) -> tuple[Any, float, float]:
        # Like a plain loop, drop the old iterator and its workers before starting the next.
        del self._iterator
        self._iterator = iter(self.loader)
        self._left = len(self.loader)
        batch, made_s, finished = next(self._iterator)
        return batch, made_s, finished


class Resident:
    """Batches kept on the device and used in rotation: no loader, no waiting, one endless epoch.

    Args:
        batches: at least one.
    """

    workers = 0
    head_start = 0
    epoch_batches: int | None = None
    epoch_over = False

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches
        self._dealt = 0
        self.turns_s: list[float] = []

    def next(self) -> Delivery:
        batch = self._batches[self._dealt % len(self._batches)]
        self._dealt += 1
        return Delivery(batch, wait_s=0.0, made_s=0.0, finished_s=time.monotonic(), ready=True)


class Drain:
    """Tells when a loop has used up the loader's head start.

    The workers fill their queue during start-up and compilation. Steps that draw on it run at the device's rate even if
    the loader is slower. The head start is over once the loop has to wait for a batch or has consumed a full queue of
    batches; it does not matter if the workers are faster than the device.

    Args:
        working: the batches are trained on. If not, only a consumed queue counts.

    Attributes:
        steps: number of batches taken so far.
        step_s: mean duration of their steps, in seconds, with the waits for them; 0 before the first.
    """

    def __init__(self, source: Source, *, working: bool) -> None:
        self.steps = 0
        self.step_s = 0.0
        self._source = source
        self._working = working
        self._waited: deque[bool] = deque(maxlen=3)
        self._made: deque[float] = deque(maxlen=8)

    def over(self, delivery: Delivery, step_s: float) -> bool:
        """Note a step, which took ``step_s`` seconds with the wait for its batch; return whether the queue is drained
        as far as can be told now."""
        self.steps += 1
        self.step_s += (step_s - self.step_s) / self.steps
        # Taking a ready batch from the queue can be most of a fast step; that does not mean the loader is slow.
        self._waited.append(not delivery.ready and delivery.wait_s > WAITED * step_s)
        self._made.append(delivery.made_s)
        if self.steps >= self._source.head_start:
            return True
        # Batches made while none were consumed faced less competition for the cores, so a loader that appears only
        # slightly faster than the device is not trusted.
        workers = self._source.workers
        keeps_up = not workers or workers / mean(self._made) > 1.5 / step_s
        return self._working and (keeps_up or sum(self._waited) >= 2)


def is_steady(source: Source) -> bool:
    """Return whether an epoch has a part in which its rate is steady.

    Workers run ahead by a full queue. As the epoch begins, they fill it, and compete with the training for the cores;
    during its last queue of batches, they have nothing left to do.
    """
    return source.epoch_batches is None or source.epoch_batches > NEVER_STEADY * source.head_start


def longest_whole_s(source: Source, affordable_s: float) -> float:
    """Return how long an epoch may take, in seconds, to be measured whole rather than in windows within it; 0 if there
    is no need.

    Args:
        affordable_s: an epoch may take this long if windows within it would not be far off.
    """
    if not is_steady(source):
        return LONGEST_EPOCH_S
    batches = source.epoch_batches
    return affordable_s if batches is not None and batches <= MOSTLY_STEADY * source.head_start else 0.0


def epoch_turn_s(feed: Feed, usual_wait_s: float, epoch_s: float) -> float | None:
    """Return the extra seconds of an epoch turn, observed or forced; ``None`` if not worth measuring."""
    if feed.turns_s:
        # Windows leave out the wait for an epoch's first batch, so all of it belongs to the turn.
        return median(feed.turns_s)
    # The very first batch took a full worker start and the making of one batch; a turn takes no longer than
    # that. If that is negligible in an epoch, it is not worth a long wait to measure it.
    bound = feed.first_batch_s or 0.0
    if bound > TURN_AFFORDABLE_S and bound < TURN_MATTERS * epoch_s:
        return None
    feed.force_turn()
    return max(0.0, median(feed.turns_s) - usual_wait_s)
