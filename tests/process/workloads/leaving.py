"""A training of milliseconds whose processes each leave files with their own pid in shared memory."""

import os
import signal
from pathlib import Path

import torch
from torch import nn

BATCH_SIZE = 8
#: Suffix of every file, and which process (worker or leader) to kill once there is a file `die`.
ARGS = {"tag": "x", "dies": "worker"}
SHM = Path("/dev/shm")


def dies(ctx, who):
    return ctx.arg("dies") == who and (SHM / f"die_{ctx.arg('tag')}").exists()


def leave(ctx):
    (SHM / f"torch_{os.getpid()}_1_{ctx.arg('tag')}").touch()


class Samples(torch.utils.data.Dataset):
    def __init__(self, ctx):
        self.ctx = ctx
        self.made = 0

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        self.made += 1
        if torch.utils.data.get_worker_info() is not None and self.made == 1:
            leave(self.ctx)
        if torch.utils.data.get_worker_info() is not None and dies(self.ctx, "worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(16), index % 4


def dataset(ctx):
    return Samples(ctx)


def model(ctx):
    leave(ctx)
    return nn.Linear(16, 4)


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx, model, batch):
    if dies(ctx, "leader"):
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
