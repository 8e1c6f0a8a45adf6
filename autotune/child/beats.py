"""Progress reports ("beats") from the child to its launcher, written as training steps complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

from autotune.base.clock import Clock
from autotune.base.records import Beat, Phase

#: Minimum seconds between beats. Steps can be much faster than anyone reads.
MIN_GAP_S = 0.1


class Beats:
    """Writes one JSON line per beat and keeps the seconds spent in each phase.

    Args:
        descriptor: the write end of the launcher's pipe. If the launcher is gone, a broken pipe is ignored. If it is
            stopped, a full pipe drops beats instead of holding up the training.
    """

    def __init__(self, descriptor: int, clock: Clock) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._clock = clock
        self._began = clock.now()
        self._last = float("-inf")
        self.phase: Phase | None = None
        self.phase_s: dict[str, float] = {}
        #: Returns the peak memory to report in each beat; set once the device is known.
        self.memory_bytes: Callable[[], int | None] = lambda: None
        #: Returns the number of samples that the launch's loaders have drawn; set once there is a workload.
        self.samples_drawn: Callable[[], int | None] = lambda: None
        #: Why the last window does not count; ``None`` if it does.
        self.disturbed: str | None = None
        self._turn: int | None = None

    def enter(self, phase: Phase) -> None:
        """Start a phase, ending the previous one."""
        self.close()
        self.phase = phase
        self._began = self._clock.now()
        self._write(Beat(phase=phase))

    def step(self, number: int, *, rate_per_s: float | None = None, loss: float | None = None) -> None:
        """Report that a step of the current phase has finished."""
        now = self._clock.now()
        if self.phase is not None and now - self._last >= MIN_GAP_S:
            self._write(
                Beat(phase=self.phase, step=number, rate_per_s=rate_per_s, loss=loss, memory_bytes=self.memory_bytes())
            )

    def turn(self, number: int) -> None:
        """Report that an entrant's turn begins, at once: whatever ends the process from here on is charged to it."""
        if self.phase is not None and number != self._turn:
            self._turn = number
            self._write(Beat(phase=self.phase))

    def processes(self, pids: Iterable[int]) -> None:
        """Report processes of the launch that do not report themselves (`system.report_processes`), so that what they
        leave in shared memory is removed."""
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._descriptor, b"".join(b'{"forked": %d}\n' % pid for pid in pids))

    @property
    def whose(self) -> int | None:
        """The entrant whose turn it is; ``None`` if there are no turns."""
        return self._turn

    def close(self) -> None:
        """End the current phase and add its duration to `phase_s`."""
        if self.phase is not None:
            spent = self._clock.now() - self._began
            self.phase_s[self.phase.value] = self.phase_s.get(self.phase.value, 0.0) + spent
            self.phase = None

    def _write(self, beat: Beat) -> None:
        self._last = self._clock.now()
        stamped = beat.model_copy(update={"at_s": self._last, "turn": self._turn, "disturbed": self.disturbed})
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._descriptor, stamped.model_dump_json(exclude_none=True).encode() + b"\n")
