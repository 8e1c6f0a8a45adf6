"""A small convolutional network on random images in memory: steps of some milliseconds, nothing to decode.

Made for launches that are short and many, all of one configuration (`benchmarks/coverage.py`).
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from autotune import Context

BATCH_SIZE = 32
IMAGE_SIZE = 32

Batch = tuple[torch.Tensor, torch.Tensor]  # images (N, 3, H, W) float32, labels (N,) int64


class Images(Dataset[tuple[torch.Tensor, int]]):
    """A few random images dealt again and again, in epochs longer than a launch."""

    def __init__(self, size: int, seed: int) -> None:
        self.images = torch.randn(256, 3, size, size, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return 65_536

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % len(self.images)], index % 10


def model(ctx: Context) -> nn.Module:
    torch.manual_seed(ctx.seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def dataset(ctx: Context) -> Dataset[Any]:
    return Images(ctx.image_size or IMAGE_SIZE, ctx.seed)


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)
