"""Inception v3 on microscopy of cell cultures, at the 299 pixels it was made for.

Stresses memory as much as the device: its many narrow branches allocate blocks of all sizes, and fields of view are
large files, of which a few workers' batches fill the 64 MB that a container's /dev/shm often has.

Model: Szegedy et al. 2015 (arXiv:1512.00567), with its auxiliary head, which has a weight of 0.3 in the loss; RMSProp
as there. Fields: some dozens of bright cells, whose number and size tell the culture, under a camera's Poisson noise.
`--data DIR` reads images in folders of classes (an ImageFolder); without it, 5,000 fields are cut from a few PNG files
that are made at the beginning and kept in memory.
"""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision import datasets, models
from torchvision.transforms import v2

from autotune import Context

BATCH_SIZE = 32
IMAGE_SIZE = 299
CPU_IMAGE_SIZE = 139
ARGS = {"classes": "4"}

FIELDS, FILES = 5_000, 32
#: The auxiliary head pools 17×17 features and has no use for less.
AUXILIARY_SIZE = 299

Batch = tuple[torch.Tensor, torch.Tensor]  # images (N, 3, H, W) float32, labels (N,) int64


def drawn(rng: np.random.Generator, size: int, kind: int) -> bytes:
    """Make a field of view as a PNG file, half as large again as what is cut from it."""
    side = size * 3 // 2
    light = np.full((side, side), 12.0)
    radius = side / 40 * (1 + 0.5 * (kind % 2))
    reach = int(3 * radius)
    for row, column in rng.integers(reach, side - reach, (20 + 25 * (kind // 2), 2)):
        rows, columns = np.mgrid[-reach:reach, -reach:reach]
        cell = rng.uniform(60, 160) / (1 + np.exp((np.hypot(rows, columns * rng.uniform(0.8, 1.25)) - radius) / 2))
        light[row - reach : row + reach, column - reach : column + reach] += cell
    photons = rng.poisson(light[:, :, None] * np.array([0.4, 1.0, 0.7]))
    stream = io.BytesIO()
    Image.fromarray(photons.clip(0, 255).astype(np.uint8)).save(stream, "png")
    return stream.getvalue()


class Fields(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, files: list[bytes], classes: int, transform: v2.Transform) -> None:
        self.files = files
        self.classes = classes
        self.transform = transform

    def __len__(self) -> int:
        return FIELDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = index % len(self.files)
        with Image.open(io.BytesIO(self.files[number])) as image:
            field: torch.Tensor = self.transform(image.convert("RGB"))
        return field, number % self.classes


def model(ctx: Context) -> nn.Module:
    auxiliary = (ctx.image_size or IMAGE_SIZE) >= AUXILIARY_SIZE
    network: nn.Module = models.inception_v3(
        weights=None, num_classes=int(ctx.arg("classes")), aux_logits=auxiliary, init_weights=False
    )
    return network


def dataset(ctx: Context) -> Dataset[Any]:
    size, classes = ctx.image_size or IMAGE_SIZE, int(ctx.arg("classes"))
    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.RandomResizedCrop(size, scale=(0.3, 0.6), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomVerticalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.5] * 3, std=[0.25] * 3),
        ]
    )
    if ctx.data.kind != "folder":
        rng = np.random.default_rng(ctx.seed)
        return Fields([drawn(rng, size, number % classes) for number in range(FILES)], classes, transform)
    folder: Any = datasets.ImageFolder(str(ctx.data.path), transform)
    if len(folder.classes) > classes:
        raise ValueError(f"{ctx.data.path} has {len(folder.classes)} classes: --arg classes={len(folder.classes)}")
    found: Dataset[Any] = folder
    return found


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    lr = 0.045 * ctx.batch_size / 1600
    return torch.optim.RMSprop(model.parameters(), lr=lr, alpha=0.9, eps=1.0, momentum=0.9, weight_decay=4e-5)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    outputs = model(images)
    if isinstance(outputs, torch.Tensor):
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1)
    heads = (outputs.logits, outputs.aux_logits)
    main, auxiliary = (nn.functional.cross_entropy(head, labels, label_smoothing=0.1) for head in heads)
    return main + 0.3 * auxiliary
