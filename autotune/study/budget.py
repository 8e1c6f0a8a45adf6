"""The seconds a search may use, counted across interruptions."""

from __future__ import annotations

import json

from autotune.clock import Clock
from autotune.errors import MachineError
from autotune.files import write_atomic
from autotune.layout import StudyFiles

#: Seconds of the count that a SIGKILL can lose.
SAVE_EVERY_S = 5.0


class Budget:
    """Counts monotonic seconds while the search runs, and keeps the count on disk.

    Args:
        limit_s: time allowed by the user, over all runs of the study.
    """

    def __init__(self, files: StudyFiles, limit_s: float, clock: Clock) -> None:
        self.limit_s = limit_s
        self._files = files
        self._clock = clock
        self._before_s = _saved(files)
        self._began = self._saved_at = clock.now()
        self._paused_at: float | None = None
        self._paused_s = 0.0
        #: Seconds spent waiting in this run, which do not count.
        self.waited_s = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds used so far, including earlier runs of the study."""
        now = self._clock.now() if self._paused_at is None else self._paused_at
        return self._before_s + now - self._began

    @property
    def left_s(self) -> float:
        return self.limit_s - self.spent_s

    def pause(self) -> None:
        """Stop counting, while the search makes data or waits for others."""
        self._paused_at = self._clock.now()

    def resume(self) -> None:
        """Start counting again. Does nothing if the budget is not paused."""
        if self._paused_at is not None:
            self._paused_s = self._clock.now() - self._paused_at
            self._began += self._paused_s
            self._paused_at = None

    def settle(self, waited_s: float) -> None:
        """Count the last pause after all, except for ``waited_s`` seconds of waiting."""
        self._began -= self._paused_s - waited_s
        self._paused_s = 0.0
        self.waited_s += waited_s

    def forget_earlier_runs(self) -> None:
        """Do not count earlier runs, in which others kept the machine too busy to measure anything."""
        self._before_s = 0.0

    def tick(self) -> None:
        """Save the count if `SAVE_EVERY_S` have passed. Cheap; called several times a second."""
        if self._clock.now() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Save the count now."""
        self._saved_at = self._clock.now()
        write_atomic(self._files.spent, json.dumps({"spent_s": round(self.spent_s, 3)}))


def _saved(files: StudyFiles) -> float:
    try:
        return float(json.loads(files.spent.read_text())["spent_s"])
    except FileNotFoundError:
        return 0.0
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise MachineError(
            f"{files.spent} cannot be read: {error}",
            advice='write {"spent_s": N} into it, N being the seconds the search has run.',
        ) from error
