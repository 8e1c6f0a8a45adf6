"""Data sets that stand around another one: to time it, to repeat it, or to put a store in front of it."""

from __future__ import annotations

from typing import Any


class Wrapper:
    """What all of them share. A loader of the workload's own may ask for more than samples, such as their lengths.

    Args:
        inner: the data set inside.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        # While it is unpickled, the inner one is not there yet. What is PyTorch's or Python's own, such as
        # `__getitems__`, would go round what the wrapper does.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def many(self, indices: list[Any]) -> list[Any]:
        """Return the inner one's samples of these indices, at once if it can."""
        at_once = getattr(self.inner, "__getitems__", None)
        return list(at_once(indices)) if at_once else [self.inner[index] for index in indices]


def innermost(dataset: Any) -> Any:
    """Return the data set that all wrappers stand around."""
    while isinstance(dataset, Wrapper):
        dataset = dataset.inner
    return dataset
