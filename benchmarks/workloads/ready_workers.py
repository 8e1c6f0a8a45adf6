"""A training that notes when each of its loader workers has made its first batch.

`--arg log=FILE` names the file: a line ``opened SECONDS`` as the data set is opened, then ``WORKER SECONDS`` for every
first batch. Seconds are those of `time.monotonic`, which all processes of a machine share.
"""

import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate, get_worker_info

from autotune import Context

BATCH_SIZE = 8
ARGS = {"log": ""}


def note(file: str, what: str) -> None:
    # One short write to a file opened for appending is not mixed with those of the others.
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{what} {time.monotonic()}\n".encode())
    finally:
        os.close(descriptor)


class Noting:
    """Collates as PyTorch does, and notes the first batch of the process it runs in."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.noted = False

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        worker = get_worker_info()
        if worker is not None and not self.noted:
            self.noted = True
            note(self.file, str(worker.id))
        return batch


class Points(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self) -> None:
        self.point = torch.zeros(16)

    def __len__(self) -> int:
        return 65_536

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.point, index % 2


def model(ctx: Context) -> nn.Module:
    return nn.Linear(16, 2)


def dataset(ctx: Context) -> Dataset[Any]:
    note(ctx.arg("log"), "opened")
    return Points()


def collate(ctx: Context) -> Noting:
    return Noting(ctx.arg("log"))


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx: Context, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    points, labels = batch
    return nn.functional.cross_entropy(model(points), labels)
