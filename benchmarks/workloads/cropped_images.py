"""The training of `benchmarks/scripts/train_plain.py` as a workload file: ResNet-18 on images that are cropped as they
are loaded."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torchvision.models import resnet18
from torchvision.transforms import v2

from autotune.workload.contract import Context

BATCH_SIZE = 32


class Images(Dataset):  # type: ignore[type-arg]
    """Random images, cropped and flipped."""

    held = torch.randint(0, 256, (64, 3, 96, 96), dtype=torch.uint8)
    change = v2.Compose(
        [v2.RandomResizedCrop(64, antialias=True), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    )

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.change(self.held[index % 64]), index % 10


def model(ctx: Context) -> nn.Module:
    made: nn.Module = resnet18(num_classes=10)
    return made


def dataset(ctx: Context) -> Images:
    return Images()


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss(ctx: Context, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)
