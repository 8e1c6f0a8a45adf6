"""Attributes of data sets that are wrapped, to time them, to repeat them, or to put a store in front of them."""

from __future__ import annotations

from typing import Any


def of_inner(outer: Any, name: str) -> Any:
    """Return what a data set that wraps another one, its ``inner``, has not itself; for ``__getattr__``.

    A loader of the workload's own may ask for more than samples, such as their lengths.

    Raises:
        AttributeError: the other one does not have it, either; or it is one of Python's or PyTorch's own, such as
            ``__getitems__``, which would go round what the wrapper does.
    """
    # While the object is unpickled, the inner one is not there yet.
    if name == "inner" or name.startswith("__"):
        raise AttributeError(name)
    return getattr(outer.inner, name)
