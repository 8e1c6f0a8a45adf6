"""Time, as a parameter.

Durations and deadlines of a search come from a `Clock`. Inside a trial's own process the loop that measures, and the
template that reaps, read the machine's clock themselves: that is what they are for.
`timestamp` is for people (when was this written?) and is never subtracted from anything.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds. May be called from any thread."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed moment; never goes backwards."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait. A fake clock advances itself instead."""
        ...


class SystemClock:
    """The machine's own monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
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


def timestamp() -> str:
    """The current UTC time as ISO 8601 with seconds, for provenance only."""
    return datetime.now(UTC).isoformat(timespec="seconds")
