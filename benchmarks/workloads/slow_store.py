"""A small network on images from a store that makes every read wait, as an object store far away does.

Waiting takes no core: workers overlap even where there are only two. `--arg wait_ms=30` is the wait for each read,
`--arg architecture=NAME` any of torchvision's classifiers.
"""

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision import models

from autotune import Context

BATCH_SIZE = 16
IMAGE_SIZE = 64
ARGS = {"wait_ms": "30", "architecture": "mobilenet_v3_small"}

Batch = tuple[torch.Tensor, torch.Tensor]  # images (N, 3, H, W) float32, labels (N,) int64


class Store(Dataset[tuple[torch.Tensor, int]]):
    """A few images, each read of which waits."""

    def __init__(self, size: int, wait_s: float, seed: int) -> None:
        self.images = torch.randn(64, 3, size, size, generator=torch.Generator().manual_seed(seed))
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 65_536

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.wait_s)
        return self.images[index % len(self.images)], index % 1000


def model(ctx: Context) -> nn.Module:
    torch.manual_seed(ctx.seed)
    network: nn.Module = models.get_model(ctx.arg("architecture"), weights=None)
    return network


def dataset(ctx: Context) -> Dataset[Any]:
    return Store(ctx.image_size or IMAGE_SIZE, float(ctx.arg("wait_ms")) / 1e3, ctx.seed)


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)
