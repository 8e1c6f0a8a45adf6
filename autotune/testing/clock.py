"""Virtual time."""

from __future__ import annotations


class FakeClock:
    """A `Clock` that moves only when it is told to: sleeping takes no time and advances it.

    Args:
        start_s: the first reading. Not zero, so that a forgotten difference shows.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass.

        Raises:
            ValueError: a monotonic clock does not go backwards.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot advance by {seconds} s")
        self._now_s += seconds
