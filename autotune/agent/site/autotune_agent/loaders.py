"""The doors of loaders, and the workers that take over from one another."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from itertools import islice
from typing import Any

from autotune_agent import dataset_state
from autotune_agent.deliveries import Noting
from autotune_agent.facts import batch_size, bytes_in, samples_in, would_run_again
from autotune_agent.setting import Setting, safely, say

# Loaders that are being iterated over, and which of them iterate in a way of their own.

#: The ids of loaders for which `DataLoader.__iter__`, or the agent itself, is about to make an iterator.
_begun: set[int] = set()


@contextmanager
def beginning(loader: Any) -> Iterator[None]:
    """Within this context, a new iterator of a loader is not one that the loader makes in its own way."""
    if id(loader) in _begun:
        yield
        return
    _begun.add(id(loader))
    try:
        yield
    finally:
        _begun.discard(id(loader))


def iterates_itself(loader: Any) -> bool:
    """Return whether a loader makes an iterator without `DataLoader.__iter__`, as some do that keep one forever."""
    from torch.utils.data import DataLoader

    return id(loader) not in _begun and type(loader).__iter__ is not DataLoader.__iter__


# Continues an epoch of a loader with other workers. What the script iterates over stays the same object.

#: Marks an iterator for which others deliver, and holds their `Relay`.
_RELAY = "_autotune_relay"
_NUMBERS = itertools.count(1)
#: PyTorch's advice on the number of workers is of no use to a script where we have chosen that number.
UNADVISED: dict[str, Any] = {"check_worker_number_rationality": lambda: None}


class Indices:
    """The sampler's choices of an epoch that no iterator has been given yet."""

    def __init__(self, left: Iterator[Any]) -> None:
        self._left = left
        self._back: deque[Any] = deque()

    def __next__(self) -> Any:
        return self._back.popleft() if self._back else next(self._left)

    def __iter__(self) -> Indices:
        return self

    def put_back(self, indices: deque[Any]) -> None:
        """Make these the next ones."""
        self._back.extendleft(reversed(indices))


class Share:
    """The part of the `Indices` that one iterator is given.

    Attributes:
        pending: what it was given and has not delivered, in order.
        over: whether it is given no more.
    """

    def __init__(self, indices: Indices) -> None:
        self._indices = indices
        self.pending: deque[Any] = deque()
        self.over = False

    def __next__(self) -> Any:
        if self.over:
            raise StopIteration
        choice = next(self._indices)
        self.pending.append(choice)
        return choice

    def __iter__(self) -> Share:
        return self


class Relay:
    """The iterators that deliver an epoch's batches, one after the other, each until it has delivered all it was given.
    Samples come in the sampler's order, each as often as without us.

    The first is the script's own, which the script asks for batches. It is not referenced here, so that it ends with
    the script's loop.
    """

    def __init__(self, indices: Indices, share: Share | None, *, tried: bool) -> None:
        self._indices = indices
        #: What delivers now, and what follows: the iterator (``None`` for the script's own), its share (``None`` if it
        #: began without us), and whether others take over if it fails.
        self._runners: deque[tuple[Any, Share | None, bool]] = deque([(None, share, tried)])

    @property
    def is_stranded(self) -> bool:
        """Whether no iterator is left to deliver."""
        return not self._runners

    def hand_over(self, front: Any, loader: Any, *, tried: bool) -> None:
        """Let a new iterator of the loader, with its present arguments, deliver what no iterator has been given yet.

        Args:
            front: the script's own iterator.

        Raises:
            Exception: the new one could not be made, and those before it go on.
        """
        share = Share(self._indices)
        try:
            iterator = _made(loader, share)
        except BaseException:
            self._indices.put_back(share.pending)
            raise
        if tried:
            _be_quiet(iterator)
        if self._runners:
            last_share = self._runners[-1][1]
            if last_share is None:
                front._sampler_iter = iter(())
            else:
                last_share.over = True
        self._runners.append((iterator, share, tried))

    def fail(self, front: Any) -> None:
        """Take back everything that has not been delivered, as the first iterator has failed."""
        for runner, share, _ in reversed(self._runners):
            if share is not None:
                share.over = True
                self._indices.put_back(share.pending)
            with contextlib.suppress(Exception):
                # Only those with workers have this method.
                (front if runner is None else runner)._shutdown_workers()
        self._runners.clear()

    def next(self, front: Any, take: Callable[[Any], Any], recover: Callable[[Exception], None]) -> Any:
        """Return the next batch.

        Args:
            take: returns an iterator's next batch. recover: called when one on trial has failed; hands over to another.
        """
        while True:
            runner, share, tried = self._runners[0]
            try:
                batch = take(front if runner is None else runner)
            except StopIteration:
                if len(self._runners) == 1:
                    raise
                self._runners.popleft()
                continue
            except Exception as error:
                if not tried:
                    raise
                failed = error
            else:
                if share is not None:
                    share.pending.popleft()
                return batch
            self.fail(front)
            recover(failed)


