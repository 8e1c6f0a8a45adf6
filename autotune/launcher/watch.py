"""Tracks a running launch and decides whether it must end."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from pydantic import ValidationError

from autotune.clock import Clock
from autotune.knobs.compile_mode import phase_text
from autotune.records import Beat, Phase, TrialSpec, TrialStatus

#: Format of a process's report of itself. Linux pids have at most seven digits.
_FORKED = re.compile(rb'\{"forked": (\d{1,7})\}')
_STEPPING = (Phase.WARMUP, Phase.MEASURE)


class Watch:
    """Tracks a running launch and decides whether it must end."""

    def __init__(
        self, spec: TrialSpec, clock: Clock, on_beat: Callable[[Beat], None], stop: Callable[[], bool]
    ) -> None:
        self.spec = spec
        self.clock = clock
        self.phase: Phase | None = None
        self.phase_s: dict[str, float] = {}
        self.peak_bytes: int | None = None
        #: Pids of all processes the launch has reported, running or not.
        self.pids: set[int] = set()
        #: The status it was ended with by the launcher, if it was.
        self.ended: TrialStatus | None = None
        self.cause = ""
        self._on_beat = on_beat
        self._stop = stop
        self._began = self._phase_began = self._last_beat = clock.now()
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        """Process beats and the pids of new processes, as they arrive through the pipe."""
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            forked = _FORKED.fullmatch(line)
            if forked:
                self.pids.add(int(forked[1]))
                continue
            with contextlib.suppress(ValidationError):
                self._beat(Beat.model_validate_json(line))
        # A long line without an end is not ours: user code can write to the pipe too.
        self._buffer = self._buffer[-4096:]

    def _beat(self, beat: Beat) -> None:
        now = self.clock.now()
        if beat.phase is not self.phase:
            self._book(now)
            self.phase, self._phase_began = beat.phase, now
        self._last_beat = now
        if beat.memory_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, beat.memory_bytes)
        self._on_beat(beat)

    def _book(self, now: float) -> None:
        if self.phase is not None:
            self.phase_s[self.phase] = self.phase_s.get(self.phase, 0.0) + now - self._phase_began

    def finish(self) -> None:
        """Add the duration of the last phase to `phase_s`."""
        self._book(self.clock.now())

    def overdue(self) -> bool:
        """Return whether the launch must end now; set `ended` and `cause` if so."""
        now = self.clock.now()
        limits, phase = self.spec.limits, self.phase or Phase.LOAD
        named = phase_text(phase, self.spec.config)
        if self._stop():
            self.ended, self.cause = TrialStatus.INTERRUPTED, "the search was ended while it ran"
        elif phase in _STEPPING and now - self._last_beat > limits.silence_s:
            self.ended = TrialStatus.HANG
            self.cause = f"no step was finished for {limits.silence_s:.4g} s in phase {named}"
        elif limits.total_s is not None and now - self._began > limits.total_s:
            self.ended = TrialStatus.TIMEOUT
            self.cause = f"it was not measured within the {limits.total_s:.4g} s it was given"
        elif now - self._phase_began > limits.of(phase):
            self.ended = TrialStatus.TIMEOUT
            self.cause = f"phase {named} took longer than its limit of {limits.of(phase):.4g} s"
        return self.ended is not None
