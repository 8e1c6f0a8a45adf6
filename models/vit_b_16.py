"""A vision transformer of 16-pixel patches on ImageNet-like photographs.

Stresses the device: attention, checkpointing, compilation and the number format decide, and a loader that keeps up
with a ResNet of its size has time to spare.

Model: torchvision's ViT-B/16 (Dosovitskiy et al. 2020, arXiv:2010.11929); AdamW and learning rate as for DeiT (Touvron
et al. 2020, arXiv:2012.12877, table 9). Attention: PyTorch's `scaled_dot_product_attention` by the kernel it chooses
itself, or by its formula. Checkpointing: each block's activations are computed again in the backward pass (Chen et al.
2016, arXiv:1604.06174). `--data DIR` takes an ImageFolder; without it autotune's generated photographs are used.
"""

from collections import OrderedDict
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from torchvision import datasets, models
from torchvision.transforms import v2

from autotune import Context, knob

BATCH_SIZE = 64
IMAGE_SIZE = 224
CPU_IMAGE_SIZE = 96
DATA = "images"
ARGS = {"classes": "1000"}
KNOBS = {
    "attention": knob("fused", "formula", changes_maths=False),
    "checkpointing": knob(False, True, changes_maths=False),
}

Batch = tuple[torch.Tensor, torch.Tensor]  # images (N, 3, H, W) float32, labels (N,) int64


class SameImage(Dataset[tuple[torch.Tensor, int]]):
    """`--data synthetic`: no decoding at all, so that the loader costs next to nothing."""

    def __init__(self, size: int, classes: int) -> None:
        self.image = torch.randn(3, size, size)
        self.classes = classes

    def __len__(self) -> int:
        return 1_281_167

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index % self.classes


class Blocks(nn.Sequential):
    def __init__(self, blocks: nn.Sequential, *, formula: bool, checkpointed: bool) -> None:
        # Weights keep their names: those of a sequence of named blocks.
        super().__init__(OrderedDict(blocks.named_children()))
        self.formula, self.checkpointed = formula, checkpointed

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for block in self:
            run = by_formula if self.formula else call
            states = checkpoint(run, block, states, use_reentrant=False) if self.checkpointed else run(block, states)
        return states


def call(block: nn.Module, states: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = block(states)
    return found


def by_formula(block: nn.Module, states: torch.Tensor) -> torch.Tensor:
    # Here, because a block that is computed again is computed outside of what is around the whole network.
    with sdpa_kernel(SDPBackend.MATH):
        return call(block, states)


def decode(path: str) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise OSError(f"{path} cannot be decoded ({error}); repair it or take it out of the data set") from error


def model(ctx: Context) -> nn.Module:
    size = ctx.image_size or IMAGE_SIZE
    if size % 16:
        raise ValueError(
            f"images of {size} pixels have no whole number of 16-pixel patches: --image-size {size // 16 * 16 or 16}"
        )
    network: Any = models.vit_b_16(weights=None, image_size=size, num_classes=int(ctx.arg("classes")))
    formula, checkpointed = ctx.knob("attention") == "formula", bool(ctx.knob("checkpointing"))
    network.encoder.layers = Blocks(network.encoder.layers, formula=formula, checkpointed=checkpointed)
    found: nn.Module = network
    return found


def dataset(ctx: Context) -> Dataset[Any]:
    size, classes = ctx.image_size or IMAGE_SIZE, int(ctx.arg("classes"))
    if ctx.data.kind == "synthetic":
        return SameImage(size, classes)
    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    folder: Any = datasets.ImageFolder(str(ctx.data.path), transform, loader=decode)
    if len(folder.classes) > classes:
        raise ValueError(f"{ctx.data.path} has {len(folder.classes)} classes: --arg classes={len(folder.classes)}")
    found: Dataset[Any] = folder
    return found


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=5e-4 * ctx.batch_size / 512)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
