"""Which training a checkpoint belongs to: what must be the same for the losses to be those of one training.

A JSON file beside the checkpoint records it, so that it is known before anything of the checkpoint is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from autotune.base.errors import ResumeRefusedError
from autotune.base.records import DataRef, Record, WorkloadRef
from autotune.knobs import spell
from autotune.workload.catalog import source_hash
from autotune.workload.contract import Context

#: Version of the content of a checkpoint, and of its head.
VERSION = 3


class Head(Record):
    """The content of the JSON file beside a checkpoint.

    Attributes:
        version: see `VERSION`. torch: the version of torch.
        identity: that of the training, as `identity_of` returns it. mark: that of the training, for trackers.
        epochs: the number that the training was to have. epoch: the number of the checkpoint's epoch, from 0 on.
        steps: the number taken. over: whether all those of the epoch were taken.
    """

    version: int
    torch: str
    identity: dict[str, str]
    mark: str
    epochs: int
    epoch: int
    steps: int
    over: bool


def identity_of(
    ref: WorkloadRef, ctx: Context, config: Mapping[str, bool | int | float | str], facts: Mapping[str, object]
) -> dict[str, str]:
    """Return what identifies a training, by name, as text.

    Args:
        facts: what only this training knows, such as the number of its samples.
    """
    data: DataRef = ctx.data
    identity = {
        "model": ref.name,
        "code of the workload": (ref.sha256 or _hash_of(ref))[:16],
        "data": data.kind,
        "files of the data": data.identity[:16],
        "image size": str(ctx.image_size),
        "seed": str(ctx.seed),
        "ranks": str(ctx.ranks),
    }
    identity |= {f"--arg {name}": value for name, value in ctx.args.items()}
    identity |= {name: spell(value) for name, value in config.items()}
    return identity | {name: str(value) for name, value in facts.items()}


def _hash_of(ref: WorkloadRef) -> str:
    """Return the hash of a workload that was given as a module, and has been imported."""
    file = getattr(sys.modules.get(ref.module), "__file__", None)
    return source_hash(Path(file)) if file else ""


def refuse_another(then: Mapping[str, str], now: Mapping[str, str], folder: str) -> None:
    """Refuse checkpoints of another training.

    Raises:
        ResumeRefusedError: something is different.
    """
    absent = "not there"
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if names:
        changes = [f"{name} was {then.get(name, absent)}, and is {now.get(name, absent)}" for name in names]
        raise ResumeRefusedError(
            f"the checkpoints in {folder} are of another training: {'; '.join(changes)}",
            advice="undo the change, or name another folder with --checkpoints DIR.",
        )


def check(head: Head, identity: Mapping[str, str], epochs: int, folder: Path, say: Callable[[str], None]) -> None:
    """Refuse a checkpoint from which a training cannot resume.

    Args:
        head: that of the checkpoint. identity: that of the training, as `identity_of` returns it. epochs: the number
            that it is to have.
        say: called with a sentence about what may differ.

    Raises:
        ResumeRefusedError: the checkpoint is of another training, or already beyond these epochs.
    """
    refuse_another(head.identity, identity, str(folder))
    if head.epoch >= epochs:
        raise ResumeRefusedError(
            f"the checkpoints in {folder} are in epoch {head.epoch + 1} already",
            advice="give at least so many --epochs, or name another folder with --checkpoints DIR.",
        )
    if head.torch != str(torch.__version__):
        say(
            f"the checkpoint was written with torch {head.torch}, and this is {torch.__version__}: "
            "the losses may differ in their last digits"
        )
