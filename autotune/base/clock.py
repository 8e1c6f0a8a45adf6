"""Time, passed as a parameter.

Durations and deadlines of a search come from a `Clock`. In a trial's own process, the measuring loop and the template
that reaps processes read the system clock directly, because real time is what they measure.
`timestamp` is for people and is never used in calculations.
"""

from __future__ import annotations

import threading
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
    """The machine's own monotonic clock, without the time in which its owner was stopped (see `skip_stop`).

    Attributes:
        stops: how often its owner was stopped.
    """

    def __init__(self) -> None:
        self.stops = 0
        self._skipped_s = 0.0
        self._skipping = threading.Lock()

    def now(self) -> float:
        return time.monotonic() - self._skipped_s

    def skip_stop(self, since_s: float, longest_s: float) -> None:
        """Do not count the time since a reading if it is longer than ``longest_s``: this process was stopped (Ctrl-Z, a
        frozen container). Of several threads that notice it, the first one skips it for all."""
        with self._skipping:
            passed_s = self.now() - since_s
            if passed_s > longest_s:
                self._skipped_s += passed_s
                self.stops += 1

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """A `Clock` that moves only when told to: sleeping returns at once and advances it.

    Args:
        start_s: the first reading. Not zero, so that code that forgets to take a difference is noticed.
    """

    #: Nobody stops its owner.
    stops = 0

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Advance the clock.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot advance by {seconds} s")
        self._now_s += seconds

    def skip_stop(self, since_s: float, longest_s: float) -> None:
        """Do nothing: virtual time goes on only when it is told to."""

    def set(self, now_s: float) -> None:
        """Set the reading: back to where something else begins at the same time, or on to where that ends."""
        self._now_s = now_s


def timestamp() -> str:
    """Return the current UTC time as ISO 8601 with seconds, for provenance only."""
    return datetime.now(UTC).isoformat(timespec="seconds")
