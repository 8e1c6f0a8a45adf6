"""A small network beside a block of device memory that it never uses, for launches that are killed.

`--arg hold_bytes=N` is the size of the block. `--arg pid_file=FILE` receives the number of the launch's process.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from autotune import Context

BATCH_SIZE = 32
ARGS = {"hold_bytes": "0", "pid_file": ""}

Batch = tuple[torch.Tensor, torch.Tensor]  # features (N, 64) float32, labels (N,) int64


def model(ctx: Context) -> nn.Module:
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    # Written to, because a CPU's memory is only taken then.
    block = torch.ones(int(ctx.arg("hold_bytes")), dtype=torch.uint8, device=ctx.device)
    network.register_buffer("block", block, persistent=False)
    if ctx.arg("pid_file"):
        Path(ctx.arg("pid_file")).write_text(str(os.getpid()))
    return network


def dataset(ctx: Context) -> Dataset[Any]:
    return TensorDataset(torch.randn(65_536, 64), torch.zeros(65_536, dtype=torch.int64))


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels)