def relay_of(iterator: Any) -> Relay | None:
    """Return the relay that delivers for an iterator; ``None`` if it delivers itself."""
    relay: Relay | None = iterator.__dict__.get(_RELAY)
    return relay


def join(iterator: Any) -> Relay:
    """Let others deliver for an iterator later, from what its loader's sampler has not yielded yet."""
    relay = Relay(Indices(iterator._sampler_iter), None, tried=False)
    setattr(iterator, _RELAY, relay)
    return relay


def begin(loader: Any, theirs: Callable[[Any], Any]) -> Any:
    """Begin an epoch with an iterator for which others take over if it fails; return it.

    Args:
        theirs: returns the iterator of a loader.
    """
    sampler = loader._index_sampler
    indices = Indices(iter(sampler))
    share = Share(indices)
    with replaced(loader, **{_sampler_name(loader): share}):
        iterator = theirs(loader)
    _be_quiet(iterator)
    # The length of the iterator is that of its sampler.
    iterator._index_sampler = sampler
    setattr(iterator, _RELAY, Relay(indices, share, tried=True))
    return iterator


def _made(loader: Any, share: Share) -> Any:
    """Return an iterator of a loader over a share, without taking random numbers that the script would get."""
    import torch

    # The workers of each iterator are to draw different numbers.
    seed = (torch.initial_seed() + next(_NUMBERS)) % 2**63
    generator = torch.Generator().manual_seed(seed)
    with replaced(loader, generator=generator, **UNADVISED, **{_sampler_name(loader): share}), beginning(loader):
        return loader._get_iterator()


def _be_quiet(iterator: Any) -> None:
    """Let an iterator report the death of a worker when it is asked for a batch, where others can take over.

    PyTorch would raise it from a signal handler, wherever the script is at that moment.
    """
    from torch.utils.data import _utils

    if getattr(iterator, "_worker_pids_set", False):
        remove: Any = getattr(_utils.signal_handling, "_remove_worker_pids")  # noqa: B009
        remove(id(iterator))
        iterator._worker_pids_set = False


def _copied(sampler: Any, loader: Any) -> Any:
    """Return a copy of a loader's sampler over the same data set, with the same generators of random numbers."""
    shared = [
        loader.dataset,
        *(getattr(one, "generator", None) for one in (sampler, getattr(sampler, "sampler", None))),
    ]
    return copy.deepcopy(sampler, {id(one): one for one in shared if one is not None})


def _sampler_name(loader: Any) -> str:
    return "batch_sampler" if loader._auto_collation else "sampler"


@contextlib.contextmanager
def replaced(loader: Any, **attributes: Any) -> Iterator[None]:
    """Give a loader other attributes for a while, around its ban on setting some of them once it is made."""
    held = loader.__dict__
    before = {name: held[name] for name in attributes if name in held}
    held.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del held[name]
        held.update(before)


class AskedAsEver:
    """A sampler that is asked for epochs as often as in the script by itself, with as many random numbers taken.

    With workers, PyTorch makes the iterator of a loader's sampler twice and uses the second. A sampler whose
    ``__iter__`` counts epochs, or shuffles at once, would be an epoch ahead. Workers that persist are not seeded anew,
    for which each other iterator takes a random number.

    Args:
        twice: the script's own loader has workers that do not persist. generator: the loader's.
    """

    def __init__(self, sampler: Any, *, twice: bool, generator: Any) -> None:
        self._sampler = sampler
        self._twice = twice
        self._generator = generator
        self._calls = 0
        self._first: _Unused | None = None

    def __iter__(self) -> Iterator[Any]:
        import torch

        self._calls += 1
        if self._calls > 2:
            choices = iter(self._sampler)
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            return iter(self._sampler) if self._twice else choices
        if self._first is not None and not self._twice and not self._first.used:
            return self._first
        self._first = _Unused(iter(self._sampler))
        return self._first

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _Unused:
    """An iterator, and whether it has been used."""

    def __init__(self, choices: Iterator[Any]) -> None:
        self._choices = choices
        self.used = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.used = True
        return next(self._choices)


