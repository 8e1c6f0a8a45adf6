"""ResNet-50 on ImageNet-like photographs, trained the usual way.

Model and recipe: He et al. 2015 (arXiv:1512.03385); learning rate linear in the batch size: Goyal et al. 2017
(arXiv:1706.02677). `--data DIR` takes an ImageFolder; without it autotune's generated photographs are used.
"""

from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision import datasets, models
from torchvision.transforms import v2

from autotune import Context

BATCH_SIZE = 32
IMAGE_SIZE = 224
CPU_IMAGE_SIZE = 96
DATA = "images"

Batch = tuple[torch.Tensor, torch.Tensor]  # images (N, 3, H, W) float32, labels (N,) int64


class SameImage(Dataset[tuple[torch.Tensor, int]]):
    """`--data synthetic`: no decoding at all, so that the loader costs next to nothing."""

    def __init__(self, size: int) -> None:
        self.image = torch.randn(3, size, size)

    def __len__(self) -> int:
        return 1_281_167

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index % 1000


def decode(path: str) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise OSError(f"{path} cannot be decoded ({error}); repair it or take it out of the data set") from error


def model(ctx: Context) -> nn.Module:
    network: nn.Module = models.resnet50(weights=None)
    return network


def dataset(ctx: Context) -> Dataset[Any]:
    size = ctx.image_size or IMAGE_SIZE
    if ctx.data.kind == "synthetic":
        return SameImage(size)
    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    folder: Dataset[Any] = datasets.ImageFolder(str(ctx.data.path), transform, loader=decode)
    return folder


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1 * ctx.batch_size / 256, momentum=0.9, weight_decay=1e-4)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
