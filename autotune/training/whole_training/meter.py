"""The rate of a training's steps, and the energy they take.

`Meter` counts for the history, and stands still during anything but steps; `Pace` looks at the last second.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.training.whole_training.history import EpochTally


class Meter:
    """Adds the seconds, samples and joules of steps to a `EpochTally`, while it runs.

    Args:
        now: monotonic seconds. energy_j: a counter of joules, of which differences are meaningful; ``None`` if it does
            not tell. synchronize: waits for the device.
    """

    def __init__(
        self, now: Callable[[], float], energy_j: Callable[[], float | None], synchronize: Callable[[], None]
    ) -> None:
        self._now = now
        self._energy_j = energy_j
        self._synchronize = synchronize
        self._since: float | None = None
        self._from_j: float | None = None
        self._samples = 0

    @property
    def runs(self) -> bool:
        """Whether steps are counted."""
        return self._since is not None

    def start(self) -> None:
        """Count from now on."""
        self._synchronize()
        self._since, self._from_j, self._samples = self._now(), self._energy_j(), 0

    def add(self, samples: int) -> None:
        """Count a step of so many samples, if the meter runs."""
        self._samples += samples

    def note(self, tally: EpochTally) -> None:
        """Add what has been counted so far to a tally, and go on from there."""
        if self._since is None:
            return
        self._synchronize()
        now, joules = self._now(), self._energy_j()
        tally.counted_samples += self._samples
        tally.counted_s += now - self._since
        if joules is not None and self._from_j is not None:
            tally.energy_j = (tally.energy_j or 0.0) + joules - self._from_j
        self._since, self._from_j, self._samples = now, joules, 0

    def stop(self, tally: EpochTally) -> None:
        """Add what has been counted, and stand still."""
        self.note(tally)
        self._since = None


class Pace:
    """How fast a training goes, for reports only.

    Attributes:
        samples: since the last report. evaluation_s: of the last evaluation.
    """

    def __init__(self, now: Callable[[], float], evaluation_s: float) -> None:
        self._now = now
        self._since = self._began = now()
        self._first_step = 0
        self.samples = 0
        self.evaluation_s = evaluation_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the last report."""
        return self._now() - self._since

    def start(self, steps: int) -> None:
        """Begin to look after so many steps: what came before is not a step."""
        self._since = self._began = self._now()
        self._first_step, self.samples = steps, 0

    def per_s(self) -> float | None:
        """Return the samples per second since the last report."""
        elapsed_s, samples = self.elapsed_s, self.samples
        self._since, self.samples = self._now(), 0
        return samples / elapsed_s if samples and elapsed_s > 0 else None

    def left_s(self, steps: int, left: int | None, evaluations: int) -> float | None:
        """Return the expected seconds of the steps and evaluations that are left."""
        taken = steps - self._first_step
        if left is None or not taken:
            return None
        return left * (self._now() - self._began) / taken + evaluations * self.evaluation_s
