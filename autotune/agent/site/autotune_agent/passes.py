"""Counts what trains: backward passes, and the updates that a gradient scaler leaves out."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class Passes:
    """Counts backward passes that have ended without an error, outside of an optimizer's step: how often a step calls
    its closure is a matter of the numbers. And it counts the updates that a `GradScaler` leaves out because gradients
    have overflowed, which are no fault of what is tried.

    Args:
        steps: returns the steps that an optimizer has taken; ``None`` if it is not known.
        is_stepping: returns whether an optimizer is in the middle of a step.
    """

    def __init__(self, steps: Callable[[Any], int | None], is_stepping: Callable[[], bool]) -> None:
        self._steps, self._is_stepping = steps, is_stepping
        self._backwards = self._left_out = 0
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Count from now on."""
        import torch

        theirs, step = torch.autograd.backward, torch.amp.GradScaler.step

        @wraps(theirs)
        def backward(*args: Any, **kwargs: Any) -> None:
            theirs(*args, **kwargs)
            if not self._is_stepping():
                self._backwards += 1

        @wraps(step)
        def scaled_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._steps(optimizer)
            found = step(scaler, optimizer, *args, **kwargs)
            self._left_out += before is not None and self._steps(optimizer) == before
            return found

        self._put(torch.autograd, "backward", backward, theirs)
        self._put(torch.amp.GradScaler, "step", scaled_step, step)

    def _put(self, holder: Any, name: str, ours: Any, theirs: Any) -> None:
        setattr(holder, name, ours)

        def undo() -> None:
            if getattr(holder, name) is ours:
                setattr(holder, name, theirs)

        self._undo.append(undo)

    def stop(self) -> None:
        """Count no longer."""
        while self._undo:
            self._undo.pop()()

    def take(self) -> tuple[int, int]:
        """Return backward passes, and updates that were left out, since the last time."""
        found = self._backwards, self._left_out
        self._backwards = self._left_out = 0
        return found
