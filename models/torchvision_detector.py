"""Any of torchvision's detection models: `--model maskrcnn_resnet50_fpn`, `retinanet_resnet50_fpn`, `ssd300_vgg16`, …

Stresses synchronization: lists of boxes of varying length make the host wait for the device many times a step, and
forbid CUDA graphs; decoding photographs with their outlines keeps the loader busy.

`--model NAME` stands for `--model torchvision_detector --arg architecture=NAME`. Training: torchvision's reference,
SGD with 0.02 at a batch of 16. `--data DIR` reads a set in COCO's layout, `DIR/annotations/instances_NAME.json` (or
`person_keypoints_NAME.json` for keypoints) with the images in `DIR/NAME`, where NAME has "train" in it if there are
several; `--arg classes=80` says how many categories it has. Without it, scenes of bright ellipses are drawn.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import Dataset
from torchvision import models
from torchvision.transforms.v2.functional import pil_to_tensor

from autotune import Context

BATCH_SIZE = 4
IMAGE_SIZE = 512
CPU_IMAGE_SIZE = 128
VARYING_SHAPES = True
ARGS = {"architecture": "fasterrcnn_resnet50_fpn", "classes": "80"}

SCENES, MOST, POINTS = 5_000, 12, 17

# Boxes (K, 4) float32 as x0, y0, x1, y1 in pixels; labels (K,) int64 from 1; where the model asks for them, masks
# (K, H, W) uint8 or keypoints (K, 17, 3) float32 as x, y, visible.
Target = dict[str, torch.Tensor]
Sample = tuple[torch.Tensor, Target]  # image (3, H, W) float32 in 0…1
Batch = tuple[list[torch.Tensor], list[Target]]


def target(boxes: np.ndarray, labels: list[int], masks: list[np.ndarray], points: list[np.ndarray]) -> Target:
    found = {
        "boxes": torch.from_numpy(np.asarray(boxes, np.float32).reshape(-1, 4)),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }
    if masks:
        found["masks"] = torch.from_numpy(np.stack(masks).astype(np.uint8))
    if points:
        found["keypoints"] = torch.from_numpy(np.stack(points).astype(np.float32))
    return found


class Scenes(Dataset[Sample]):
    """Each scene is a function of (seed, index), and has at least one object."""

    def __init__(self, size: int, classes: int, wants: str, seed: int) -> None:
        self.size, self.classes, self.wants, self.seed = size, classes, wants, seed

    def __len__(self) -> int:
        return SCENES

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng((self.seed, index))
        image = rng.normal(0.4, 0.1, (3, self.size, self.size)).astype(np.float32)
        rows, columns = np.mgrid[: self.size, : self.size]
        boxes, labels, masks, points = [], [], [], []
        for _ in range(rng.integers(1, MOST + 1)):
            width, height = rng.integers(self.size // 12, self.size // 3, 2)
            x, y = rng.integers(0, self.size - width), rng.integers(0, self.size - height)
            inside = ((columns - x) / width - 0.5) ** 2 + ((rows - y) / height - 0.5) ** 2 < 0.25
            image[:, inside] += rng.uniform(0.1, 0.5, (3, 1)).astype(np.float32)
            boxes.append([x, y, x + width, y + height])
            labels.append(int(rng.integers(1, self.classes + 1)))
            if self.wants == "masks":
                masks.append(inside)
            if self.wants == "keypoints":
                places = rng.uniform(0, 1, (POINTS, 2)) * (width - 1, height - 1) + (x, y)
                points.append(np.concatenate([places, np.ones((POINTS, 1))], axis=1))
        return torch.from_numpy(image.clip(0, 1)), target(np.array(boxes), labels, masks, points)


class Annotated(Dataset[Sample]):
    """Images of a set in COCO's layout, brought to one size. Crowds and boxes of no extent are left out, and so are
    images without an object."""

    def __init__(self, folder: Path, size: int, classes: int, wants: str) -> None:
        self.size, self.wants = size, wants
        kind = "person_keypoints_" if wants == "keypoints" else "instances_"
        found = sorted((folder / "annotations").glob(f"{kind}*.json"))
        named = [path for path in found if "train" in path.stem] or found
        if len(named) != 1:
            what = f"has {len(named)} of them" if named else "has none"
            raise FileNotFoundError(f"{folder} {what}: DIR/annotations/{kind}NAME.json, with images in DIR/NAME")
        self.images = folder / named[0].stem.removeprefix(kind)
        try:
            told = json.loads(named[0].read_bytes())
            names = {image["id"]: image["file_name"] for image in told["images"]}
            labels = {kind["id"]: number for number, kind in enumerate(told["categories"], 1)}
            notes: dict[str, list[tuple[Any, ...]]] = {}
            for note in told["annotations"]:
                x, y, width, height = note["bbox"]
                if width >= 1 and height >= 1 and not note.get("iscrowd"):
                    more = (note["segmentation"] if wants == "masks" else note["keypoints"]) if wants else None
                    own = notes.setdefault(names[note["image_id"]], [])
                    own.append(([x, y, x + width, y + height], labels[note["category_id"]], more))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{named[0]} is not in COCO's layout: {type(error).__name__}: {error}") from error
        if len(labels) > classes:
            raise ValueError(f"{named[0]} has {len(labels)} categories: --arg classes={len(labels)}")
        # One text: worker processes would copy lists page by page, when they count references.
        texts = [json.dumps(item).encode() for item in notes.items()]
        self.text, self.ends = b"".join(texts), np.cumsum([0, *map(len, texts)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> Sample:
        name, notes = json.loads(self.text[self.ends[index] : self.ends[index + 1]])
        path = self.images / name
        try:
            with Image.open(path) as opened:
                image, (width, height) = opened.convert("RGB").resize((self.size, self.size)), opened.size
        except OSError as error:
            raise OSError(f"{path} cannot be decoded ({error}); repair it or take it out of the data set") from error
        scale = np.array([self.size / width, self.size / height])
        boxes, labels, masks, points = [], [], [], []
        for box, label, what in notes:
            boxes.append(np.array(box) * np.tile(scale, 2))
            labels.append(label)
            if self.wants == "masks":
                drawn = Image.new("1", (self.size, self.size))
                for outline in what:
                    corners = np.array(outline).reshape(-1, 2) * scale
                    ImageDraw.Draw(drawn).polygon([(float(x), float(y)) for x, y in corners], fill=1)
                masks.append(np.array(drawn))
            if self.wants == "keypoints":
                points.append(np.array(what, np.float32).reshape(POINTS, 3) * [*scale, 1])
        return pil_to_tensor(image).float() / 255, target(np.array(boxes), labels, masks, points)


def wanted(architecture: str) -> str:
    """What else than boxes a model learns: "masks", "keypoints", or nothing."""
    return {"mask": "masks", "keyp": "keypoints"}.get(architecture[:4], "")


def model(ctx: Context) -> nn.Module:
    architecture, size = ctx.arg("architecture"), ctx.image_size or IMAGE_SIZE
    # SSDs resize to the size in their names; the others would enlarge every image to 800 pixels.
    sized = {} if architecture.startswith("ssd") else {"min_size": size, "max_size": size}
    number = 2 if wanted(architecture) == "keypoints" else 1 + int(ctx.arg("classes"))
    network: nn.Module = models.get_model(
        architecture, weights=None, weights_backbone=None, num_classes=number, **sized
    )
    return network


def dataset(ctx: Context) -> Dataset[Any]:
    size, wants = ctx.image_size or IMAGE_SIZE, wanted(ctx.arg("architecture"))
    classes = 1 if wants == "keypoints" else int(ctx.arg("classes"))
    if ctx.data.kind == "folder":
        return Annotated(Path(str(ctx.data.path)), size, classes, wants)
    return Scenes(size, classes, wants, ctx.seed)


def collate(ctx: Context) -> Callable[[list[Sample]], Batch]:
    return as_lists


def as_lists(samples: list[Sample]) -> Batch:
    return [image for image, _ in samples], [target for _, target in samples]


def samples(ctx: Context, batch: Batch) -> int:
    return len(batch[0])


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.02 * ctx.batch_size / 16, momentum=0.9, weight_decay=1e-4)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, targets = batch
    losses: dict[str, torch.Tensor] = model(images, targets)
    return torch.stack(list(losses.values())).sum()


def after_backward(ctx: Context, model: nn.Module) -> None:
    # From scratch, the first steps' gradients would throw the weights far off.
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
