"""Loaders that are being iterated over: which of them do it in a way of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Of those for which `DataLoader.__iter__`, or the agent itself, is about to make an iterator.
_begun: set[int] = set()


@contextmanager
def beginning(loader: Any) -> Iterator[None]:
    """Within it, an iterator of a loader is no epoch of a script's own making."""
    if id(loader) in _begun:
        yield
        return
    _begun.add(id(loader))
    try:
        yield
    finally:
        _begun.discard(id(loader))


def iterates_itself(loader: Any) -> bool:
    """Return whether a loader makes an iterator without `DataLoader.__iter__`, as some do that keep one for ever."""
    from torch.utils.data import DataLoader

    return id(loader) not in _begun and type(loader).__iter__ is not DataLoader.__iter__
