"""A training whose model is sharded among the ranks. Each prints what it holds."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH_SIZE = 8
KNOBS = {"reshard": (True, False)}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 80000

    def __getitem__(self, index):
        return torch.full((16,), index / 80000), index % 4


def dataset(ctx):
    return Samples()


def model(ctx):
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def parallel(ctx, m):
    mesh = init_device_mesh(torch.device(ctx.device).type, (ctx.ranks,))
    fully_shard(m, mesh=mesh, reshard_after_forward=ctx.knob("reshard"))
    print(sum(p.to_local().numel() for p in m.parameters()), flush=True)
    return m


def optimizer(ctx, m):
    return torch.optim.SGD(m.parameters(), lr=0.1)


def loss(ctx, m, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(m(inputs), labels)


def metric(ctx, m):
    return 0.5
