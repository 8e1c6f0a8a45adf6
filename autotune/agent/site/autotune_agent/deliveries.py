"""Notes what the loaders of a training deliver, so that two configurations of them can be compared sample by sample.

Launches with the same seed get the samples in the same order, and each batch is drawn twice in a row, by one worker
after the other. This distinguishes a data set that returns the same sample for the same index from one that draws at
random, and workers that draw the same numbers from workers that do not. While a batch is made, the state of the global
random number generators depends on its samples alone, so that augmentations that use them can be compared as well.
Epochs end early: what the script does between two epochs, and how its data set reacts, shows after a few batches.

None of this is meant for steps that are measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

from autotune_agent import dataset_state
from autotune_agent.setting import is_of_a_worker

#: How often each batch is drawn from a data set with indices.
TWICE = 2
#: Batches of a loader that is iterated over without gradients, and so evaluates.
_EVALUATED = 2
#: Stands for a part of a batch about which nothing is known; and how many parts are looked at.
_UNSEEN, _PLACES = "?", 256
#: Bytes of a digest, and the most samples of a batch that get one each.
_DIGEST, _ROWS = 6, 512
#: Bytes of the state of PyTorch's CPU generator that are defined: seed, left, seeded, next, and 624 words of 8 bytes.
_ENGINE = 8 + 4 + 4 + 8 + 624 * 8
#: A number of different batches; a loader that is asked for fewer is only being peeked into.
_PEEK = 2
#: This many batches of a first epoch and of a later one are enough where they take `_SLOW` times the limit of a first
#: one, as the training takes a step for each. Three show whether samples are kept.
_FEWEST, _SLOW = (3, 2), 3
#: Number of steps after the first one that tell whether steps are slow.
_TIMED = 2
#: Batches at which a process looks at what its data set keeps, the first time and once more.
_LOOKS = (1, 4)


class Noting:
    """Notes what loaders deliver that are iterated over with gradients on: one JSON object a line, each with ``e``:

    ===========  ===================================================================================================
    ``loader``   a loader is first iterated over: ``l`` (its number), ``kind``, ``iterable``, ``workers``, ``persist``
                 (whether the workers do)
    ``epoch``    an epoch of a loader begins: ``l``, ``n`` (from 0), ``changed`` (what the script has changed in its
                 data set since the last epoch ended)
    ``batch``    a batch has been delivered: ``l``, ``n``, ``k`` (its number in the epoch), ``i`` (its samples: indices,
                 or digests of them), ``d`` (for each part of the batch, a digest, or a list of one for each sample)
    ``end``      an epoch has ended: ``l``, ``n``, ``batches``; ``whole``: it did not end early
    ``fetch``    a process makes its first batch of an epoch: ``l``, ``w`` (number of the worker, or null), ``pid``,
                 ``states`` (digests of the global generators, by name)
    ``made``     a batch has been made: ``l``, ``w``, ``pid``, ``i``, ``s`` (seconds), ``used`` (names of the global
                 generators that it drew from)
    ``moved``    what a data set advances from one sample to the next: ``l``, ``what`` (a list of words)
    ``stores``   what a data set holds open, although no read from it has been noticed: ``l``, ``what``
    ``grown``    what in a data set holds more after a batch: ``l``, ``what``
    ``counts``   plain values of a data set that differ after a batch: ``l``, ``what``
    ``opened``   what is open, or running, when an epoch begins, and was not when the first began: ``l``, ``what``
    ``peek``     the latest epoch was not one: a loader was only asked for its first batches: ``l``
    ``lost``     nothing more is noted: ``why``
    ``done``     the requested number of epochs has been seen, or one that takes long
    ===========  ===================================================================================================

    Args:
        plan: ``path`` of the file; ``seed``; ``batches``, the number of different batches of a first epoch, ``[least,
            most]``; ``limit_s``, after which no more than the least are drawn; ``totals``, the batches of the first
            epoch of each data set, as far as they are known; ``second``, the most batches of a later epoch; ``epochs``;
            ``goes_on``, whether epochs that begin after these are whole, because the launch is to be measured then.
        ours: returns whether this process may be the one that trains.
        notes: whether this process is the one that notes; other ranks order samples alike and end epochs as early.
        may_end: returns whether a first epoch may end early, because all that is needed of the training has been seen.
    """

    def __init__(
        self,
        plan: dict[str, Any],
        ours: Callable[[], bool],
        *,
        notes: bool = True,
        may_end: Callable[[], bool] = lambda: True,
    ) -> None:
        self.plan = plan
        self._process = os.getpid()
        self._ours = ours
        self._notes = notes
        self.may_end = may_end
        #: Orders are fixed, and epochs end early, until the launch ends; deliveries are noted until `is_over`.
        self._active = True
        self.is_over = False
        #: An epoch has ended early.
        self.has_cut = False
        #: Patched functions: the holder, the name, our replacement, and the original.
        self._patched: list[tuple[Any, str, Any, Any]] = []
        #: The data sets by number, each with the epochs that have begun.
        self._sets: list[_Set] = []
        self._fetchers: weakref.WeakKeyDictionary[Any, _Process] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Act whenever an iterator of a loader is made, and whenever it makes or delivers a batch."""
        from torch.utils.data import _utils
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        kind: Any = _BaseDataLoaderIter
        original_init, original_next = kind.__init__, kind.__next__

        @wraps(original_init)
        def init(iterator: Any, loader: Any) -> None:
            order = self.safely(self._order, loader) if self._active and self._ours() else None
            if order is None:
                original_init(iterator, loader)
                return
            with _having(loader, _sampler_name(loader), order):
                original_init(iterator, loader)
            # PyTorch takes the length of the iterator from it.
            iterator._autotune_order = order

        @wraps(original_next)
        def next_batch(iterator: Any) -> Any:
            order = iterator.__dict__.get("_autotune_order")
            if order is None or not self._active or not self._ours():
                return original_next(iterator)
            try:
                batch = original_next(iterator)
            except StopIteration:
                self.safely(order.ended)
                raise
            self.safely(order.delivered, batch)
            return batch

        self._patch(kind, "__init__", init)
        self._patch(kind, "__next__", next_batch)
        for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
            self._watch(fetcher)

    def _watch(self, kind: Any) -> None:
        original = kind.fetch

        @wraps(original)
        def fetch(fetcher: Any, indices: Any) -> Any:
            process = None if self._lets_go else self._fetchers.get(fetcher)
            if process is None and self._active:
                process = self.safely(self._begins, fetcher)
            if process is None:
                return original(fetcher, indices)
            begun = self.safely(process.begin, indices)
            try:
                return original(fetcher, indices)
            finally:
                if begun is not None:
                    self.safely(process.end, begun)

        self._patch(kind, "fetch", fetch)

    def _patch(self, holder: Any, name: str, ours: Any) -> None:
        self._patched.append((holder, name, ours, getattr(holder, name)))
        setattr(holder, name, ours)

    def remove(self) -> None:
        """Note nothing more, and leave loaders as they were."""
        self._active = False
        for holder, name, replacement, original in reversed(self._patched):
            if getattr(holder, name) is replacement:
                setattr(holder, name, original)

    def _begins(self, fetcher: Any) -> _Process | None:
        data_set = next((s for s in self._sets if s.holds(fetcher.dataset)), None)
        if data_set is None or self._lets_go:
            return None
        process = self._fetchers[fetcher] = _Process(self, data_set)
        return process

    def _order(self, loader: Any) -> Order | None:
        import torch

        if not torch.is_grad_enabled():
            # Until an epoch of the training has been cut short, a script may rely on the length of an evaluation.
            return Order(self, loader, None) if self.has_cut else None
        if self._lets_go:
            return None
        data_set = next((s for s in self._sets if s.is_of(loader)), None)
        if data_set is None:
            data_set = _Set(len(self._sets), loader)
            self._sets.append(data_set)
            self.note(
                "loader",
                l=data_set.number,
                kind=type(loader.dataset).__name__,
                iterable=data_set.iterable,
                workers=loader.num_workers,
                persist=bool(loader.persistent_workers),
            )
        data_set.hold(loader)
        return Order(self, loader, data_set)

    @property
    def _lets_go(self) -> bool:
        """Whether the training's own loaders are left alone from now on."""
        return self.is_over and bool(self.plan.get("goes_on"))

    def note(self, event: str, **facts: Any) -> None:
        """Write an event, from any process: lines written in one call do not mix."""
        if not self._notes or self.is_over:
            return
        line = json.dumps({"e": event, **facts}, separators=(",", ":"), default=str) + "\n"
        # Workers come later; to them, a missing file means that no more notes are wanted: everything has been read.
        make = os.O_CREAT if os.getpid() == self._process else 0
        try:
            descriptor = os.open(self.plan["path"], os.O_WRONLY | make | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            self.is_over = True
            return
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def safely(self, act: Any, *told: Any) -> Any:
        """Call a function; whatever goes wrong in it, the training goes on."""
        try:
            return act(*told)
        except Exception as error:
            if is_of_a_worker(error):
                raise
            with contextlib.suppress(OSError):
                self.note("lost", why=f"{type(error).__name__}: {error}")
            self.is_over = True
            return None

    def over(self, known: _Set) -> None:
        """Note that an epoch of a data set is over."""
        if known.epochs >= self.plan["epochs"] and not self.is_over:
            self.note("done")
            self.is_over = True


class _Set:
    """A data set of the training, whichever loader it is in.

    Attributes:
        epochs: the number that have begun. most: different batches of its first epoch, once that is known. places: what
            was open when it was first iterated over, and first: what it kept then. Anything newer belongs to the
            process that has it.
        kept: what it kept when its last epoch ended. is_peek: whether so few batches of the latest epoch were asked for
            that the script only looked at what a batch is like. workers: those of its first loader.
    """

    def __init__(self, number: int, loader: Any) -> None:
        from torch.utils.data import IterableDataset

        self.number = number
        self.iterable = isinstance(loader.dataset, IterableDataset)
        self.epochs = 0
        self.most: int | None = None
        self.places = dataset_state.open_places()
        self.first = dataset_state.Kept()
        self.kept: dataset_state.Kept | None = None
        self.is_peek = False
        self._kind = (type(loader.dataset), _length(loader.dataset))
        self._dataset: Callable[[], Any] = lambda: None
        self._collate: Any = None
        self.workers = loader.num_workers

    def is_of(self, loader: Any) -> bool:
        """Whether a loader, perhaps a new one, iterates over this data set, or over one like it in its place."""
        if self.holds(loader.dataset):
            return True
        return self._dataset() is None and self._kind == (type(loader.dataset), _length(loader.dataset))

    def hold(self, loader: Any) -> None:
        """Note that a loader begins to iterate over it."""
        data = loader.dataset
        try:
            self._dataset = weakref.ref(data)
        except TypeError:
            # Classes with slots have no weak references.
            self._dataset = lambda: data
        self._collate = loader.collate_fn
        if not self.epochs:
            self.first, self.places = self.walk(), dataset_state.open_places()

    def holds(self, dataset: Any) -> bool:
        """Whether it is this object, also in a worker that was forked."""
        return self._dataset() is dataset

    def walk(self) -> dataset_state.Kept:
        """Look at what it keeps."""
        return dataset_state.walk({"dataset": self._dataset(), "collate_fn": self._collate})

    def opened(self) -> list[list[str]]:
        """Return what is open or running in the process that trains, and was not when its first epoch began: workers
        that are started now share it, or get a copy each."""
        return [[path, words] for path, words in self.walk().opened_since(self.first).items()]


def _length(dataset: Any) -> int | None:
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset):
        return None
    try:
        return len(dataset)
    except Exception:
        return None


