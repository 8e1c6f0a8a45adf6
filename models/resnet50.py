"""ResNet-50 on ImageNet-like photographs, trained the usual way.

Stresses the loader and the device alike: sixteen cores decode some 5,000 photographs a second at best, and files come
from wherever they lie; on the device, memory bandwidth decides more than arithmetic, and with it format and precision.

Model and recipe: He et al. 2015 (arXiv:1512.03385); learning rate linear in the batch size: Goyal et al. 2017
(arXiv:1706.02677), which in a whole training rises for its first twentieth and then falls as a cosine (Loshchilov &
Hutter 2016, arXiv:1608.03983). `--data DIR` takes an ImageFolder; without it autotune's generated photographs are used.
`--arg classes=100` trains on the first 100 classes. `--arg mixing=mixup` (Zhang et al. 2017, arXiv:1710.09412) or
`cutmix` (Yun et al. 2019, arXiv:1905.04899) mixes the images of a batch, on the device, or with `--arg mixing_on=host`
where the loader makes it.

Two knobs of its own may help: `--set workload.decoder=pillow,torchvision` where decoding limits it (both decode with
libjpeg-turbo; torchvision skips Pillow's own copy of the image), and `--set workload.floats=host,device`, which is
searched on a GPU: batches of bytes are a quarter as large, and become numbers around zero on the device.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, Subset, default_collate
from torchvision import datasets, models
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from autotune import Context, knob

BATCH_SIZE = 32
IMAGE_SIZE = 224
CPU_IMAGE_SIZE = 96
DATA = "images"
ARGS = {"classes": "1000", "mixing": "none", "mixing_on": "device"}
KNOBS = {
    "decoder": knob("pillow", "torchvision", changes_maths=False, searched=False),
    "floats": knob("host", "device", changes_maths=False, searched="cuda"),
}

MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Images (N, 3, H, W) float32, or uint8 where the device makes numbers of them; labels (N,) int64, or (N, classes)
# float32 where they are mixed.
Batch = tuple[torch.Tensor, torch.Tensor]


class SameImage(Dataset[tuple[torch.Tensor, int]]):
    """`--data synthetic`: no decoding at all, so that the loader costs next to nothing."""

    def __init__(self, size: int, classes: int, *, floats: bool) -> None:
        shape = (3, size, size)
        self.image = torch.randn(shape) if floats else torch.randint(256, shape, dtype=torch.uint8)
        self.classes = classes

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


def decode_bytes(path: str) -> torch.Tensor:
    with open(path, "rb") as file:
        data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    try:
        with warnings.catch_warnings():
            # torchvision 0.29 announces that another package will have its decoders.
            warnings.simplefilter("ignore", DeprecationWarning)
            image: torch.Tensor = decode_image(data, mode=ImageReadMode.RGB)
    except RuntimeError as error:
        raise OSError(f"{path} cannot be decoded ({error}); repair it or take it out of the data set") from error
    return image


class Mixing:
    """Mixes a batch, or as a collate function the samples of one."""

    def __init__(self, ctx: Context) -> None:
        kinds = {"mixup": v2.MixUp, "cutmix": v2.CutMix}
        if ctx.arg("mixing") not in kinds:
            raise ValueError(f"mixing={ctx.arg('mixing')} is not known: none, mixup or cutmix")
        self.mix = kinds[ctx.arg("mixing")](num_classes=int(ctx.arg("classes")))

    def __call__(self, samples: list[Any]) -> Batch:
        return self.of(default_collate(samples))

    def of(self, batch: Batch) -> Batch:
        images, labels = self.mix(*batch)
        return images, labels


@cache
def mean_and_spread(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors (3, 1, 1) on a device, which are copied there once, and not in every step."""
    mean, spread = (torch.tensor(values)[:, None, None].to(device) for values in (MEAN, SPREAD))
    return mean, spread


def mixes_on(ctx: Context, where: str) -> bool:
    if ctx.arg("mixing_on") not in ("host", "device"):
        raise ValueError(f"mixing_on={ctx.arg('mixing_on')} is neither host nor device")
    return ctx.arg("mixing") != "none" and ctx.arg("mixing_on") == where


def model(ctx: Context) -> nn.Module:
    network: nn.Module = models.resnet50(weights=None, num_classes=int(ctx.arg("classes")))
    return network


def dataset(ctx: Context) -> Dataset[Any]:
    size, classes = ctx.image_size or IMAGE_SIZE, int(ctx.arg("classes"))
    if ctx.knob("floats") == "device" and mixes_on(ctx, "host"):
        raise ValueError("mixing_on=host mixes numbers, and workload.floats=device makes them later")
    if ctx.data.kind == "synthetic":
        return SameImage(size, classes, floats=ctx.knob("floats") == "host")
    steps: list[nn.Module] = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    if ctx.knob("floats") == "host":
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean=MEAN, std=SPREAD)]
    read: Any = decode_bytes
    if ctx.knob("decoder") == "pillow":
        read, steps = decode, [v2.PILToTensor(), *steps]
    folder: Any = datasets.ImageFolder(str(ctx.data.path), v2.Compose(steps), loader=read)
    if len(folder.classes) <= classes:
        found: Dataset[Any] = folder
        return found
    return Subset(folder, [number for number, label in enumerate(folder.targets) if label < classes])


def collate(ctx: Context) -> Callable[[list[Any]], Any]:
    return Mixing(ctx) if mixes_on(ctx, "host") else default_collate


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1 * ctx.batch_size / 256, momentum=0.9, weight_decay=1e-4)


def schedule(ctx: Context, optimizer: torch.optim.Optimizer, steps: int | None) -> torch.optim.lr_scheduler.LRScheduler:
    assert steps is not None
    rising = max(1, steps // 20)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / rising, total_iters=rising)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - rising))
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [rising])


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    if images.dtype == torch.uint8:
        mean, spread = mean_and_spread(images.device)
        images = (images.float() / 255 - mean) / spread
    if mixes_on(ctx, "device"):
        images, labels = Mixing(ctx).of((images, labels))
    return nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
