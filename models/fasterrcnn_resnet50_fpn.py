"""Faster R-CNN with a ResNet-50 FPN, finding point-like targets in radar chips that are made as they are read.

Stresses shapes: chips are all of one size, but box lists vary, so that the host waits for the device many times a step,
and CUDA graphs are out of the question. Precision pays less than in a classifier, and a batch is small.

Model: Ren et al. 2015 (arXiv:1506.01497) on feature pyramids (Lin et al. 2017, arXiv:1612.03144), from scratch;
learning rate linear in the batch size, 0.02 at 16 (torchvision's detection reference). Chips: multi-look speckle is
gamma distributed (Goodman 1976, J. Opt. Soc. Am. 66:1145), targets are clusters of a few strong scatterers.
`--data DIR` reads a set in COCO's layout: `DIR/annotations/instances_NAME.json` with the images in `DIR/NAME`, where
NAME has "train" in it if there are several; `--arg classes=80` says how many categories it has.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision.models.detection import fasterrcnn_resnet50_fpn
from torchvision.transforms.v2.functional import pil_to_tensor

from autotune import Context

BATCH_SIZE = 8
IMAGE_SIZE = 512
CPU_IMAGE_SIZE = 128
# Chips are all of one size, but how many boxes, proposals and matches there are differs from batch to batch.
VARYING_SHAPES = True
ARGS = {"classes": "1"}

CHIPS = 2_000
LOOKS = 4  # independent looks averaged into one pixel; fewer are rougher
SPREAD = np.array([[0.1, 0.4, 0.1], [0.4, 1.0, 0.4], [0.1, 0.4, 0.1]])  # one scatterer's response

Target = dict[str, torch.Tensor]  # boxes (K, 4) float32 as x0, y0, x1, y1 in pixels; labels (K,) int64 from 1
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


class Annotated(Dataset[Sample]):
    """Images with boxes in COCO's layout, brought to one size. Crowds and boxes of no extent are left out."""

    def __init__(self, folder: Path, size: int, classes: int) -> None:
        self.size = size
        found = sorted((folder / "annotations").glob("instances_*.json"))
        named = [path for path in found if "train" in path.stem] or found
        if len(named) != 1:
            what = f"has {len(named)} of them" if named else "has none"
            raise FileNotFoundError(f"{folder} {what}: DIR/annotations/instances_NAME.json, with images in DIR/NAME")
        self.images = folder / named[0].stem.removeprefix("instances_")
        try:
            told = json.loads(named[0].read_bytes())
            self.names = {image["id"]: image["file_name"] for image in told["images"]}
            labels = {kind["id"]: number for number, kind in enumerate(told["categories"], 1)}
            boxes: dict[int, list[list[float]]] = {number: [] for number in self.names}
            for note in told["annotations"]:
                x, y, width, height = note["bbox"]
                if width >= 1 and height >= 1 and not note.get("iscrowd"):
                    boxes[note["image_id"]].append([x, y, x + width, y + height, labels[note["category_id"]]])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{named[0]} is not in COCO's layout: {type(error).__name__}: {error}") from error
        if len(labels) > classes:
            raise ValueError(f"{named[0]} has {len(labels)} categories: --arg classes={len(labels)}")
        # As arrays: worker processes would copy lists page by page, when they count references.
        self.numbers = np.array(list(self.names))
        self.boxes = [np.array(boxes[number], dtype=np.float32).reshape(-1, 5) for number in self.names]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Sample:
        path = self.images / self.names[int(self.numbers[index])]
        try:
            with Image.open(path) as opened:
                image, (width, height) = opened.convert("RGB").resize((self.size, self.size)), opened.size
        except OSError as error:
            raise OSError(f"{path} cannot be decoded ({error}); repair it or take it out of the data set") from error
        noted = torch.from_numpy(self.boxes[index])
        scale = torch.tensor([self.size / width, self.size / height] * 2)
        target = {"boxes": noted[:, :4] * scale, "labels": noted[:, 4].to(torch.int64)}
        return pil_to_tensor(image).float() / 255, target


def model(ctx: Context) -> nn.Module:
    size = ctx.image_size or IMAGE_SIZE
    network: nn.Module = fasterrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=1 + int(ctx.arg("classes")),
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
    size = ctx.image_size or IMAGE_SIZE
    if ctx.data.kind == "folder":
        return Annotated(Path(str(ctx.data.path)), size, int(ctx.arg("classes")))
    return RadarChips(size, ctx.seed)


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