class Order:
    """Some choices of a loader's sampler, each twice, the same in every launch with the same seed.

    Args:
        known: the loader's data set; ``None`` if the loader evaluates, which gives its first few choices.
    """

    def __init__(self, deliveries: Noting, loader: Any, known: _Set | None) -> None:
        self._deliveries = deliveries
        self._known = known
        self._sampler = loader._index_sampler
        self._times = 1 if known is None or known.iterable else TWICE
        samplers = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        candidates: list[Any] = [getattr(holder, "generator", None) for holder in samplers]
        self._generators = [generator for generator in candidates if generator is not None]
        self._drawn: list[Any] = []
        self._number = self._taken = 0
        self._whole = False
        #: Enough of it has been noted, and yet it goes on; ``None`` until that can be told.
        self._stays: bool | None = False
        self._second_at = 0.0

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        data_set = self._known
        if data_set is None:
            for indices, _ in zip(self._sampler, range(_EVALUATED)):  # noqa: B905
                yield indices
            return
        deliveries = self._deliveries
        deliveries.safely(self._begin, data_set)
        # Every epoch has the same order, so that a difference must have another reason.
        with _Stream(deliveries.plan["seed"], self._generators) as stream:
            choices = iter(self._sampler)
        began, is_enough, yielded = time.monotonic(), False, 0
        while True:
            is_enough = is_enough or self._is_enough(data_set, time.monotonic() - began)
            if is_enough and data_set.most is None:
                data_set.most = len(self._drawn) // self._times
            if is_enough and self._stays is None and self._taken > _TIMED:
                self._stays = self._is_slow()
            if is_enough and self._stays is False and self._may_end(yielded):
                return
            with stream:
                indices = next(choices, self)
            if indices is self:
                self._whole = True
                if data_set.most is None:
                    data_set.most = len(self._drawn) // self._times
                return
            yielded += 1 if is_enough else self._times
            if is_enough:
                # The epoch goes on, as too little has been seen of the training yet.
                yield indices
                continue
            for _ in range(self._times):
                self._drawn.append(indices)
                yield indices

    def _begin(self, known: _Set) -> None:
        deliveries = self._deliveries
        if known.epochs and known.is_peek:
            known.epochs -= 1
            deliveries.note("peek", l=known.number)
        deliveries.over(known)
        self._drawn, self._taken, self._whole = [], 0, False
        known.is_peek = True
        self._number, known.epochs = known.epochs, known.epochs + 1
        self._stays = False if self._number or not deliveries.plan.get("goes_on") else None
        changed = [] if known.kept is None else known.walk().changed_since(known.kept)
        deliveries.note("epoch", l=known.number, n=self._number, changed=changed)
        if self._number and known.workers:
            opened = known.opened()
            if opened:
                deliveries.note("opened", l=known.number, what=opened)

    def _may_end(self, asked: int) -> bool:
        """Whether an epoch of which enough has been noted may end after this many batches: at the same number as in
        the launch that it is compared with, or as soon as the training has been seen."""
        totals, data_set = self._deliveries.plan.get("totals") or [], self._known
        if self._number or data_set is None:
            return True
        # The same number as in that launch, also for a data set that is read only once, to compute its means.
        return asked >= totals[data_set.number] if data_set.number < len(totals) else self._deliveries.may_end()

    def _is_enough(self, known: _Set, seconds: float) -> bool:
        plan, drawn = self._deliveries.plan, len(self._drawn) // self._times
        fewest = _FEWEST[min(self._number, 1)]
        least, most = plan["batches"]
        # Compared with another launch, as many are drawn as there; and all ranks draw equally many.
        timed = not plan.get("totals") and least < most
        slow = timed and drawn >= fewest and seconds > _SLOW * plan["limit_s"]
        if self._number:
            return slow or drawn >= int(plan["second"]) or drawn == known.most
        return bool(drawn >= most or slow or (drawn >= least and seconds > plan["limit_s"]))

    def _is_slow(self) -> bool:
        """Whether another epoch would cost so many steps again, before any step is measured, that this one goes on
        instead. Workers are ahead of the training, so its own steps are timed, without the first one. The next batch is
        asked for when the step with the last one has ended."""
        step_s = (time.monotonic() - self._second_at) / (self._taken - 1)
        least, _ = self._deliveries.plan["batches"]
        steps = self._times * least
        return bool(self._taken < steps and steps * step_s > _SLOW * self._deliveries.plan["limit_s"])

    def delivered(self, batch: Any) -> None:
        """Note a batch that has been delivered."""
        data_set = self._known
        if data_set is None:
            return
        if self._taken == 1:
            self._second_at = time.monotonic()
        data_set.is_peek &= self._taken + 1 < self._times * _PEEK
        if self._taken >= len(self._drawn):
            self._taken += 1
            self._stay()
            return
        samples = _names(self._drawn[self._taken])
        self._deliveries.note(
            "batch",
            l=data_set.number,
            n=self._number,
            k=self._taken,
            i=None if data_set.iterable else samples,
            d=_digests(batch, len(samples)),
        )
        self._taken += 1
        self._stay()

    def _stay(self) -> None:
        """Stop noting, if this epoch goes on and enough of it has been noted."""
        enough = min(len(self._drawn), self._times * _FEWEST[0])
        if self._stays and self._taken >= enough and not self._deliveries.is_over:
            self._deliveries.note("done")
            self._deliveries.is_over = True

    def ended(self) -> None:
        """Note that no more batches come."""
        data_set = self._known
        if data_set is None:
            return
        data_set.kept = data_set.walk()
        data_set.is_peek = False
        if data_set.iterable:
            self._whole = self._taken < len(self._drawn)
        self._deliveries.has_cut |= not self._whole
        epoch = {"l": data_set.number, "n": self._number}
        self._deliveries.note("end", **epoch, batches=self._taken, drawn=len(self._drawn), whole=self._whole)
        self._deliveries.over(data_set)


