"""Any of torchvision's classification models on ImageNet-like photographs: `--model swin_t` comes here.

Stresses what the model stresses: of a MobileNet the loader, which cannot decode as fast as that computes; of a VGG or a
large transformer the device.

`--model NAME` stands for `--model torchvision_classifier --arg architecture=NAME`. Learning rate linear in the
batch size: Goyal et al. 2017 (arXiv:1706.02677). `--data DIR` takes an ImageFolder; without it autotune's generated
photographs are used.
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
ARGS = {"architecture": "resnet18"}

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
    architecture = ctx.arg("architecture")
    # Vision transformers fix the number of patches, and with it the image's size, when they are made.
    sized = {"image_size": ctx.image_size} if architecture.startswith("vit_") else {}
    network: nn.Module = models.get_model(architecture, weights=None, **sized)
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
    outputs = model(images)
    # GoogLeNet and Inception return named auxiliary heads beside the logits while they train.
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
