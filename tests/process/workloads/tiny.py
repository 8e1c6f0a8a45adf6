"""A training of milliseconds, for short searches. With a shorter pause, anything is faster than the baseline."""

import time

import torch
from torch import nn

import autotune

BATCH_SIZE = 8
KNOBS = {"pause": autotune.knob(True, False, changes_maths=False)}


def model(ctx):
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def dataset(ctx):
    inputs = torch.randn(4096, 32, generator=torch.Generator().manual_seed(ctx.seed))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :4].clone())


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx, model, batch):
    # Both sleep more than they compute, so that other load hardly changes their ratio.
    time.sleep(0.02 if ctx.knob("pause") else 0.004)
    return nn.functional.mse_loss(model(batch[0]), batch[1])
