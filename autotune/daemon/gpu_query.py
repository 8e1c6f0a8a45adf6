"""GPU queries with a timeout, for a driver that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

from autotune.machine.gpu import Gpu, NvmlUnavailable

#: Timeout of a query. The driver usually answers within milliseconds, but takes seconds to wake a sleeping GPU.
LIMIT_S = 3.0


class GpuQuery:
    """Queries the GPUs and reports `NvmlUnavailable` when the driver does not answer in time.

    A GPU that has fallen off the bus can block a call in the kernel forever. The call therefore runs in a background
    thread, and no second query starts until the first one returns.
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
