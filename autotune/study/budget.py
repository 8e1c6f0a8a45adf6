"""The seconds a search may use, counted across interruptions."""

from __future__ import annotations

import json

from autotune.clock import Clock
from autotune.errors import MachineError
from autotune.files import write_atomic
from autotune.layout import StudyFiles

#: What a kill -9 can lose of the count.
SAVE_EVERY_S = 5.0


class Budget:
    """Counts monotonic seconds while the search runs, and keeps the count on disk.

    Args:
        limit_s: what the user allows in all, over all runs of the study.
    """

    def __init__(self, files: StudyFiles, limit_s: float, clock: Clock) -> None:
        self.limit_s = limit_s
        self._files = files
        self._clock = clock
        self._before_s = _saved(files)
        self._began = self._saved_at = clock.now()
        self._paused_at: float | None = None
        self._paused_s = 0.0
        #: Seconds spent waiting in this run, which were not counted.
        self.waited_s = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds used so far, by earlier runs of the study too."""
        now = self._clock.now() if self._paused_at is None else self._paused_at
        return self._before_s + now - self._began

    @property
    def left_s(self) -> float:
        return self.limit_s - self.spent_s

    def pause(self) -> None:
        """Stop counting: what happens now (making data, waiting for others) is not the search's."""
        self._paused_at = self._clock.now()

    def resume(self) -> None:
        """Count again. Does nothing when it counts."""
        if self._paused_at is not None:
            self._paused_s = self._clock.now() - self._paused_at
            self._began += self._paused_s
            self._paused_at = None

    def settle(self, waited_s: float) -> None:
        """Say that of the last pause only these seconds were waiting: the others count after all."""
        self._began -= self._paused_s - waited_s
        self._paused_s = 0.0
        self.waited_s += waited_s

    def tick(self) -> None:
        """Save the count if it is time to. Cheap; called several times a second."""
        if self._clock.now() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the count now."""
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