class Repeating:
    """Lets loaders of a training deliver their first batches again and again, so that a data set that keeps what it has
    made behaves as in its later epochs.

    Args:
        count: the number of different batches. ours: returns whether this process may be the one that trains.
    """

    def __init__(self, count: int, ours: Callable[[], bool]) -> None:
        self._count = count
        self._ours = ours
        #: Data sets, each with what has been drawn from it.
        self._drawn: list[tuple[Any, list[Any]]] = []

    def install(self) -> None:
        """Act whenever an iterator of a loader is made."""
        import torch
        from torch.utils.data import IterableDataset
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        kind: Any = _BaseDataLoaderIter
        original_init = kind.__init__

        @wraps(original_init)
        def init(iterator: Any, loader: Any) -> None:
            if not self._ours() or not torch.is_grad_enabled() or isinstance(loader.dataset, IterableDataset):
                original_init(iterator, loader)
                return
            drawn = next((d for dataset, d in self._drawn if dataset is loader.dataset), None)
            if drawn is None:
                drawn = []
                self._drawn.append((loader.dataset, drawn))
            with _having(loader, _sampler_name(loader), _Repeated(loader._index_sampler, drawn, self._count)):
                original_init(iterator, loader)

        kind.__init__ = init


class _Repeated:
    def __init__(self, sampler: Any, drawn: list[Any], count: int) -> None:
        self._sampler, self._drawn, self._count = sampler, drawn, count

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self._sampler):
            if len(self._drawn) < self._count:
                self._drawn.append(indices)
            yield self._drawn[number % len(self._drawn)] if len(self._drawn) == self._count else indices


