"""A training that takes milliseconds, for short searches."""

import torch
from torch import nn

BATCH_SIZE = 8


def model(ctx):
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def dataset(ctx):
    inputs = torch.randn(4096, 32, generator=torch.Generator().manual_seed(ctx.seed))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :4].clone())


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx, model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
