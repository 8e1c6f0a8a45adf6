"""What feeds a training: its loader, opened as a configuration says, and the time that its batches are waited for."""

from __future__ import annotations

import os
import select
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune.base.errors import WorkloadError
from autotune.base.records import DataRef, SlowStore
from autotune.workload.contract import Wrapper

# A loader whose first epoch begins before it is iterated. Imports torch.


class StartedLoader(DataLoader[Any]):
    """A DataLoader whose workers begin with the first epoch as soon as it is made.

    They are forked before the process holds a model, as in a trial. The first ``iter`` returns the epoch that has
    begun, each later one a new epoch. Where the user may first tell which epoch it is, none begins early.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._begun: _BaseDataLoaderIter | None = None
        super().__init__(*args, **kwargs)
        told = (self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.dataset)
        is_told = any(hasattr(one, "set_epoch") and not hasattr(one, "was_told") for one in told)
        # Without workers, there is nothing to start.
        if self.num_workers > 0 and not is_told:
            self._begun = super().__iter__()

    def check_worker_number_rationality(self) -> None:
        """Do not warn about more workers than cores: their number was measured."""

    def __iter__(self) -> _BaseDataLoaderIter:
        iterator, self._begun = self._begun, None
        if getattr(self.sampler, "was_told", False):
            iterator = None
        return super().__iter__() if iterator is None else iterator


# The order in which the launches of a study read a data set.
#
# Each launch continues where the one before ended, so that it reads samples that no launch has read before, as long as
# the set is large enough. If all read the same samples, or some of the same by chance, the first would bring them
# into a cache (the kernel's, a network file system's, a store's) for the others, which would look faster than a
# first epoch is.


class SampleOrder(Sampler[int]):
    """Random passes through a data set, one after another, from some place on.

    Each iteration draws as many samples as the set has. The next one continues after the last sample drawn, even if the
    iteration was abandoned before its end.

    Several ranks divide the passes among them: each draws every ``ranks``-th sample, and its iterations are shorter by
    that factor.

    Args:
        seed: that of the passes; each has a permutation of its own (`torch.randperm`).
        first: number of samples drawn earlier, by all ranks.
        rank: the number of this rank.

    Attributes:
        size: number of samples in the set; 0 until `over` sets it.
        drawn: number of samples drawn by this object, including those that a loader has requested in advance.
    """

    def __init__(self, seed: int, first: int = 0, *, rank: int = 0, ranks: int = 1) -> None:
        self.seed = seed
        self.first = first
        self.rank = rank
        self.ranks = ranks
        self.size = 0
        self.drawn = 0
        #: The latest pass: its number and its permutation.
        self._pass: tuple[int, list[int]] = (-1, [])

    def over(self, size: int) -> SampleOrder:
        """Return this order, for a set of `size` samples."""
        self.size = size
        return self

    def __len__(self) -> int:
        return self.size // self.ranks

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            number, place = divmod(self.first + self.rank + self.drawn * self.ranks, self.size)
            index = self._permutation(number)[place]
            self.drawn += 1
            yield index

    def _permutation(self, number: int) -> list[int]:
        if self._pass[0] != number or len(self._pass[1]) != self.size:
            # Shifted, so that studies with neighbouring seeds have no pass in common.
            generator = torch.Generator().manual_seed(((self.seed << 20) + number) % 2**63)
            self._pass = number, torch.randperm(self.size, generator=generator).tolist()
        return self._pass[1]


# How long each batch takes to make: measured in the process that makes it, and sent with it.


Collate = Callable[[list[Any]], Any]


class Made(NamedTuple):
    """How a batch was made, sent with it by the process that made it.

    Attributes:
        seconds: how long it took; 0 if that is not known. idle_s: how many of these seconds the process neither ran
            nor waited for a core, but for files or the network. 0 if the kernel does not tell; rounding can make it
            slightly negative.
        finished_s: when it was finished, on the monotonic clock, which all processes of a Linux machine share.
    """

    seconds: float
    idle_s: float
    finished_s: float


class Stopwatch(Wrapper, Dataset[Any]):
    """Times how long each batch takes to make, inside the worker.

    One object is both data set and collate function: the fetch starts in ``__getitems__``, or with the first
    ``__getitem__`` of a loader that takes samples one by one, and ends in `collate`, which the same process calls next.
    It sends the batch and a `Made`.
    """

    def __init__(self, inner: Dataset[Any], collate: Collate) -> None:
        super().__init__(inner)
        self._collate = collate
        self._began: float | None = None
        self._busy: float | None = None

    def __getitem__(self, index: Any) -> Any:
        if self._began is None:
            self.start()
        return self.inner[index]

    def start(self) -> None:
        """Begin a batch."""
        self._began, self._busy = time.monotonic(), _busy_s()

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        self.start()
        return self.many(indices)

    def collate(self, samples: Any) -> tuple[Any, Made]:
        batch = self._collate(samples)
        busy, before, began, finished = _busy_s(), self._busy, self._began, time.monotonic()
        self._began = None
        if began is None:
            # A loader of the user's has read other data.
            return batch, Made(0.0, 0.0, finished)
        seconds = finished - began
        idle_s = 0.0 if busy is None or before is None else seconds - (busy - before)
        return batch, Made(seconds, idle_s, finished)


class StreamStopwatch(Wrapper, IterableDataset[Any]):
    """A `Stopwatch` for an iterable data set: the fetch starts with the first sample of a batch."""

    def __init__(self, inner: IterableDataset[Any], collate: Collate) -> None:
        super().__init__(inner)
        self._watch = Stopwatch(inner, collate)
        self._running = False

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.inner)
        # The last batch of the previous epoch was begun, but not filled.
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
    """Return the seconds for which this worker, or else this thread, has run or waited for a core so far; ``None`` if
    the kernel does not tell (https://docs.kernel.org/scheduler/sched-stats.html)."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            waited_ns = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    # The time run is in that file, too, but only up to the scheduler's last tick. A worker's threads all make batches;
    # in the training's process, the threads of its kernels spin while they wait for work.
    ran_s = time.thread_time() if get_worker_info() is None else time.process_time()
    return ran_s + waited_ns / 1e9


def stopwatch(dataset: Dataset[Any], collate: Collate) -> tuple[Dataset[Any], Collate]:
    """Wrap a data set and its collate function in a `Stopwatch`, for the ``wrap`` argument of `open_loader`."""
    if isinstance(dataset, IterableDataset):
        stream = StreamStopwatch(dataset, collate)
        return stream, stream.collate
    watch = Stopwatch(dataset, collate)
    return watch, watch.collate


# Batches for a loop that is timed, with their wait times, epoch turn times and worker speed.
#
# `Feed` takes them from a loader; `Resident` cycles through a few batches kept on the device. `Drain` tells when the
# batches made before the first step are used up, and `longest_whole_s` whether whole epochs are to be measured. The
# measuring loop and ``autotune train`` use the same classes. `Made` tells how a batch was made.

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
#: A batch that came within this many seconds had already been made.
AT_HAND_S = 1e-3
#: In an epoch of more full queues than this, the beginning and the end do not matter.
MOSTLY_STEADY = 20


@dataclass(frozen=True)
class Delivery:
    """One batch and how it was delivered.

    Attributes:
        wait_s: how long the loop waited for it.
        made: how the worker made it.
        ready: whether it was finished before it was requested, so that the wait is only the time to take it from the
            queue.
        turned: whether it is the first of a new epoch. If a loader does not know its length, this is known only now.
        handed_s: the part of `wait_s` in which it was handed over: it had been made, and something from the workers was
            there to be received, when it was requested; ``None`` if that is not known.
    """

    batch: Any
    wait_s: float
    made: Made
    ready: bool
    turned: bool = False
    handed_s: float | None = None


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
    """Return the number of a loader's workers, and of batches in its full queue; 0 where it does not tell."""
    try:
        return loader.num_workers, loader.num_workers * (loader.prefetch_factor or 0)
    except AttributeError:
        return 0, 0


class Feed:
    """Endless batches from a loader, epoch after epoch. The workers start on construction.

    A batch need not come with a `Made`: a loader of the workload's own may not call the collate function. Then nothing
    is known about how it was made.

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
        arrived = self._has_arrived()
        start = time.monotonic()
        turned = self.epoch_over
        try:
            item = self._turn() if turned else next(self._iterator)
        except StopIteration:
            # The loader does not know its length, or reported a wrong one.
            self.epoch_batches = self._dealt
            turned, item = True, self._turn()
        self._dealt += 1
        if self._left is not None:
            self._left -= 1
        now = time.monotonic()
        batch, made = item if _is_timed(item) else (item, Made(0.0, 0.0, start if now - start < AT_HAND_S else now))
        if self.first_batch_s is None:
            self.first_batch_s = made.finished_s - self._started if self.workers else now - start
        if turned:
            self.turns_s.append(now - start)
        ready = made.finished_s <= start
        handed_s = None
        if arrived is not None and batch is not item:
            # The next batch may be another worker's, which has not arrived although this one was made.
            handed_s = now - start if arrived and ready else 0.0
        return Delivery(batch, now - start, made, ready, turned, handed_s)

    def force_turn(self) -> None:
        """End this epoch early and time the start of the next one. Batches in flight are discarded."""
        start = time.monotonic()
        self._turn()
        self.turns_s.append(time.monotonic() - start)

    def close(self) -> None:
        """Stop the workers and wait for them to exit. No more batches are available afterwards."""
        shut_down = getattr(self._iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        self._iterator = iter(())

    def _has_arrived(self) -> bool | None:
        """Return whether something that workers have sent waits to be received; ``None`` if that cannot be known.

        If a batch that was made is not in the pipe, it is still with its worker, whose thread pickles it.
        """
        results = getattr(self._iterator, "_worker_result_queue", None)
        reader = getattr(results, "_reader", None)
        if reader is None:
            return None
        try:
            # This is on the way of each measured step, and `Connection.poll` makes a selector each time.
            return bool(select.select((reader.fileno(),), (), (), 0)[0])
        except (OSError, ValueError):
            return None

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
    # Some versions of PyTorch turn a tuple into a list when they pin its tensors.
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
    the loader is slower. Meanwhile, the workers go on: a queue of n batches lasts for n / (1 - r) steps, where r is the
    loader's rate as a fraction of the device's. So the head start is over once the loop has to wait for batches, or
    has consumed a full queue of them from workers that are as fast as the device; it does not matter how much faster.

    Args:
        working: whether the batches are trained on. If not, only a consumed queue counts.
        emptied: whether the queue was emptied before the first step.

    Attributes:
        steps: number of batches taken so far.
        step_s: mean duration of their steps in seconds, including the waits for batches; 0 before the first.
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
        """Note a step, which took ``step_s`` seconds with the wait for its batch; return whether the queue is drained,
        as far as can be known now."""
        self.steps += 1
        self.step_s += (step_s - self.step_s) / self.steps
        # Taking a ready batch from the queue can be most of a fast step; that does not mean the loader is slow.
        self._waited.append(not delivery.ready and delivery.wait_s > WAITED * step_s)
        self._made.append(delivery.made.seconds)
        workers, made_s = self._source.workers, mean(self._made)
        used_up = self.steps >= self._source.head_start
        if self._emptied or (used_up and (not self._working or not made_s)):
            # If nobody has timed the batches, it is not known how fast they are made.
            return True
        # Batches made while none were consumed faced less competition for the cores, so a loader that appears only
        # slightly faster than the device is not trusted before they are used up.
        margin = 1.0 if used_up else 1.5
        keeps_up = not workers or (made_s > 0 and workers / made_s >= margin / step_s)
        return self._working and (keeps_up or sum(self._waited) >= 2)


def is_steady(source: Source) -> bool:
    """Return whether an epoch has a part in which its rate is steady.

    Workers run ahead by a full queue. As the epoch begins, they fill it, and compete with the training for the cores;
    during the last queue of batches, they have nothing left to do.
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
        epoch_s: how long an epoch takes, in seconds; ``None`` if it is not known where one ends.
    """
    if feed.turns_s:
        # Windows leave out the wait for an epoch's first batch, so all of it belongs to the turn.
        return median(feed.turns_s)
    if epoch_s is None:
        return None
    # The very first batch took a full worker start and the making of one batch; a turn takes no longer than that. If
    # that is negligible in an epoch, measuring it is not worth a long wait.
    bound = feed.first_batch_s or 0.0
    if bound > TURN_AFFORDABLE_S and bound < TURN_MATTERS * epoch_s:
        return None
    feed.force_turn()
    return max(0.0, median(feed.turns_s) - usual_wait_s)


# A slow store in front of a folder: opening a file in it takes as long as it would over a network.
#
# The waiting is real and reproducible: each file costs one latency, plus its size at the bandwidth of one reader's
# connection, as with an object store that is read by whole objects (several readers do not share a bandwidth). It is
# done where Python opens files (an audit hook, PEP 578), which is how Pillow, NumPy and most data sets read; a library
# that opens files by itself, such as HDF5's, is not slowed.
#
# A cache in front of the store is simulated in its state after the first epoch: it holds as large a part of the files
# as fits, always the same ones, and these do not wait. So no launch is faster because another one has read before it.

#: The slow folders of this process, with a separator at the end.
_slow: dict[str, SlowStore] = {}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class _Front(Wrapper):
    """A slow store in front of a data set, in whichever process reads it."""

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
    """The same for an iterable data set."""

    def __iter__(self) -> Iterator[Any]:
        self._see_to_it()
        return iter(self.inner)


def slow_down(folder: str, store: SlowStore) -> None:
    """Make this process, and those that it forks, wait for each file that they open in a folder."""
    if not _slow:
        sys.addaudithook(_wait)
    # A link in the folder counts by its own name, and the folder itself may be reached through a link.
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
    match = _inside(name) or _inside(os.path.realpath(name))
    if match is None:
        return
    relative, store = match
    if is_cached(relative, store.cached):
        return
    try:
        size = os.stat(name).st_size
    except OSError:
        # The code that opens the file gets the error.
        return
    time.sleep(store.latency_s + size / store.bytes_per_s)


def _inside(name: str) -> tuple[str, SlowStore] | None:
    """Return a file's name relative to its slow folder, and the store; ``None`` if it is in none."""
    return next(((name.removeprefix(f), store) for f, store in _slow.items() if name.startswith(f)), None)


def is_cached(name: str, fraction: float) -> bool:
    """Return whether a file is among the `fraction` that a cache holds, by its name below the folder."""
    return zlib.crc32(os.fsencode(name)) < fraction * 2**32