class _Process:
    """A process that makes the batches of an epoch."""

    def __init__(self, deliveries: Noting, known: _Set) -> None:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        self._deliveries = deliveries
        self._who: dict[str, Any] = {
            "l": known.number,
            "w": None if worker is None else worker.id,
            "pid": os.getpid(),
        }
        self._known = known
        self._seed = deliveries.plan["seed"]
        self._count = 0
        self._before: tuple[dataset_state.Kept, dict[int, tuple[str, Any]]] | None = None
        # Workers exist before the epoch begins.
        epoch = known.epochs - 1 if worker is None else known.epochs
        deliveries.note("fetch", **self._who, n=epoch, states=_states())

    def begin(self, indices: Any) -> _Begun:
        """Make random numbers depend on the samples of a batch alone while it is made."""
        self._count += 1
        if self._count in _LOOKS:
            self._before = self._known.walk(), dataset_state.open_places()
        names = self._names(indices)
        outside = _RandomState()
        outside.seed(_number(self._seed, names))
        return _Begun(names, outside, _states(), time.perf_counter())

    def end(self, begun: _Begun) -> None:
        """Note that it has been made, or has failed; the process's own random numbers go on as before."""
        seconds = time.perf_counter() - begun.at
        used = [name for name, state in _states().items() if begun.states.get(name) != state]
        begun.outside.restore()
        self._deliveries.note("made", **self._who, i=begun.names, s=round(seconds, 6), used=used)
        if self._before is not None:
            self._look(*self._before)
            self._before = None

    def _names(self, indices: Any) -> list[Any]:
        if self._known.iterable:
            return [self._who["w"] or 0, self._count]
        return _names(indices)

    def _look(self, before: dataset_state.Kept, places: dict[int, tuple[str, Any]]) -> None:
        state, data_set = self._known.walk(), self._known
        # What a process has opened or made for itself, it shares with no other.
        moved = {path: w for path, w in state.moved_since(before).items() if path in data_set.first.movers}
        shared = {fd: at for fd, at in places.items() if fd in data_set.places and data_set.places[fd][0] == at[0]}
        files = dataset_state.moved_places(shared, dataset_state.open_places())
        what = [[path, words] for path, words in moved.items()]
        what += [["", words] for words in files if words not in moved.values()]
        if what:
            self._deliveries.note("moved", **self._who, what=what)
        counts = state.counted_since(before)
        if counts:
            self._deliveries.note("counts", **self._who, what=counts[:8])
        grown = state.grown_since(before)
        if grown:
            self._deliveries.note("grown", **self._who, what=grown)
        # Even if no sample has been read from a file so far, a later one may be.
        held = {**state.stores, **state.open_files()}
        held_at_first = {**data_set.first.stores, **data_set.first.open_files()}
        what = [[path, words] for path, words in held.items() if path in held_at_first and path not in moved]
        if what:
            self._deliveries.note("stores", **self._who, what=what)


