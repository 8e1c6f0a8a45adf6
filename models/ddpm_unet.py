"""Denoising diffusion on small images: a U-Net that is told the time, a noise schedule, and averaged weights.

Stresses launching: at 40 pixels and 8 images a step is hundreds of small kernels, so that a GPU waits for the host
that launches them. CUDA graphs (`compile_mode`), a larger batch, or fewer and larger kernels are what helps.

Model and schedule: Ho et al. 2020 (arXiv:2006.11239): noise grows linearly from 1e-4 to 0.02 over 1,000 times, the
network predicts it, and the weights that images are made with are an exponential average (0.9999) of the trained
ones. The average is updated after every step, and its time belongs to the step. Images: bright spots on a noisy
background, as in microscopy, made as they are read. `--data DIR` reads images in folders of classes, which it does
not use.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.transforms import v2

from autotune import Context

BATCH_SIZE = 8
IMAGE_SIZE = 40
IMAGES = 10_000
TIMES = 1_000
WIDTHS = (64, 128, 256)

Batch = torch.Tensor  # images (N, 3, H, W) float32 in -1…1


class Spots(Dataset[torch.Tensor]):
    """Each image is a function of (seed, index)."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> torch.Tensor:
        rng = np.random.default_rng((self.seed, index))
        rows, columns = np.mgrid[: self.size, : self.size].astype(np.float32)
        image = rng.normal(-0.6, 0.1, (3, self.size, self.size)).astype(np.float32)
        for _ in range(rng.integers(2, 8)):
            row, column = rng.uniform(0, self.size, 2)
            radius, colour = rng.uniform(1.5, self.size / 8), rng.uniform(0.2, 1.5, (3, 1, 1))
            spot = np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / (2 * radius**2))
            image += (colour * spot).astype(np.float32)
        return torch.from_numpy(image.clip(-1, 1))


class First(Dataset[torch.Tensor]):
    """The images of a set that has labels, too."""

    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> torch.Tensor:
        image: torch.Tensor = self.inner[index][0]
        return image


class Residual(nn.Module):
    """Two convolutions that are told the time, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, told: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.time = nn.Linear(told, outputs)
        self.second = nn.Sequential(nn.GroupNorm(8, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, images: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(images) + self.time(time)[:, :, None, None])
        found = found + self.shortcut(images)
        return found


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        told = 4 * WIDTHS[0]
        self.time = nn.Sequential(nn.Linear(WIDTHS[0], told), nn.SiLU(), nn.Linear(told, told), nn.SiLU())
        self.inward = nn.Conv2d(3, WIDTHS[0], 3, padding=1)
        steps = list(zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False))
        self.down = nn.ModuleList(Residual(a, b, told) for a, b in steps)
        self.middle = Residual(WIDTHS[-1], WIDTHS[-1], told)
        self.up = nn.ModuleList(Residual(2 * b, a, told) for a, b in reversed(steps))
        self.outward = nn.Sequential(nn.GroupNorm(8, WIDTHS[0]), nn.SiLU(), nn.Conv2d(WIDTHS[0], 3, 3, padding=1))

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        time = self.time(_waves(times))
        states = self.inward(images)
        kept = []
        for number, block in enumerate(self.down):
            states = block(states if not number else nn.functional.avg_pool2d(states, 2), time)
            kept.append(states)
        states = self.middle(states, time)
        for block, other in zip(self.up, reversed(kept), strict=True):
            # Where a size is odd, halving it has lost a row.
            states = nn.functional.interpolate(states, size=other.shape[-2:], mode="nearest")
            states = block(torch.cat([states, other], dim=1), time)
        found: torch.Tensor = self.outward(states)
        return found


def _waves(times: torch.Tensor) -> torch.Tensor:
    """Sines and cosines of the time, of wavelengths in a geometric row (Vaswani et al. 2017, arXiv:1706.03762, 3.5)."""
    half = WIDTHS[0] // 2
    rates = torch.exp(-math.log(10_000) / half * torch.arange(half, device=times.device))
    angles = times[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Diffusion(nn.Module):
    """The trained network, its average, and what share of an image is left at each time."""

    left: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.network = UNet()
        self.average = AveragedModel(self.network, multi_avg_fn=get_ema_multi_avg_fn(0.9999)).requires_grad_(False)
        self.register_buffer("left", torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES), dim=0), persistent=False)

    def forward(self, images: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        left = self.left[times][:, None, None, None]
        found: torch.Tensor = self.network(left.sqrt() * images + (1 - left).sqrt() * noise, times)
        return found


def model(ctx: Context) -> nn.Module:
    return Diffusion()


def dataset(ctx: Context) -> Dataset[Any]:
    size = ctx.image_size or IMAGE_SIZE
    if ctx.data.kind != "folder":
        return Spots(size, ctx.seed)
    read = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(size, antialias=True),
            v2.CenterCrop(size),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.5] * 3, std=[0.5] * 3),
        ]
    )
    return First(datasets.ImageFolder(str(ctx.data.path), read))


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=2e-4)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    times = torch.randint(TIMES, (len(batch),), device=batch.device)
    noise = torch.randn_like(batch)
    return nn.functional.mse_loss(model(batch, times, noise), noise)


def after_backward(ctx: Context, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)


def after_step(ctx: Context, model: nn.Module) -> None:
    assert isinstance(model, Diffusion)
    model.average.update_parameters(model.network)
