"""At which steps all ranks write a checkpoint, or end. Imports torch."""

from __future__ import annotations

from collections.abc import Callable

from autotune.training.exchange import largest
from autotune.base.ranks import own_rank

#: Ranks ask each other about once in so many seconds: asking takes a round trip, and lets the device wait for it.
ASK_S = 0.25


class Agreement:
    """Tells all ranks at the same step what to do before it, as what each of them knows comes at different moments.

    One rank decides for itself at each step. Several ask each other now and then, at steps that follow from the pace of
    the first one.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._rank = own_rank()
        self._next: int | None = None
        self._stride = 1
        self._asked_s = now()

    def before(self, step: int, signal: int | None, *, due: bool) -> tuple[int | None, bool]:
        """Return the number of the signal that ends the training before a step, if any, and whether to write a
        checkpoint.

        Args:
            step: its number. All ranks call this for each.
            signal: that this rank has received. due: a checkpoint is, by the first rank's clock.
        """
        if self._rank.count < 2:
            return signal, due
        if self._next is not None and step < self._next:
            return None, False
        now = self._now()
        step_s = (now - self._asked_s) / self._stride
        wanted = max(1, min(2 * self._stride, int(ASK_S / max(step_s, 1e-6))))
        told = (signal or 0, int(due), wanted) if not self._rank.number else (signal or 0, 0, 0)
        number, save, self._stride = largest(*told)
        self._next, self._asked_s = step + self._stride, self._now()
        return number or None, bool(save)
