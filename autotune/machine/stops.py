"""Counts how often this process was stopped and continued: by cpulimit, by a debugger, by ``kill -STOP``."""

from __future__ import annotations

import signal
from types import FrameType


class Stops:
    """Counts the SIGCONT that ends each stop; of a SIGSTOP itself a process learns nothing.

    Create it in the main thread: elsewhere no signal handler can be set, and `count` stays ``None``. Stops that follow
    each other within one call into C (a backward pass) count as one.

    Attributes:
        count: number of stops so far; ``None`` if they are not counted.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        before = signal.getsignal(signal.SIGCONT)

        def continued(number: int, frame: FrameType | None) -> None:
            self.count = (self.count or 0) + 1
            if callable(before):
                before(number, frame)

        try:
            signal.signal(signal.SIGCONT, continued)
        except ValueError:
            return
        # The interrupted system calls of libraries go on, as they do without a handler.
        signal.siginterrupt(signal.SIGCONT, False)
        self.count = 0
