"""A linear classifier whose step pauses for some milliseconds, or does not.

Made for rehearsals of a search: which of the two is faster needs no quiet machine and hardly any time.
"""

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from autotune import Context, knob

BATCH_SIZE = 8
KNOBS = {"pause_ms": knob(40, 0, changes_maths=False)}

Batch = tuple[torch.Tensor, torch.Tensor]  # features (N, 16) float32, labels (N,) int64


def model(ctx: Context) -> nn.Module:
    torch.manual_seed(ctx.seed)
    return nn.Linear(16, 2)


def dataset(ctx: Context) -> Dataset[Any]:
    features = torch.randn(65_536, 16, generator=torch.Generator().manual_seed(ctx.seed))
    return TensorDataset(features, (features[:, 0] > 0).long())


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    time.sleep(float(ctx.knob("pause_ms")) / 1000)
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels)
