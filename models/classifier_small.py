"""A small convolutional network that sorts cells in microscopy, cut out at 40 pixels.

Stresses the loader: a step takes a GPU a millisecond, so that decoding and turning 40-pixel files on one core starves
it. Workers decide, and how many of their batches /dev/shm has room for (a container often has 64 MB of it).

Network: three stages of two 3×3 convolutions with batch norm, after VGG (Simonyan & Zisserman 2014,
arXiv:1409.1556). Cells: bright discs with a darker nucleus, whose size and texture tell the class, under a camera's
Poisson noise.
`--data DIR` reads images in folders of classes (an ImageFolder); without it, 20,000 cells are drawn from a few PNG
files that are made at the beginning and kept in memory.

`autotune train --epochs` evaluates it on other cells, or on the ImageFolder that `--arg validation=DIR` names. Its
learning rate rises and falls once (Smith & Topin 2017, arXiv:1708.07120).
"""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.transforms import v2

from autotune import Context

BATCH_SIZE = 64
IMAGE_SIZE = 40
ARGS = {"classes": "8", "validation": ""}

CELLS, FILES = 20_000, 256

Batch = tuple[torch.Tensor, torch.Tensor]  # images (N, 3, H, W) float32, labels (N,) int64


def drawn(rng: np.random.Generator, size: int, kind: int) -> bytes:
    """Make a cell as a PNG file."""
    rows, columns = np.mgrid[:size, :size] - size / 2 + rng.normal(0, 1, (2, 1, 1))
    distance = np.hypot(rows, columns * rng.uniform(0.8, 1.25))
    body, nucleus = size * (0.28 + 0.02 * (kind % 4)), size * (0.08 + 0.03 * (kind // 4))
    light = 20 + 120 / (1 + np.exp(distance - body)) - 60 / (1 + np.exp(distance - nucleus))
    light += (kind % 3) * 10 * np.sin(rows * (1 + kind % 2)) * (distance < body)
    photons = rng.poisson(np.clip(light[:, :, None] * np.array([1.0, 0.8, 0.6]), 0, None))
    stream = io.BytesIO()
    Image.fromarray(photons.clip(0, 255).astype(np.uint8)).save(stream, "png")
    return stream.getvalue()


class Cells(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, files: list[bytes], classes: int, transform: v2.Transform, cells: int) -> None:
        self.files = files
        self.classes = classes
        self.transform = transform
        self.cells = cells

    def __len__(self) -> int:
        return self.cells

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = index % len(self.files)
        with Image.open(io.BytesIO(self.files[number])) as image:
            cell: torch.Tensor = self.transform(image.convert("RGB"))
        return cell, number % self.classes


def stage(inputs: int, outputs: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return [*layers, nn.MaxPool2d(2)]


def model(ctx: Context) -> nn.Module:
    stages = [*stage(3, 32), *stage(32, 64), *stage(64, 128)]
    head = nn.Linear(128, int(ctx.arg("classes")))
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), head)


def transform(ctx: Context, *augmentation: nn.Module) -> v2.Transform:
    size = ctx.image_size or IMAGE_SIZE
    return v2.Compose(
        [
            v2.PILToTensor(),
            *augmentation,
            v2.Resize((size, size), antialias=True),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.5] * 3, std=[0.25] * 3),
        ]
    )


def cells(ctx: Context, seed: int, transform: v2.Transform, number: int) -> Dataset[Any]:
    rng, size, classes = np.random.default_rng(seed), ctx.image_size or IMAGE_SIZE, int(ctx.arg("classes"))
    return Cells([drawn(rng, size, file % classes) for file in range(FILES)], classes, transform, number)


def folder(ctx: Context, path: str, transform: v2.Transform) -> Dataset[Any]:
    found: Any = datasets.ImageFolder(path, transform)
    if len(found.classes) > int(ctx.arg("classes")):
        raise ValueError(f"{path} has {len(found.classes)} classes: --arg classes={len(found.classes)}")
    read: Dataset[Any] = found
    return read


def dataset(ctx: Context) -> Dataset[Any]:
    augmented = transform(ctx, v2.RandomRotation(180), v2.RandomHorizontalFlip())
    if ctx.data.kind == "folder":
        return folder(ctx, str(ctx.data.path), augmented)
    return cells(ctx, ctx.seed, augmented, CELLS)


def validation(ctx: Context) -> Dataset[Any] | None:
    if ctx.arg("validation"):
        return folder(ctx, ctx.arg("validation"), transform(ctx))
    # Of a folder, nothing is kept back.
    return None if ctx.data.kind == "folder" else cells(ctx, ctx.seed + 1, transform(ctx), FILES)


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3 * (ctx.batch_size / 64) ** 0.5, weight_decay=0.01)


def schedule(ctx: Context, optimizer: torch.optim.Optimizer, steps: int | None) -> torch.optim.lr_scheduler.LRScheduler:
    assert steps is not None
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], total_steps=steps)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def evaluate(ctx: Context, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    images, labels = batch
    scores = model(images)
    right = (scores.argmax(1) == labels).float().mean()
    return {"accuracy": right, "validation_loss": nn.functional.cross_entropy(scores, labels)}