class _Begun(NamedTuple):
    """A batch being made: its samples, the process's own random state, the states it starts with, and its start."""

    names: list[Any]
    outside: _RandomState
    states: dict[str, str]
    at: float


class _RandomState:
    """The state of the global random number generators of this process, which can be restored.

    Args:
        generators: other generators of PyTorch, whose states are restored as well.
    """

    def __init__(self, generators: Sequence[Any] = ()) -> None:
        import torch

        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def seed(self, number: int) -> None:
        import torch

        for generator, _ in self._generators:
            generator.manual_seed(number)
        # Keep `torch.initial_seed`, the first 8 bytes: what is derived from it is to differ between workers as ever.
        state = torch.Generator().manual_seed(number).get_state()
        state[:8] = self._torch[:8]
        torch.default_generator.set_state(state)
        random.seed(number)
        if self._numpy is not None:
            sys.modules["numpy"].random.seed(number % 2**32)

    def restore(self) -> None:
        import torch

        torch.default_generator.set_state(self._torch)
        for generator, state in self._generators:
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class _Stream:
    """The random numbers of a sampler, which start from a seed and continue from one choice to the next."""

    def __init__(self, seed: int, generators: list[Any]) -> None:
        self._seed = seed
        self._generators = generators
        self._own: _RandomState | None = None
        self._outside = _RandomState(generators)

    def __enter__(self) -> _Stream:
        self._outside = _RandomState(self._generators)
        if self._own is None:
            self._outside.seed(self._seed)
        else:
            self._own.restore()
        return self

    def __exit__(self, *_: object) -> None:
        self._own = _RandomState(self._generators)
        self._outside.restore()


