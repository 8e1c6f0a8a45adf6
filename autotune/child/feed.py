"""Batches as the measuring loop sees them: their waits, epoch turns, and how fast the workers are.

From a loader (`Feed`), or the same few again and again (`Resident`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset

from autotune.training import Collate


class Stopwatch(Dataset[Any]):
    """Times the making of each batch where it is made, in the worker.

    Data set and collate function in one object: the fetch begins in ``__getitems__`` and ends in `collate`, in the same
    process one after the other. The batch travels as ``(batch, seconds, finished)``; ``finished`` is on the
    monotonic clock, which all processes of a Linux machine share.
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
    """`training.open_loader`'s ``wrap``."""
    watch = Stopwatch(dataset, collate)
    return watch, watch.collate


@dataclass(frozen=True)
class Delivery:
    """One batch and how it came.

    Attributes:
        wait_s: how long the loop stood still for it.
        made_s: how long its making took, in the worker.
        finished_s: when it had been made, on the monotonic clock.
        ready: that was before it was asked for; what was waited was only the way out of the queue.
    """

    batch: Any
    wait_s: float
    made_s: float
    finished_s: float
    ready: bool


class Source(Protocol):
    """Where a loop's batches come from.

    Attributes:
        workers: processes that make batches while the loop does something else.
        head_start: batches that lie ready when these have had nothing else to do.
        turns_s: seconds each epoch turn took.
    """

    workers: int
    head_start: int
    turns_s: list[float]

    @property
    def epoch_over(self) -> bool:
        """Whether the next batch is the first of a new epoch."""
        ...

    def next(self) -> Delivery:
        """The next batch; starts the next epoch when this one is over."""
        ...


class Feed:
    """Endless batches from a loader, epoch after epoch. The workers start when it is made."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.workers = loader.num_workers
        self.head_start = loader.num_workers * (loader.prefetch_factor or 0)
        self._started = time.monotonic()
        self._iterator: Iterator[Any] = iter(loader)
        self._left = len(loader)
        #: Seconds from the start of the workers to the first finished batch.
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
        """End this epoch here and time the way into the next one. Batches under way are thrown away."""
        asked = time.monotonic()
        self._turn()
        self.turns_s.append(time.monotonic() - asked)

    def close(self) -> None:
        """End the workers, and wait until they are gone. No batch can be had any more."""
        shut_down = getattr(self._iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        self._iterator = iter(())

    def _turn(self) -> tuple[Any, float, float]:
        # A plain loop lets go of the old iterator, and so of its workers, before the next one starts.
        del self._iterator
        self._iterator = iter(self.loader)
        self._left = len(self.loader)
        batch, made_s, finished = next(self._iterator)
        return batch, made_s, finished


class Resident:
    """Batches that stay on the device, dealt in turns: no loader, no waiting, one endless epoch.

    Args:
        batches: at least one.
    """

    workers = 0
    head_start = 0
    epoch_over = False

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches
        self._dealt = 0
        self.turns_s: list[float] = []

    def next(self) -> Delivery:
        batch = self._batches[self._dealt % len(self._batches)]
        self._dealt += 1
        return Delivery(batch, wait_s=0.0, made_s=0.0, finished_s=time.monotonic(), ready=True)
