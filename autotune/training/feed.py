"""Batches for a loop that is timed, with their wait times, epoch turn times and worker speed.

`Feed` takes them from a loader; `Resident` cycles through a few batches kept on the device. `Drain` tells when the
batches made before the first step are used up, and `longest_whole_s` whether whole epochs are to be measured. The
measuring loop and ``autotune train`` use the same ones. How a batch was made, `autotune.training.stopwatch` tells.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Protocol

from autotune.base.errors import WorkloadError
from autotune.training.stopwatch import Made

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
#: A batch that came within this many seconds had been made before.
AT_HAND_S = 1e-3
#: In an epoch of more full queues than this, its beginning and end do not matter.
MOSTLY_STEADY = 20


@dataclass(frozen=True)
class Delivery:
    """One batch and how it was delivered.

    Attributes:
        wait_s: how long the loop waited for it.
        made: how the worker made it.
        ready: it was finished before it was requested, so the wait is only the time to take it from the queue.
        turned: it is the first of a new epoch. Of a loader that does not know its length, this is known only now.
    """

    batch: Any
    wait_s: float
    made: Made
    ready: bool
    turned: bool = False


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


def length_of(loader: object) -> int | None:
    """Return the length of a loader, in batches, or of a data set; ``None`` if it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def no_batch() -> WorkloadError:
    """Return the error of a loader that delivers nothing."""
    return WorkloadError("an epoch of the loader has no batch", advice="look at what it reads, and at the batch size.")


def workers_and_queue(loader: Any) -> tuple[int, int]:
    """Return the number of a loader's workers, and of batches in its full queue; 0 where they are not told."""
    try:
        return loader.num_workers, loader.num_workers * (loader.prefetch_factor or 0)
    except AttributeError:
        return 0, 0


class Feed:
    """Endless batches from a loader, epoch after epoch. The workers start on construction.

    A batch need not come with a `Made`: a loader of the workload's own may not call the collate function. Nothing is
    known of how it was made then.

    Raises:
        WorkloadError: in `next`, if an epoch has no batch at all.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.workers, self.head_start = workers_and_queue(loader)
        self._started = time.monotonic()
        self._iterator: Iterator[Any] = iter(loader)
        self.epoch_batches: int | None = length_of(loader)
        self._left = self.epoch_batches
        self._dealt = 0
        #: Seconds from starting the workers to the first finished batch.
        self.first_batch_s: float | None = None
        self.turns_s: list[float] = []

    @property
    def epoch_over(self) -> bool:
        return self._left == 0 and self._dealt > 0

    def next(self) -> Delivery:
        asked = time.monotonic()
        turned = self.epoch_over
        try:
            item = self._turn() if turned else next(self._iterator)
        except StopIteration:
            # It does not know its length, or told another one.
            self.epoch_batches = self._dealt
            turned, item = True, self._turn()
        self._dealt += 1
        if self._left is not None:
            self._left -= 1
        now = time.monotonic()
        batch, made = item if _is_timed(item) else (item, Made(0.0, 0.0, asked if now - asked < AT_HAND_S else now))
        if self.first_batch_s is None:
            self.first_batch_s = made.finished_s - self._started if self.workers else now - asked
        if turned:
            self.turns_s.append(now - asked)
        return Delivery(batch, now - asked, made, made.finished_s <= asked, turned)

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

    def _turn(self) -> Any:
        # Like a plain loop, drop the old iterator and its workers before starting the next.
        del self._iterator
        self._iterator = iter(self.loader)
        self._left, self._dealt = self.epoch_batches, 0
        try:
            return next(self._iterator)
        except StopIteration:
            raise no_batch() from None


def _is_timed(item: Any) -> bool:
    # Some versions of PyTorch make a list of a tuple when they pin its tensors.
    return isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Made)


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
        return Delivery(batch, wait_s=0.0, made=Made(0.0, 0.0, time.monotonic()), ready=True)


class Drain:
    """Tells when a loop has used up the loader's head start.

    The workers fill their queue during start-up and compilation. Steps that draw on it run at the device's rate even if
    the loader is slower. While they do, the workers go on: a queue of n batches lasts for n / (1 - r) steps, where r
    is the loader's rate in parts of the device's. So the head start is over once the loop has to wait for batches, or
    has consumed a full queue of them from workers that are as fast as the device; it does not matter how much faster.

    Args:
        working: the batches are trained on. If not, only a consumed queue counts.
        emptied: the queue has been emptied before the first step.

    Attributes:
        steps: number of batches taken so far.
        step_s: mean duration of their steps, in seconds, with the waits for them; 0 before the first.
    """

    def __init__(self, source: Source, *, working: bool, emptied: bool = False) -> None:
        self._emptied = emptied
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
        self._made.append(delivery.made.seconds)
        workers, made_s = self._source.workers, mean(self._made)
        used_up = self.steps >= self._source.head_start
        if self._emptied or (used_up and (not self._working or not made_s)):
            # Of batches that nobody has timed, it is not known how fast they are made.
            return True
        # Batches made while none were consumed faced less competition for the cores, so a loader that appears only
        # slightly faster than the device is not trusted before they are used up.
        margin = 1.0 if used_up else 1.5
        keeps_up = not workers or (made_s > 0 and workers / made_s >= margin / step_s)
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


def epoch_turn_s(feed: Feed, usual_wait_s: float, epoch_s: float | None) -> float | None:
    """Return the extra seconds of an epoch turn, observed or forced; ``None`` if not worth measuring.

    Args:
        epoch_s: how long an epoch takes; ``None`` if it is not known where one ends.
    """
    if feed.turns_s:
        # Windows leave out the wait for an epoch's first batch, so all of it belongs to the turn.
        return median(feed.turns_s)
    if epoch_s is None:
        return None
    # The very first batch took a full worker start and the making of one batch; a turn takes no longer than
    # that. If that is negligible in an epoch, it is not worth a long wait to measure it.
    bound = feed.first_batch_s or 0.0
    if bound > TURN_AFFORDABLE_S and bound < TURN_MATTERS * epoch_s:
        return None
    feed.force_turn()
    return max(0.0, median(feed.turns_s) - usual_wait_s)
