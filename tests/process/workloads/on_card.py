"""A small convolutional training that notes in its folder what tests on a real card compare with what was measured.

``folder`` is the launch's own. ``products`` matrix products lengthen a step, ``hold_bytes`` of device memory are held.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn

BATCH_SIZE = 32
ARGS = {"folder": "", "products": "0", "hold_bytes": "0"}
SIDE = 2048
#: The step after which the allocator's segments are noted.
NOTED_STEP = 4

_steps = 0
_evaluated = 0


class Images(torch.utils.data.Dataset):
    """Noise whose mean tells the label."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (512,), generator=generator)
        self.images = torch.randn(512, 3, 16, 16, generator=generator) + self.labels.view(-1, 1, 1, 1)

    def __len__(self):
        return 65_536

    def __getitem__(self, index):
        return self.images[index % 512], self.labels[index % 512]


def dataset(ctx):
    return Images(ctx.seed)


def model(ctx):
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 4)
    )
    side = SIDE if int(ctx.arg("products")) else 1
    network.matrix = torch.randn(side, side, device=ctx.device)
    network.held = torch.ones(int(ctx.arg("hold_bytes")), dtype=torch.uint8, device=ctx.device)
    Path(ctx.arg("folder"), "pid").write_text(str(os.getpid()))
    return network


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss(ctx, model, batch):
    global _steps
    _steps += 1
    images, labels = batch
    if int(ctx.arg("products")):
        _work_and_note_the_time(ctx, model)
    if _steps == NOTED_STEP and ctx.device.startswith("cuda"):
        expandable = [segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()]
        Path(ctx.arg("folder"), "segments").write_text(f"{sum(map(bool, expandable))} of {len(expandable)}")
    return nn.functional.cross_entropy(model(images), labels)


def _work_and_note_the_time(ctx, model):
    with torch.no_grad():
        for _ in range(int(ctx.arg("products"))):
            model.matrix @ model.matrix
    if ctx.device.startswith("cuda"):
        torch.cuda.synchronize()
    with Path(ctx.arg("folder"), "times").open("a") as stream:
        stream.write(f"{time.monotonic()}\n")


def evaluate(ctx, model, batch):
    """Evaluate fewer samples each time, as the last batch of a data set has fewer; at last always four."""
    global _evaluated
    _evaluated += 1
    images, labels = (part[: max(4, len(part) - 4 * _evaluated)] for part in batch)
    return nn.functional.cross_entropy(model(images), labels)
