"""What a whole training tells while it goes on, and what it is given of the world around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from autotune.training.whole_training.history import EpochRow


@dataclass(frozen=True)
class TrainingProgress:
    """How far a training is.

    Attributes:
        epoch: the one that goes on, from 1 on, of `epochs`. step: taken in it, of `epoch_steps`, which is ``None`` if
            the length of an epoch is not known. steps: taken in all.
        loss: of the last step. learning_rate: of the first parameter group.
        samples_per_s: since the last report; ``None`` before the second step.
        left_s: expected seconds to the end, evaluations included; ``None`` if not known.
    """

    epoch: int
    epochs: int
    step: int
    epoch_steps: int | None
    steps: int
    loss: float
    learning_rate: float
    samples_per_s: float | None
    left_s: float | None


class TrainingWatcher(Protocol):
    """Is told how a training goes on, in its own process, between two steps. It does not raise."""

    def says(self, sentence: str) -> None:
        """Something the user should know, once."""
        ...

    def begins(self, mark: str, steps: int) -> None:
        """The training begins, or goes on after so many steps. ``mark``: the same each time; no other one has it."""
        ...

    def progress(self, progress: TrainingProgress) -> None:
        """How far it is, about once a second."""
        ...

    def evaluates(self, epoch: int) -> None:
        """The evaluation after an epoch begins."""
        ...

    def epoch_ends(self, row: EpochRow) -> None:
        """An epoch is over, evaluated, and in the history. One that a killed process has told may be told again."""
        ...


@dataclass(frozen=True)
class TrainingSurroundings:
    """What a training is given of the world around it.

    Attributes:
        watcher: is told how it goes on. mark: of the training, if it is a new one.
        stop: returns the number of a signal that asks it to end, or ``None``.
        energy_j: a counter of joules; ``None`` if none tells. now: monotonic seconds.
    """

    watcher: TrainingWatcher
    mark: str
    stop: Callable[[], int | None] = lambda: None
    energy_j: Callable[[], float | None] = lambda: None
    now: Callable[[], float] = time.monotonic
