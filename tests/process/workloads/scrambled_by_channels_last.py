"""Fast but wrong: a colour classifier that learns nothing when its images come in channels_last.

It cuts images into patches with the strides of a contiguous tensor, as one might write it to avoid a copy. In
channels_last, memory holds the three colours of a pixel next to each other, so every patch mixes them, without any
error. ``--arg flaw=no`` makes the memory contiguous first, and is otherwise the same training.

A sleep stands in for the time that the better layout saves a larger model: this one is too small to gain anything.
"""

import time

import torch
from torch import nn
from torch.nn import functional as F

BATCH_SIZE = 16
IMAGE_SIZE = 24
ARGS = {"flaw": "yes"}
COLOURS = 3
PATCH = 4
SLOW_S, FAST_S = 0.004, 0.001


class Colours(torch.utils.data.Dataset):
    """Noisy images with a tint: ``(image: (3, IMAGE_SIZE, IMAGE_SIZE) float32, the tint's channel)``."""

    def __init__(self, ctx):
        generator = torch.Generator().manual_seed(ctx.seed)
        self.labels = torch.randint(0, COLOURS, (512,), generator=generator)
        noise = torch.randn(512, COLOURS, ctx.image_size, ctx.image_size, generator=generator)
        self.images = noise + 0.5 * F.one_hot(self.labels, COLOURS)[:, :, None, None]

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return self.images[index % 512], self.labels[index % 512]


class Classifier(nn.Module):
    """Computes scores, shape ``(N, 3)``."""

    def __init__(self, flaw):
        super().__init__()
        self.flaw = flaw
        self.mix = nn.Conv2d(COLOURS, 16, 1)
        self.head = nn.Linear(16, COLOURS)

    def forward(self, images):
        if not self.flaw:
            images = images.contiguous()
        n, c, h, w = images.shape
        grid = (n, c, h // PATCH, w // PATCH, PATCH, PATCH)
        patches = images.as_strided(grid, (c * h * w, h * w, PATCH * w, PATCH, w, 1))
        means = patches.mean(dim=(4, 5))
        return self.head(F.relu(self.mix(means)).mean(dim=(2, 3)))


def dataset(ctx):
    return Colours(ctx)


def model(ctx):
    return Classifier(ctx.arg("flaw") == "yes")


def optimizer(ctx, model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


def loss(ctx, model, batch):
    images, labels = batch
    fast = images.is_contiguous(memory_format=torch.channels_last)
    time.sleep(FAST_S if fast else SLOW_S)
    return F.cross_entropy(model(images), labels)
