"""Lets an epoch of a loader go on with other workers. What the script iterates over stays the same object."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from autotune_agent.begun import beginning

#: Marks an iterator that others deliver for, and holds their `Relay`.
_RELAY = "_autotune_relay"
_NUMBERS = itertools.count(1)
#: PyTorch's advice on the number of workers is none to the script where that number is ours.
UNADVISED: dict[str, Any] = {"check_worker_number_rationality": lambda: None}


class Indices:
    """The samplers' choices of an epoch that no iterator has been given yet."""

    def __init__(self, left: Iterator[Any]) -> None:
        self._left = left
        self._back: deque[Any] = deque()

    def __next__(self) -> Any:
        return self._back.popleft() if self._back else next(self._left)

    def __iter__(self) -> Indices:
        return self

    def put_back(self, indices: deque[Any]) -> None:
        """Let these be the next ones."""
        self._back.extendleft(reversed(indices))


class Share:
    """What one iterator is given of them.

    Attributes:
        pending: what it was given and has not delivered, in order.
        over: it is given no more.
    """

    def __init__(self, indices: Indices) -> None:
        self._indices = indices
        self.pending: deque[Any] = deque()
        self.over = False

    def __next__(self) -> Any:
        if self.over:
            raise StopIteration
        found = next(self._indices)
        self.pending.append(found)
        return found

    def __iter__(self) -> Share:
        return self


class Relay:
    """The iterators that deliver an epoch's batches, one after the other: each until it has delivered what it was
    given. Samples come in the sampler's order, each as often as without us.

    The first is the script's own, which it asks for batches, and which is not referred to here: it ends with the
    script's loop.
    """

    def __init__(self, indices: Indices, share: Share | None, *, tried: bool) -> None:
        self._indices = indices
        #: Who delivers now, and who follows: the iterator (none for the script's own), what it is given (none if it
        #: began without us), and whether others take over if it fails.
        self._runners: deque[tuple[Any, Share | None, bool]] = deque([(None, share, tried)])

    @property
    def is_stranded(self) -> bool:
        """Whether nobody delivers."""
        return not self._runners

    def hand_over(self, front: Any, loader: Any, *, tried: bool) -> None:
        """Let a new iterator, made of a loader as it is now, deliver what nobody has been given yet.

        Args:
            front: the script's own.

        Raises:
            Exception: it could not be made, and those before it go on.
        """
        share = Share(self._indices)
        try:
            made = _made(loader, share)
        except BaseException:
            self._indices.put_back(share.pending)
            raise
        if tried:
            _be_quiet(made)
        if self._runners:
            before = self._runners[-1][1]
            if before is None:
                front._sampler_iter = iter(())
            else:
                before.over = True
        self._runners.append((made, share, tried))

    def fail(self, front: Any) -> None:
        """Take everything away from those who have not delivered it: the first of them has failed."""
        for runner, share, _ in reversed(self._runners):
            if share is not None:
                share.over = True
                self._indices.put_back(share.pending)
            with contextlib.suppress(Exception):
                # Those with workers.
                (front if runner is None else runner)._shutdown_workers()
        self._runners.clear()

    def next(self, front: Any, take: Callable[[Any], Any], recover: Callable[[Exception], None]) -> Any:
        """Return the next batch.

        Args:
            take: returns an iterator's next. recover: called when one that was tried has failed; hands over to another.
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
    """Return who delivers for an iterator; ``None`` if it does so itself."""
    found: Relay | None = iterator.__dict__.get(_RELAY)
    return found


def join(iterator: Any) -> Relay:
    """Let others deliver for an iterator later, from what its loader's sampler has not told yet."""
    relay = Relay(Indices(iterator._sampler_iter), None, tried=False)
    setattr(iterator, _RELAY, relay)
    return relay


def begin(loader: Any, theirs: Callable[[Any], Any]) -> Any:
    """Begin an epoch with an iterator whose batches others deliver if it fails; return it.

    Args:
        theirs: returns the iterator of a loader.
    """
    sampler = loader._index_sampler
    indices = Indices(iter(sampler))
    share = Share(indices)
    with replaced(loader, **{_sampler_name(loader): share}):
        iterator = theirs(loader)
    _be_quiet(iterator)
    # It tells the length.
    iterator._index_sampler = sampler
    setattr(iterator, _RELAY, Relay(indices, share, tried=True))
    return iterator


def _made(loader: Any, share: Share) -> Any:
    """Return an iterator of a loader over given indices, which takes no random number that the script would get."""
    import torch

    # Workers of another iterator are to draw other numbers.
    seed = (torch.initial_seed() + next(_NUMBERS)) % 2**63
    generator = torch.Generator().manual_seed(seed)
    with replaced(loader, generator=generator, **UNADVISED, **{_sampler_name(loader): share}), beginning(loader):
        return loader._get_iterator()


def _be_quiet(iterator: Any) -> None:
    """Let the death of a worker be told by the iterator when it is asked for a batch, where others can take over.

    PyTorch would raise it from a signal handler, wherever the script is just then.
    """
    from torch.utils.data import _utils

    if getattr(iterator, "_worker_pids_set", False):
        remove: Any = getattr(_utils.signal_handling, "_remove_worker_pids")  # noqa: B009
        remove(id(iterator))
        iterator._worker_pids_set = False


def _sampler_name(loader: Any) -> str:
    return "batch_sampler" if loader._auto_collation else "sampler"


@contextlib.contextmanager
def replaced(loader: Any, **attributes: Any) -> Iterator[None]:
    """Let a loader have other attributes for some time. It forbids to set some of them once it is made."""
    held = loader.__dict__
    before = {name: held[name] for name in attributes if name in held}
    held.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del held[name]
        held.update(before)
