"""A data set whose every read waits, and misbehaves under one number of workers."""

import os
import signal
import time

import torch
from torch import nn

BATCH_SIZE = 4
#: `fault` happens in the read number `read` of one of `at` workers.
ARGS = {"wait_ms": "5", "fault": "", "at": "-1", "read": "3"}

_reads = 0


class Store(torch.utils.data.Dataset):
    def __init__(self, ctx):
        self.wait_s = float(ctx.arg("wait_ms")) / 1e3
        self.fault, self.at, self.read = ctx.arg("fault"), int(ctx.arg("at")), int(ctx.arg("read"))

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        info = torch.utils.data.get_worker_info()
        if self.fault and self.at == (info.num_workers if info else 0):
            self._misbehave()
        return torch.zeros(4), index % 2

    def _misbehave(self):
        global _reads
        _reads += 1
        if _reads != self.read:
            return
        match self.fault:
            case "raises":
                raise ValueError("not with so many workers")
            case "exits":
                os._exit(3)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)


def dataset(ctx):
    return Store(ctx)


def model(ctx):
    raise AssertionError("nothing is to be trained")


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss(ctx, model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
