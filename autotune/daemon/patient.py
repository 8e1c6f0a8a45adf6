"""Asking a driver that may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from autotune.machine.gpu import Gpu, NvmlUnavailable

#: A driver answers within milliseconds, or seconds where it has to wake a card.
LIMIT_S = 3.0


class Patient:
    """Asks what the cards do, without ever being held up: one that does not answer in time is unknown.

    A card that has fallen off the bus can hold a call in the kernel for ever; it is waited for in a thread of its own,
    and nobody asks again before it has come back.
    """

    def __init__(self, ask: Callable[[], list[Gpu] | NvmlUnavailable], limit_s: float = LIMIT_S) -> None:
        self._ask = ask
        self._limit_s = limit_s
        self._answer: list[list[Gpu] | NvmlUnavailable] = []
        self._thread: threading.Thread | None = None

    def __call__(self) -> list[Gpu] | NvmlUnavailable:
        if self._thread is None:
            self._answer = answer = []
            self._thread = threading.Thread(target=lambda: answer.append(self._ask()), daemon=True)
            self._thread.start()
            self._thread.join(self._limit_s)
        if self._thread.is_alive():
            return NvmlUnavailable("the driver does not answer", driver_present=True)
        self._thread = None
        return self._answer[0] if self._answer else NvmlUnavailable("asking the driver failed", driver_present=True)
