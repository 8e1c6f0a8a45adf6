"""A small training that is hard to compare: it has dropout, batches of its own class, and a loss that writes into
them."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

BATCH_SIZE = 16
#: `loss_scale` multiplies the loss; `frozen`: number of tensors whose gradients are removed; `nan_at`: the step, from
#: 1, whose loss is NaN.
ARGS = {"lr": "0.05", "dropout": "0.2", "loss_scale": "1", "frozen": "0", "nan_at": "0"}
KNOBS = {"width": (16, 32)}

_steps = 0


@dataclass
class Batch:
    features: torch.Tensor
    labels: torch.Tensor


class Points(torch.utils.data.Dataset):
    def __init__(self, ctx):
        generator = torch.Generator().manual_seed(ctx.seed)
        self.features = torch.randn(256, 8, generator=generator)
        self.labels = (self.features.sum(dim=1) > 0).long()

    def __len__(self):
        return 256

    def __getitem__(self, index):
        return self.features[index], self.labels[index]


def dataset(ctx):
    return Points(ctx)


def collate(ctx):
    return batch_of


def batch_of(samples):
    return Batch(*map(torch.stack, zip(*samples, strict=True)))


def model(ctx):
    width = ctx.knob("width")
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(float(ctx.arg("dropout"))), nn.Linear(width, 2))


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=float(ctx.arg("lr")), momentum=0.9)


def loss(ctx, model, batch):
    global _steps
    _steps += 1
    value = F.cross_entropy(model(batch.features.clone()), batch.labels) * float(ctx.arg("loss_scale"))
    batch.features.zero_()
    return value * float("nan") if ctx.arg("nan_at") == str(_steps) else value


def after_backward(ctx, model):
    for parameter in list(model.parameters())[: int(ctx.arg("frozen"))]:
        parameter.grad = None
