"""A whole training that has ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.training.whole_training.history import EpochRow


@dataclass(frozen=True)
class WholeTraining:
    """A finished training.

    Attributes:
        rows: one for each epoch. steps: of all of them.
        resumed_at: the step from which this process went on; ``None`` if it began at the first.
        first_step_s: duration of this process's first step in seconds; ``None`` if it took none.
        checkpoint: the newest, with the final weights under ``"model"``. history: the file with the rows.
        evaluated: what was evaluated after each epoch, in words; ``None`` for nothing.
    """

    rows: tuple[EpochRow, ...]
    steps: int
    resumed_at: int | None
    first_step_s: float | None
    checkpoint: Path
    history: Path
    evaluated: str | None

    @property
    def samples_per_s(self) -> float | None:
        """The rate over all epochs; ``None`` if nothing was counted."""
        seconds = sum(row.counted_s for row in self.rows)
        samples = sum(row.counted_samples for row in self.rows)
        return samples / seconds if samples and seconds > 0 else None

    @property
    def energy_j(self) -> float | None:
        """Joules that the steps of all epochs have taken; ``None`` if they are not known of each."""
        known = [row.energy_j for row in self.rows if row.energy_j is not None]
        return sum(known) if known and len(known) == len(self.rows) else None
