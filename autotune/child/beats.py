"""Signs of progress, from the child to its launcher, written by the steps themselves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from autotune.clock import Clock
from autotune.records import Beat, Phase

#: Steps come faster than anybody reads: one beat per this many seconds is written.
MIN_GAP_S = 0.1


class Beats:
    """Writes one JSON line per beat and keeps the seconds spent in each phase.

    Args:
        descriptor: the write end of the launcher's pipe; closed pipes are ignored, the launcher is gone then.
    """

    def __init__(self, descriptor: int, clock: Clock) -> None:
        os.set_blocking(descriptor, True)
        self._descriptor = descriptor
        self._clock = clock
        self._began = clock.now()
        self._last = float("-inf")
        self.phase: Phase | None = None
        self.phase_s: dict[str, float] = {}
        #: Called for the memory a beat reports; set once the device is known.
        self.memory_bytes: Callable[[], int | None] = lambda: None

    def enter(self, phase: Phase) -> None:
        """Say that a phase begins; the one before it ends."""
        self.close()
        self.phase = phase
        self._began = self._clock.now()
        self._write(Beat(phase=phase))

    def step(self, number: int, *, rate_per_s: float | None = None, loss: float | None = None) -> None:
        """Say that a step of the current phase is done."""
        now = self._clock.now()
        if self.phase is not None and now - self._last >= MIN_GAP_S:
            self._write(
                Beat(phase=self.phase, step=number, rate_per_s=rate_per_s, loss=loss, memory_bytes=self.memory_bytes())
            )

    def close(self) -> None:
        """Book the seconds of the phase that is on."""
        if self.phase is not None:
            spent = self._clock.now() - self._began
            self.phase_s[self.phase.value] = self.phase_s.get(self.phase.value, 0.0) + spent
            self.phase = None

    def _write(self, beat: Beat) -> None:
        self._last = self._clock.now()
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, beat.model_dump_json(exclude_none=True).encode() + b"\n")
