"""Any of torchvision's segmentation models: `--model deeplabv3_resnet50`, `fcn_resnet50`, `lraspp_mobilenet_v3_large`.

Stresses the device's memory: outputs have a number for each class and pixel, so that small batches fill it; the
loader turns and crops an image together with its mask.

`--model NAME` stands for `--model torchvision_segmenter --arg architecture=NAME`. Training: torchvision's reference,
SGD with 0.01 at a batch of 8, and half the loss of the auxiliary head, where there is one, added. `--data DIR` reads
images in `DIR/images` and, under the same names, their masks as PNG files in `DIR/masks`, in which a pixel is the
number of its class and 255 is not counted; `--arg classes=21` says how many there are. Without it, scenes of discs
are drawn.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision import models, tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

from autotune import Context

BATCH_SIZE = 8
IMAGE_SIZE = 480
CPU_IMAGE_SIZE = 96
ARGS = {"architecture": "fcn_resnet50", "classes": "21"}

SCENES = 5_000
NOT_COUNTED = 255

Sample = tuple[torch.Tensor, torch.Tensor]  # image (3, H, W) float32, mask (H, W) int64
Batch = tuple[torch.Tensor, torch.Tensor]  # images (N, 3, H, W) float32, masks (N, H, W) int64


class Turned(Dataset[Sample]):
    """Images (3, H, W) uint8 with their masks (H, W) uint8, cropped and turned together."""

    def __init__(self, read: Dataset[tuple[torch.Tensor, torch.Tensor]], size: int) -> None:
        self.read = read
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(size, scale=(0.25, 1), antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
                v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
            ]
        )

    def __len__(self) -> int:
        return len(self.read)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        image, mask = self.read[index]
        image, mask = self.transform(tv_tensors.Image(image), tv_tensors.Mask(mask))
        return image.as_subclass(torch.Tensor), mask.as_subclass(torch.Tensor).long()


class Scenes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each scene is a function of (seed, index)."""

    def __init__(self, size: int, classes: int, seed: int) -> None:
        self.size, self.classes, self.seed = size, classes, seed

    def __len__(self) -> int:
        return SCENES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng((self.seed, index))
        image = rng.integers(60, 140, (3, self.size, self.size), dtype=np.uint8)
        mask = np.zeros((self.size, self.size), np.uint8)
        rows, columns = np.mgrid[: self.size, : self.size]
        for _ in range(rng.integers(2, 8)):
            radius, (row, column) = rng.uniform(0.05, 0.25) * self.size, rng.uniform(0, self.size, 2)
            inside = (rows - row) ** 2 + (columns - column) ** 2 < radius**2
            mask[inside] = kind = rng.integers(1, self.classes)
            image[:, inside] = image[:, inside] // 2 + np.uint8(5 * kind)
        return torch.from_numpy(image), torch.from_numpy(mask)


class Masked(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The images of a folder that have masks."""

    def __init__(self, folder: Path, classes: int) -> None:
        self.classes = classes
        masks = {path.stem: path for path in sorted((folder / "masks").glob("*.png"))}
        found = [(path, masks[path.stem]) for path in sorted((folder / "images").glob("*")) if path.stem in masks]
        if not found:
            raise FileNotFoundError(f"{folder} has no image in {folder / 'images'} with a mask in {folder / 'masks'}")
        # As arrays: worker processes would copy lists page by page, when they count references.
        self.paths = np.array([(str(image), str(mask)) for image, mask in found])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        path, of_mask = map(str, self.paths[index])
        try:
            with Image.open(path) as opened:
                image = pil_to_tensor(opened.convert("RGB"))
            path = of_mask
            with Image.open(path) as opened:
                mask = torch.from_numpy(np.array(opened))
        except OSError as error:
            raise OSError(f"{path} cannot be decoded ({error}); repair it or take it out of the data set") from error
        counted = mask[mask != NOT_COUNTED]
        if mask.shape != image.shape[1:] or (counted.numel() and int(counted.max()) >= self.classes):
            what = f"a mask of {tuple(mask.shape)} for an image of {tuple(image.shape[1:])}"
            if mask.shape == image.shape[1:]:
                what = f"a pixel of class {int(counted.max())}, and --arg classes={self.classes} counts from 0"
            raise ValueError(f"{path} has {what}")
        return image, mask


def model(ctx: Context) -> nn.Module:
    architecture = ctx.arg("architecture")
    more = {} if architecture.startswith("lraspp") else {"aux_loss": True}
    network: nn.Module = models.get_model(
        architecture, weights=None, weights_backbone=None, num_classes=int(ctx.arg("classes")), **more
    )
    return network


def dataset(ctx: Context) -> Dataset[Any]:
    size, classes = ctx.image_size or IMAGE_SIZE, int(ctx.arg("classes"))
    if ctx.data.kind == "folder":
        return Turned(Masked(Path(str(ctx.data.path)), classes), size)
    return Turned(Scenes(size, classes, ctx.seed), size)


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01 * ctx.batch_size / 8, momentum=0.9, weight_decay=1e-4)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, masks = batch
    outputs: dict[str, torch.Tensor] = model(images)
    found = nn.functional.cross_entropy(outputs["out"], masks, ignore_index=NOT_COUNTED)
    if "aux" in outputs:
        found = found + 0.5 * nn.functional.cross_entropy(outputs["aux"], masks, ignore_index=NOT_COUNTED)
    return found
