"""Any of timm's models on ImageNet-like photographs: `--model timm:convnext_tiny`.

Stresses what the model stresses: timm has more than a thousand, from MobileNets, whose loader decides, to the largest
transformers, where memory and the kernels of attention do.

`--model timm:NAME` stands for `--model timm_classifier --arg architecture=NAME`; it needs timm (`pip install timm`).
Optimizer: AdamW, with a learning rate of 1e-3 at a batch of 1,024 (Touvron et al. 2020, arXiv:2012.12877, table 9).
`--data DIR` takes an ImageFolder; without it autotune's generated photographs are used. A model that is made for one
size takes no other, unless timm can make it for that size.
"""

from typing import Any

import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.transforms import v2

from autotune import Context

BATCH_SIZE = 32
IMAGE_SIZE = 224
CPU_IMAGE_SIZE = 96
DATA = "images"
ARGS = {"architecture": "resnet18", "classes": "1000"}

Batch = tuple[torch.Tensor, torch.Tensor]  # images (N, 3, H, W) float32, labels (N,) int64


class SameImage(Dataset[tuple[torch.Tensor, int]]):
    """`--data synthetic`: no decoding at all, so that the loader costs next to nothing."""

    def __init__(self, size: int, classes: int) -> None:
        self.image, self.classes = torch.randn(3, size, size), classes

    def __len__(self) -> int:
        return 1_281_167

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index % self.classes


def decode(path: str) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise OSError(f"{path} cannot be decoded ({error}); repair it or take it out of the data set") from error


def model(ctx: Context) -> nn.Module:
    architecture, size = ctx.arg("architecture"), ctx.image_size or IMAGE_SIZE
    base = architecture.split(".")[0]
    if not timm.is_model(base):
        near = timm.list_models(f"*{base.split('_')[0]}*")[:3]
        raise ValueError(f"timm {timm.__version__} has no model {architecture!r}; near it: {', '.join(near) or 'none'}")
    own = {"pretrained": False, "num_classes": int(ctx.arg("classes"))}
    try:
        # Transformers fix the number of patches, and with it the image's size, when they are made.
        network: nn.Module = timm.create_model(architecture, img_size=size, **own)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        network = timm.create_model(architecture, **own)
    return network


def dataset(ctx: Context) -> Dataset[Any]:
    size = ctx.image_size or IMAGE_SIZE
    if ctx.data.kind == "synthetic":
        return SameImage(size, int(ctx.arg("classes")))
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
    return torch.optim.AdamW(model.parameters(), lr=1e-3 * ctx.batch_size / 1024, weight_decay=0.05)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