def _states() -> dict[str, str]:
    """Return digests of the states of the global generators of this process."""
    import torch

    # Seed and state of the Mersenne Twister; the rest of PyTorch's state is partly undefined.
    engine = torch.default_generator.get_state()[:_ENGINE]
    digests = {"torch": _digest(dataset_state.memory(engine)), "random": _digest(repr(random.getstate()))}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        digests["numpy"] = _digest(state[1].tobytes() + repr(state[2:]).encode())
    return digests


def _number(seed: int, names: list[Any]) -> int:
    return int.from_bytes(hashlib.blake2b(repr((seed, names)).encode(), digest_size=7).digest(), "big")


def _names(indices: Any) -> list[Any]:
    """Return what a sampler has chosen for a batch: numbers as they are, digests of anything else."""
    if hasattr(indices, "tolist"):
        indices = indices.tolist()
    chosen = list(indices) if isinstance(indices, (list, tuple)) else [indices]
    return [i if isinstance(i, int) else _digest(repr(i)) for i in chosen]


def _digests(batch: Any, samples: int) -> dict[str, Any]:
    """Return digests of a batch by the path of each part: one per sample if the part has as many rows, else one."""
    digests: dict[str, Any] = {}
    _add(batch, "", samples, digests, 0)
    return digests


def _add(part: Any, path: str, samples: int, found: dict[str, Any], depth: int) -> None:
    import torch

    if depth > 12 or len(found) >= _PLACES:
        found[path] = _UNSEEN
    elif isinstance(part, torch.Tensor):
        found[path] = _of_tensor(part, samples)
    elif isinstance(part, (Mapping, list, tuple)) and not len(part):
        found[path] = _digest(type(part).__name__)
    elif isinstance(part, Mapping):
        for name, value in part.items():
            _add(value, f"{path}[{name!r}]", samples, found, depth + 1)
    elif isinstance(part, (list, tuple)):
        if len(part) > 16 or all(isinstance(value, (str, bytes, int, float, bool)) for value in part):
            found[path] = [_of_thing(value) for value in part[:_ROWS]]
        else:
            for i, value in enumerate(part):
                _add(value, f"{path}[{i}]", samples, found, depth + 1)
    else:
        whole = _of_thing(part)
        attributes = dataset_state.attributes(path, part) if whole == _UNSEEN else []
        for name, value in attributes:
            _add(value, name, samples, found, depth + 1)
        if not attributes:
            found[path] = whole