# Workers that persist because of us: the script expects a loader to begin anew each time.

#: Marks an iterator whose workers persist because of us: whether it has said that there are no more batches.
_OVER = "_autotune_over"
#: The most loaders whose workers persist because of us. Each keeps its processes for as long as there is the loader.
_MOST_PERSISTENT = 4


def _note_end(iterator: Any) -> None:
    """Let an iterator note when it has said that there are no more batches."""
    iterator.__dict__[_OVER] = False
    if "_next_data" in iterator.__dict__:
        return
    # It is freed with the last reference to it, which ends its workers.
    this: Callable[[], Any] = weakref.ref(iterator)

    def next_data() -> Any:
        it = this()
        try:
            return type(it)._next_data(it)
        except StopIteration:
            it.__dict__[_OVER] = True
            raise

    iterator._next_data = next_data


def _is_going_on(loader: Any) -> bool:
    """Return whether the script still iterates over a loader whose workers persist."""
    import torch

    held = loader.__dict__
    # Some loops keep an iterator that they have taken the last batch from; others evaluate after the last step.
    is_empty = not getattr(held["_iterator"], "_task_info", True) and torch.is_grad_enabled()
    # Referenced by the loader, and by the call that counts.
    return not (is_empty or held["_iterator"].__dict__.get(_OVER, True)) and sys.getrefcount(held["_iterator"]) > 2


# The door of the loaders: `DataLoader.__iter__` before a loader's first epoch, or `DataLoader._get_iterator` of one
# that iterates in its own way.

#: PyTorch's default for loaders with workers.
_PREFETCH = 2
_NO_MORE = object()
#: Marks an iterator of the script, and holds its loader, until there are no more batches.
_LOADER = "_autotune_loader"
#: The part of /dev/shm that batches made in advance may fill.
_SHM_PART = 0.25
#: Where nothing was compared, looking at a data set may take this many times as long: seconds, once.
_THOROUGH = 20
#: The same in each epoch, for workers that persist because of us.
_EACH_EPOCH = 4
#: The arguments of a loader that are set.
_ARGUMENTS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


