"""What a training has been so far, epoch by epoch: ``history.jsonl``, one JSON object a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from autotune.base.errors import MachineError
from autotune.base.files import write_atomic
from autotune.base.records import Record


class EpochRow(Record):
    """One epoch.

    Attributes:
        epoch: from 1 on. steps: of the training, up to its end.
        loss: mean over its steps; ``None`` if it is not finite.
        learning_rate: of the first parameter group, at its end.
        samples: trained on. counted_samples, counted_s: what its rate is based on: seconds of the steps and of their
            waits for batches, without each process's first step, evaluations and checkpoints.
        energy_j: that the device has used in these seconds; ``None`` if no counter tells.
        evaluation_s: seconds of the evaluation.
        metrics: by name, what `evaluate` and `metric` returned; ``None`` for what is not finite.
    """

    epoch: int
    steps: int
    loss: float | None
    learning_rate: float
    samples: int
    counted_samples: int
    counted_s: float
    energy_j: float | None = None
    evaluation_s: float = 0.0
    metrics: dict[str, float | None] = Field(default_factory=dict)

    @property
    def samples_per_s(self) -> float | None:
        """The rate; ``None`` if nothing was counted."""
        return self.counted_samples / self.counted_s if self.counted_samples and self.counted_s > 0 else None


@dataclass
class EpochTally:
    """An epoch as it goes on; see `EpochRow`. It is kept in the checkpoints.

    Attributes:
        steps: of the epoch. loss_sum: over them.
    """

    steps: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    counted_samples: int = 0
    counted_s: float = 0.0
    energy_j: float | None = None

    def row(self, epoch: int, steps: int, learning_rate: float) -> EpochRow:
        """Return the row of epoch number ``epoch``, which ends after ``steps`` steps, before its evaluation."""
        return EpochRow(
            epoch=epoch,
            steps=steps,
            loss=finite(self.loss_sum / self.steps) if self.steps else None,
            learning_rate=learning_rate,
            samples=self.samples,
            counted_samples=self.counted_samples,
            counted_s=self.counted_s,
            energy_j=self.energy_j,
        )


def finite(value: float) -> float | None:
    """Return the value, or ``None`` in place of one that JSON does not have."""
    return value if math.isfinite(value) else None


class EpochHistory:
    """The file beside the checkpoints. Each of its versions is complete.

    Args:
        anew: remove it, so that what another training has left is not taken for this one's.

    Raises:
        MachineError: it cannot be removed.
    """

    def __init__(self, folder: Path, *, anew: bool) -> None:
        self.path = folder / "history.jsonl"
        if anew:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                raise MachineError(f"cannot remove {self.path}: {error.strerror}") from error

    def read(self) -> list[EpochRow]:
        """Return the rows up to the first that cannot be read. The checkpoints have all that matter."""
        rows: list[EpochRow] = []
        try:
            for line in self.path.read_text(encoding="utf-8").splitlines():
                rows.append(EpochRow.model_validate_json(line))
        except (OSError, UnicodeDecodeError, ValidationError):
            pass
        return rows

    def write(self, rows: Sequence[EpochRow]) -> None:
        """Replace the file.

        Raises:
            MachineError: it cannot be written.
        """
        write_atomic(self.path, "".join(f"{row.model_dump_json()}\n" for row in rows))
