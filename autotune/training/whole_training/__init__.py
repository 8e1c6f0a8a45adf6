"""A whole training under a profile: epochs, evaluation, checkpoints, and resuming after a kill. Imports torch.

Interrupted at any moment and started again, it ends with the same losses and weights, bit for bit, as without the
interruption, if the device computes the same steps alike twice. Randomness, on which that depends, is in `checkpoints`.
"""

from __future__ import annotations

from autotune.base.records import DataRef, WorkloadRef
from autotune.training.applied import Applied
from autotune.training.whole_training.checkpoints import Checkpoint, Checkpoints, EpochRow
from autotune.training.whole_training.course import (
    TrainingCourse,
    TrainingProgress,
    TrainingSurroundings,
    TrainingWatcher,
    WholeTraining,
)

__all__ = [
    "Checkpoints",
    "EpochRow",
    "TrainingProgress",
    "TrainingSurroundings",
    "TrainingWatcher",
    "WholeTraining",
    "train_epochs",
]


def train_epochs(
    applied: Applied,
    ref: WorkloadRef,
    data: DataRef,
    *,
    epochs: int,
    checkpoints: Checkpoints,
    newest: Checkpoint | None,
    every_s: float,
    around: TrainingSurroundings,
) -> WholeTraining:
    """Train a workload for whole epochs, or a rank's part of them.

    Args:
        checkpoints: where to write them, held by this process or the one that leads its ranks. newest: the one to
            resume from, if any. every_s: seconds between two; each epoch ends with one, too.

    Raises:
        InterruptedSearch: `around.stop` asked for the end; a checkpoint was written.
        ResumeRefusedError: the checkpoint is of another training.
        MachineError: no checkpoint could be written, or the newest cannot be loaded here.
        WorkloadError: the workload cannot be loaded, or its data set does not fill a batch.
    """
    return TrainingCourse(applied, ref, data, epochs, checkpoints, newest, every_s, around).run()
