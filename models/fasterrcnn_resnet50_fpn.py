"""Faster R-CNN with a ResNet-50 FPN, finding point-like targets in radar chips that are made as they are read.

Model: Ren et al. 2015 (arXiv:1506.01497) on feature pyramids (Lin et al. 2017, arXiv:1612.03144), from scratch;
learning rate linear in the batch size, 0.02 at 16 (torchvision's detection reference). Chips: multi-look speckle is
gamma distributed (Goodman 1976, J. Opt. Soc. Am. 66:1145), targets are clusters of a few strong scatterers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision.models.detection import fasterrcnn_resnet50_fpn

from autotune import Context

BATCH_SIZE = 8
IMAGE_SIZE = 512
CPU_IMAGE_SIZE = 128
# Chips are all of one size, but how many boxes, proposals and matches there are differs from batch to batch.
VARYING_SHAPES = True

CHIPS = 2_000
LOOKS = 4  # independent looks averaged into one pixel; fewer are rougher
SPREAD = np.array([[0.1, 0.4, 0.1], [0.4, 1.0, 0.4], [0.1, 0.4, 0.1]])  # one scatterer's response

Target = dict[str, torch.Tensor]  # boxes (K, 4) float32 as x0, y0, x1, y1 in pixels; labels (K,) int64, always 1
Sample = tuple[torch.Tensor, Target]  # image (3, H, W) float32 in 0…1
Batch = tuple[list[torch.Tensor], list[Target]]


class RadarChips(Dataset[Sample]):
    """Each chip is a function of (seed, index); about one in twenty shows nothing but clutter."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return CHIPS

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng((self.seed, index))
        power = rng.gamma(LOOKS, 1 / LOOKS, (self.size, self.size))
        boxes = []
        for _ in range(min(rng.poisson(3), 12)):
            width, height = rng.integers(6, max(self.size // 8, 8), 2)
            x, y = rng.integers(0, self.size - width), rng.integers(0, self.size - height)
            for strength in rng.exponential(60, rng.integers(4, 12)):
                column, row = x + rng.integers(1, width - 1), y + rng.integers(1, height - 1)
                power[row - 1 : row + 2, column - 1 : column + 2] += strength * SPREAD
            boxes.append([x, y, x + width, y + height])
        decibels = 10 * np.log10(power + 1e-3)
        chip = torch.from_numpy(((decibels + 20) / 50).clip(0, 1).astype(np.float32))
        target = {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.ones(len(boxes), dtype=torch.int64),
        }
        return chip.repeat(3, 1, 1), target


def model(ctx: Context) -> nn.Module:
    size = ctx.image_size or IMAGE_SIZE
    network: nn.Module = fasterrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=2,
        # Otherwise torchvision enlarges every chip to 800 pixels.
        min_size=size,
        max_size=size,
        # A chip holds at most a dozen targets; the 512 regions that suit COCO would be nearly all clutter, and
        # their fully connected head would take most of the step.
        box_batch_size_per_image=64,
        image_mean=[0.4, 0.4, 0.4],
        image_std=[0.05, 0.05, 0.05],
    )
    return network


def dataset(ctx: Context) -> Dataset[Any]:
    return RadarChips(ctx.image_size or IMAGE_SIZE, ctx.seed)


def collate(ctx: Context) -> Callable[[list[Sample]], Batch]:
    return as_lists


def as_lists(samples: list[Sample]) -> Batch:
    # Box lists differ in length, so they cannot be stacked; torchvision's detectors take lists of both.
    return [image for image, _ in samples], [target for _, target in samples]


def samples(ctx: Context, batch: Batch) -> int:
    return len(batch[0])


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02 * ctx.batch_size / 16, momentum=0.9, weight_decay=1e-4)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, targets = batch
    # Two losses of the proposals and two of the final boxes (what is it, where is it), equally weighted.
    losses: dict[str, torch.Tensor] = model(images, targets)
    return torch.stack(list(losses.values())).sum()


def after_backward(ctx: Context, model: nn.Module) -> None:
    # From scratch, the first steps' gradients would throw the weights far off.
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