def _of_tensor(tensor: Any, samples: int) -> Any:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        return _digest(repr(tensor))
    values = tensor.detach().cpu().contiguous()
    kind = f"{tensor.dtype}{tuple(tensor.shape[1:])}".encode()
    if tensor.dim() and tensor.shape[0] == samples and 0 < samples <= _ROWS and values.numel():
        return [_digest(kind, dataset_state.memory(row)) for row in values]
    return _digest(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), dataset_state.memory(values))


def _of_thing(thing: Any) -> str:
    import torch

    if isinstance(thing, torch.Tensor):
        return str(_of_tensor(thing, 0))
    if isinstance(thing, (list, tuple, dict)):
        digests: dict[str, Any] = {}
        _add(thing, "", 0, digests, 1)
        if _UNSEEN in digests.values():
            return _UNSEEN
        return _digest(json.dumps(digests, default=str))
    if hasattr(thing, "tobytes"):
        # Arrays and images.
        return _digest(str(getattr(thing, "dtype", getattr(thing, "mode", ""))).encode(), thing.tobytes())
    if isinstance(thing, (str, bytes, int, float, complex, bool, type(None))):
        return _digest(repr(thing))
    if isinstance(thing, (set, frozenset)):
        return _digest(*sorted(map(_of_thing, thing)))
    return _UNSEEN


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def _sampler_name(loader: Any) -> str:
    return "batch_sampler" if loader._auto_collation else "sampler"


@contextlib.contextmanager
def _having(loader: Any, name: str, value: Any) -> Iterator[None]:
    """Give a loader another attribute for a while, around its ban on setting some of them once it is made."""
    held, before = loader.__dict__, loader.__dict__[name]
    held[name] = value
    try:
        yield
    finally:
        held[name] = before
