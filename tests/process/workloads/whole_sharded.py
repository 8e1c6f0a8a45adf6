"""The training of `whole`, its model sharded among the ranks."""

import random

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from whole import ARGS, BATCH_SIZE, Noisy, collate, dataset, evaluate, loss, model, optimizer, schedule  # noqa: F401


def parallel(ctx, m):
    mesh = init_device_mesh(torch.device(ctx.device).type, (ctx.ranks,))
    return fully_shard(m, mesh=mesh)


def validation(ctx):
    # Two batches for the first of two ranks, and one for the other.
    return Noisy(17)


def metric(ctx, m):
    return random.random()
