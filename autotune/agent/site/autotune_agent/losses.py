"""Sees the first losses of a training."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from autotune_agent.facts import is_capturing


class Losses:
    """Tells the losses that ``backward`` is called with. Each is waited for on the device.

    Args:
        count: how many of them; then the doors are what they were.
        ours: returns whether this process may be the one that trains.
        tell: called with each, a tensor with one element.
    """

    def __init__(self, count: int, ours: Callable[[], bool], tell: Callable[[Any], None]) -> None:
        self._left = count
        self._ours = ours
        self._tell = tell
        #: The last loss before a scaler made it larger.
        self._unscaled: Any = None

    def install(self) -> None:
        """Look at every call of ``backward``, if there are any to be told."""
        if not self._left:
            return
        import torch

        theirs, scale = torch.Tensor.backward, torch.amp.GradScaler.scale

        @wraps(scale)
        def scaling(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            if self._left and isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                # How large it is made, is no part of the loss.
                self._unscaled = outputs.detach()
            return scaled

        @wraps(theirs)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._left and tensor.numel() == 1 and self._ours() and not is_capturing():
                self._left -= 1
                found, self._unscaled = self._unscaled, None
                self._tell(tensor.detach() if found is None else found)
                if not self._left and torch.Tensor.backward is backward:
                    torch.Tensor.backward = theirs  # type: ignore[method-assign]
                    if torch.amp.GradScaler.scale is scaling:
                        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
            return theirs(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]

        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]
        torch.amp.GradScaler.scale = scaling  # type: ignore[method-assign, assignment]