class LoaderDoor:
    """Sets arguments of loaders: ``num_workers``, ``prefetch_factor``, ``pin_memory``, ``persistent_workers``, and by
    ``batch_memory``, ``fresh`` or ``slots``, where batches lie; compares ``batch_size``.

    They are set when a loader is first iterated over, not when it is made: only then is it known whether it is for
    training. One that is iterated over without gradients evaluates, and stays as it is.

    Args:
        ours: returns whether this process may be the one that trains.
        compared: whether what loaders deliver under these settings has been compared with what the script's own
            deliver. If not, data sets that hold something that copies may not share are refused workers.
        rescue: if given, loaders will be switched to other arguments later, in the middle of an epoch. Called with an
            error under such arguments, it returns a function that restores the script's own, or ``None`` if they are in
            force already.
    """

    def __init__(
        self,
        settings: list[Setting],
        ours: Callable[[], bool],
        *,
        compared: bool = False,
        rescue: Callable[[Exception], Callable[[], None] | None] | None = None,
    ) -> None:
        self._settings = settings
        self._ours = ours
        self._compared = compared
        self._rescue = rescue
        #: For loaders whose workers persist because of us: what the data sets kept when the workers were started.
        self._kept: weakref.WeakKeyDictionary[Any, dataset_state.Kept] = weakref.WeakKeyDictionary()
        #: The script's own arguments of each loader for training.
        self._own: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        #: The loader that was iterated over last.
        self._latest: weakref.ref[Any] | None = None
        #: For each loader, what the script iterates over now, and the bytes in its first batch.
        self._fronts: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._bytes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Act whenever a loader is iterated over."""
        import torch
        from torch.utils.data import DataLoader

        original = DataLoader.__iter__

        def is_for_training(loader: Any) -> bool:
            # Loaders of some classes are not hashable, and cannot be told apart.
            return torch.is_grad_enabled() and self._ours() and type(loader).__hash__ is not None

        def iterate(loader: Any) -> Any:
            with beginning(loader):
                return iterator_of(loader)

        def iterator_of(loader: Any) -> Any:
            safely(self._begin_anew, loader)
            if not is_for_training(loader):
                return original(loader)
            if not safely(self._see, loader):
                iterator = original(loader)
            else:
                asked = safely(self._asked_as_ever, loader) or {}
                with replaced(loader, **UNADVISED, **asked):
                    # If it may be switched back, others deliver for one that fails.
                    iterator = original(loader) if self._rescue is None else begin(loader, original)
                if safely(self._persists, loader):
                    safely(_note_end, iterator)
            if self._rescue is not None:
                self._note(loader, iterator)
            return iterator

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        if self._rescue is not None:
            # A loader that iterates in its own way is not switched.
            self._install_relays()
            return
        original_get = DataLoader._get_iterator

        def get_iterator(loader: Any) -> Any:
            if iterates_itself(loader) and is_for_training(loader) and safely(self._see, loader):
                with replaced(loader, **UNADVISED):
                    return original_get(loader)
            return original_get(loader)

        DataLoader._get_iterator = get_iterator  # type: ignore[method-assign, assignment]

    def _see(self, loader: Any) -> bool:
        """Set what is to be set for a loader that begins an epoch; return whether its arguments then differ from the
        script's own."""
        if loader not in self._own:
            self._own[loader] = {name: getattr(loader, name) for name in _ARGUMENTS}
            self._set(loader)
        self._latest = weakref.ref(loader)
        if self._persists(loader):
            self._renew(loader)
        elif loader.num_workers not in (0, self._own[loader]["num_workers"]):
            self._set_back(loader)
        return self._is_tried(loader)

    def _persists(self, loader: Any) -> bool:
        """Whether a loader's workers persist only because of us."""
        own = self._own.get(loader) if type(loader).__hash__ is not None else None
        return own is not None and loader.persistent_workers and not own["persistent_workers"]

    def _asked_as_ever(self, loader: Any) -> dict[str, Any]:
        """Return the sampler to give to a loader whose workers, or their persistence, are ours."""
        own = self._own[loader]["num_workers"]
        if self._rescue is not None or not loader.num_workers or (own and not self._persists(loader)):
            return {}
        sampler = AskedAsEver(loader._index_sampler, twice=own > 0, generator=loader.generator)
        return {_sampler_name(loader): sampler}

    def _begin_anew(self, loader: Any) -> None:
        """Let a loader begin an epoch beside one that goes on, as it would without workers that persist."""
        if not self._persists(loader) or getattr(loader, "_iterator", None) is None:
            return
        if not self._ours() or not _is_going_on(loader):
            return
        # Those that go on end with the script's loop.
        loader._iterator._persistent_workers = False
        loader.__dict__.update(persistent_workers=False, _iterator=None)
        say("workers are started anew in each epoch: the script begins another one before the last is over")

    def _renew(self, loader: Any) -> None:
        """End workers that persist only because of us, if the script has changed something in their data set since they
        were started: they would not see it."""
        now = _walk(loader, times=_EACH_EPOCH)
        before = self._kept.get(loader)
        changed = [] if before is None or loader._iterator is None else now.changed_since(before)
        if not now.whole:
            if loader._iterator is not None:
                loader._iterator._shutdown_workers()
            say("workers are started anew in each epoch: their data set holds more than can be looked at")
            loader.__dict__.update(persistent_workers=False, _iterator=None)
        elif changed:
            loader._iterator._shutdown_workers()
            loader._iterator = None
            say(
                f"workers are started anew in each epoch: the script has changed {changed[0]}, which they would not see"
            )
            # One change is enough to stop persisting.
            loader.__dict__["persistent_workers"] = False
        self._kept[loader] = now

    def _set_back(self, loader: Any) -> None:
        """Give a loader the script's own workers again, if something that new workers would share has been opened since
        its first epoch, such as by an evaluation of the same files."""
        now = _walk(loader)
        before = self._kept.setdefault(loader, now)
        opened = {p: w for p, w in now.opened_since(before).items() if w.startswith(("the open", "an open"))}
        if opened:
            path, words = next(iter(opened.items()))
            loader.__dict__.update(self._own[loader], collate_fn=_own_collate(loader.collate_fn))
            say(f"workers are the script's own again: they would share {words} ({path}), which was opened meanwhile")

    def _install_relays(self) -> None:
        """Let relays deliver for the iterators that a script has."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        original = _BaseDataLoaderIter.__next__

        @wraps(original)
        def next_batch(iterator: Any) -> Any:
            loader = iterator.__dict__.get(_LOADER)
            if loader is None or not self._ours():
                return original(iterator)
            relay = relay_of(iterator)
            try:
                if relay is None:
                    batch = original(iterator)
                else:
                    batch = relay.next(iterator, original, partial(self._recover, iterator))
            except StopIteration:
                iterator.__dict__.pop(_LOADER)
                raise
            if loader not in self._bytes:
                self._bytes[loader] = safely(bytes_in, batch) or 0
            return batch

        _BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign, assignment]

    def _note(self, loader: Any, iterator: Any) -> None:
        # Iterators of other libraries' loaders may have no place for it.
        if type(iterator).__module__ == "torch.utils.data.dataloader":
            iterator.__dict__[_LOADER] = loader
            self._fronts[loader] = weakref.ref(iterator)

    def _is_tried(self, loader: Any) -> bool:
        """Whether a loader has other arguments than the script's own."""
        is_set = any(getattr(loader, name) != value for name, value in self._own[loader].items())
        return is_set or loader.collate_fn is not _own_collate(loader.collate_fn)

    def _set(self, loader: Any) -> None:
        wanted: dict[str, Any] = {}
        needs_look = any("batch_size" not in setting.arguments for setting in self._settings)
        state = _walk(loader, times=1 if self._compared else _THOROUGH) if needs_look else dataset_state.Kept()

        def want(setting: Setting) -> str | None:
            if "batch_size" in setting.arguments:
                return _compare(loader, setting)
            if setting.ask:
                # The question is answered as if there were workers. What the data set holds is looked at later.
                return _why_not(loader, {"num_workers": max(1, loader.num_workers), **setting.arguments}, state)
            arguments = {**wanted, **setting.arguments}
            held = (
                None
                if self._compared or arguments.get("num_workers") in (None, 0, loader.num_workers)
                else state.is_held()
            )
            persistent = sum(self._persists(other) for other in list(self._own))
            crowd = "workers of other loaders persist" if persistent >= _MOST_PERSISTENT else None
            crowd = crowd if arguments.get("persistent_workers") and not loader.persistent_workers else None
            reason = held or crowd or _why_not(loader, arguments, state)
            if reason is None:
                wanted.update(setting.arguments)
            return reason

        # The number of workers comes first in a configuration, and other settings depend on it.
        for setting in self._settings:
            setting.try_to(partial(want, setting))
        if wanted:
            # A loader forbids setting some of them once it is made, because most loaders have an iterator then.
            loader.__dict__.update(self._completed(loader, wanted))

    def switch(self, told: dict[str, Any]) -> None:
        """Set all loaders for training to something else, in the middle of an epoch: batches that have been begun are
        delivered, and the next ones are made under other arguments.

        Args:
            told: the arguments to be in force; empty for the script's own.

        Raises:
            RuntimeError: a loader cannot have them.
        """
        for loader in list(self._own):
            completed = self._completed(loader, told) if told else {"collate_fn": _own_collate(loader.collate_fn)}
            wanted = {**self._own[loader], **completed}
            before = {name: getattr(loader, name) for name in wanted}
            if wanted == before:
                self._deliver(loader)
                continue
            reason = self._why_not_now(loader, wanted) if told else None
            if reason is not None:
                raise RuntimeError(reason)
            loader.__dict__.update(wanted)
            try:
                self._deliver(loader, anew=True)
            except BaseException:
                loader.__dict__.update(before)
                raise

    def alone(self, told: dict[str, Any], least_s: float) -> dict[str, Any]:
        """Take batches of the training's loader under other arguments, as fast as they come. Nothing trains, and the
        epoch that the script is in stays where it is.

        Args:
            told: arguments of the loader. least_s: seconds to take batches for, at least; it goes on until each worker
                has made equally many.

        Returns:
            ``batches``, ``samples`` and ``seconds``, counted once each worker has delivered. If epochs have too few
            batches for that, whole epochs are counted, with the start of their workers.

        Raises:
            RuntimeError: there is no loader, or it has no batch.
            Exception: what the data set raises.
        """
        loader = None if self._latest is None else self._latest()
        if loader is None:
            raise RuntimeError("no loader was seen")
        arguments = {**self._completed(loader, told), "persistent_workers": False}
        workers = arguments["num_workers"]
        batches = samples = 0

        def count(batch: Any) -> None:
            nonlocal batches, samples
            batches += 1
            samples += batch_size(loader) or samples_in(batch) or 1

        with _iterating(loader, arguments) as iterator:
            first = sum(1 for _ in islice(iterator, max(1, workers)))
            start = now = time.monotonic()
            while first == max(1, workers) and (batches % first or now - start < least_s):
                batch = next(iterator, _NO_MORE)
                if batch is _NO_MORE:
                    # The epoch is so short that batches made in advance would count.
                    batches = samples = 0
                    break
                count(batch)
                now = time.monotonic()
        if not batches:
            start = now = time.monotonic()
            while now - start < least_s:
                with _iterating(loader, arguments) as iterator:
                    for batch in iterator:
                        count(batch)
                if not batches:
                    raise RuntimeError("its loader has no batches")
                now = time.monotonic()
        return {"batches": batches, "samples": samples, "seconds": now - start}

    def why_not_copied(self, places: dict[int, tuple[str, Any]]) -> str | None:
        """Return why workers may not be forked from the training as it stands, as a clause; ``None`` if nothing is seen
        that they would share, or of which each would have a copy.

        Args:
            places: what was open some steps ago.
        """
        loader = None if self._latest is None else self._latest()
        if loader is None:
            return "no loader was seen"
        moved = dataset_state.moved_places(places, dataset_state.open_places())
        if moved:
            return f"{moved[0]} is read while it trains, and workers would share its position"
        return _walk(loader, times=_THOROUGH).is_held()

    def deliver(self, told: dict[str, Any], noted: dict[str, Any]) -> None:
        """Let workers make some batches of the training's data set, and note what they deliver. Nothing trains, and the
        epoch that the script is in stays where it is, with all random numbers.

        Args:
            told: arguments of the loader, with workers. noted: the plan of `Noting`.

        Raises:
            Exception: what the data set raises, or the sampler cannot be copied.
        """
        import torch

        loader = None if self._latest is None else self._latest()
        if loader is None:
            raise RuntimeError("no loader was seen")
        arguments = {**self._completed(loader, told), "persistent_workers": False}
        # A sampler may count its epochs, or shuffle a list in place that the script's epoch is going through.
        arguments[_sampler_name(loader)] = _copied(loader._index_sampler, loader)
        noting = Noting(noted, self._ours)
        noting.install()
        try:
            for _ in range(noted["epochs"]):
                generator = torch.Generator()
                # This may run in a step without gradients, but is not an evaluation.
                with torch.enable_grad(), _iterating(loader, {"generator": generator, **arguments}) as iterator:
                    for _ in iterator:
                        pass
        finally:
            noting.remove()

    def _completed(self, loader: Any, told: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of a `DataLoader` for what is told, completed by those that depend on it.

        Raises:
            RuntimeError: its batches cannot lie where they are to.
        """
        told = dict(told)
        told["collate_fn"] = _collate(loader.collate_fn, told.pop("batch_memory", None))
        workers = told.get("num_workers", loader.num_workers)
        if workers == 0:
            return {**told, "prefetch_factor": None, "persistent_workers": False}
        if loader.prefetch_factor is None:
            return {"prefetch_factor": _PREFETCH, **told}
        return told

    def _deliver(self, loader: Any, *, anew: bool = False) -> None:
        """Let a new iterator deliver the rest of a loader's current epoch, if ``anew`` or if none is left to."""
        front = self._fronts[loader]() if loader in self._fronts else None
        if front is None or _LOADER not in front.__dict__:
            # No epoch is under way, and the next one begins with what is in force.
            return
        relay = relay_of(front) or join(front)
        if anew or relay.is_stranded:
            relay.hand_over(front, loader, tried=self._is_tried(loader))

    def _recover(self, iterator: Any, error: Exception) -> None:
        """Put the script's own arguments in force again, as an iterator has failed under others."""
        back = self._rescue(error) if self._rescue is not None else None
        if back is not None:
            back()
        self._deliver(iterator.__dict__[_LOADER])

    def _why_not_now(self, loader: Any, wanted: dict[str, Any]) -> str | None:
        """Return why arguments cannot be in force from now on; ``None`` if they can."""
        from torch.utils.data import IterableDataset

        reason = _why_not(loader, wanted, _walk(loader))
        if reason is not None:
            return reason
        if loader not in self._fronts:
            return "the loader has iterators of its own"
        if isinstance(loader.dataset, IterableDataset):
            return "an iterable data set may share its samples out by the number of workers"
        if not getattr(loader, "in_order", True):
            return "the loader's batches come in any order"
        ahead = wanted["num_workers"] * (wanted["prefetch_factor"] or 0)
        if ahead and wanted["collate_fn"] is not _own_collate(wanted["collate_fn"]):
            # Slots are not in /dev/shm, but for those of a first batch of each worker, which shows their size.
            from autotune_agent import slots

            ahead = wanted["num_workers"] * max(1, wanted["prefetch_factor"] - slots.MOST)
        # At the same time, batches of the previous workers are still being delivered.
        if ahead * self._bytes.get(loader, 0) > _SHM_PART * _shared_memory_bytes():
            return "its batches do not fit into /dev/shm"
        return None


@contextmanager
def _iterating(loader: Any, arguments: dict[str, Any]) -> Iterator[Any]:
    """Iterate over a loader under other arguments, apart from what the script iterates over; workers end with it."""
    with replaced(loader, **arguments, **UNADVISED), beginning(loader):
        iterator = loader._get_iterator()
    try:
        yield iterator
    finally:
        if arguments["num_workers"]:
            iterator._shutdown_workers()


def _collate(now: Any, batch_memory: str | None) -> Any:
    """Return the function that makes batches where they are to lie.

    Args:
        now: the one that a loader has; a script may change it at any time.

    Raises:
        RuntimeError: its batches cannot lie there.
    """
    if batch_memory != "slots":
        return _own_collate(now)
    from autotune_agent import slots

    reason = slots.why_not(_own_collate(now))
    if reason is not None:
        raise RuntimeError(reason)
    return slots.collate_in_slots


def _own_collate(now: Any) -> Any:
    """Return the script's own function, of the one that a loader has now."""
    slots = sys.modules.get("autotune_agent.slots")
    return slots.default_collate if slots is not None and now is slots.collate_in_slots else now


def _shared_memory_bytes() -> float:
    """Return the free bytes where workers put their batches."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        return 0.0
    return float(stats.f_bavail * stats.f_frsize)


def _compare(loader: Any, setting: Setting) -> str | None:
    """Compare a batch size, which belongs to the maths of the training and is not set; return how it differs."""
    script_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if script_size != setting.arguments["batch_size"]:
        return f"the script's own is {script_size or 'not known'}; put {{batch_size}} into its command"
    # It is the script's own.
    setting.plain = True
    return None


def _why_not(loader: Any, told: dict[str, Any], state: dataset_state.Kept) -> str | None:
    """Return why arguments cannot be set for a loader, as a clause; ``None`` if they can.

    Args:
        state: what the loader's data set keeps.
    """
    from torch.utils.data import IterableDataset

    script_workers, data = loader.num_workers, loader.dataset
    workers = told.get("num_workers", script_workers)
    if getattr(loader, "_iterator", None) is not None:
        return "the loader's workers were started before"
    if workers != script_workers and isinstance(data, IterableDataset):
        return "an iterable data set may share its samples out by the number of workers"
    if workers and not script_workers and would_run_again():
        return 'workers are not forked here, and the script has no `if __name__ == "__main__"`'
    if workers == 0 and loader.timeout:
        return "the loader has a timeout, which needs workers"
    if workers == 0 and (told.get("prefetch_factor") or told.get("persistent_workers")):
        return "the loader has no workers"
    if ((workers and not script_workers) or told.get("pin_memory")) and state.devices - {"cpu"}:
        return "the data is on the device already"
    if told.get("persistent_workers") and not loader.persistent_workers and hasattr(data, "set_epoch"):
        return "workers that persist would not see the data set's set_epoch"
    if told.get("batch_memory") == "slots":
        from autotune_agent import slots

        return slots.why_not(_own_collate(loader.collate_fn))
    return None


def _walk(loader: Any, *, times: int = 1) -> dataset_state.Kept:
    """Look at what a loader's data set, and the function that makes batches of its samples, keep."""
    return dataset_state.walk({"dataset": loader.dataset, "collate_fn": loader.collate_fn}, times=times)
