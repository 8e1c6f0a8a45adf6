"""A training of milliseconds that calls a function of a sibling module at the moment given by its arguments."""

import atexit
import importlib

import torch
from torch import nn

BATCH_SIZE = 8
#: `fault` is ``module.function`` or ``module.function:argument``, called with the context first. `at` is load, build,
#: the number of a step from 1, exit, ``worker`` or ``worker N`` (the first, the Nth sample that a worker makes), or
#: ``next worker`` (the first sample of a worker forked after the first step). `folder` is the launch's own.
#: `rank` is whose fault it is, of several.
ARGS = {"fault": "", "at": "load", "folder": "", "sample_bytes": "64", "samples": "80000", "rank": "0"}

_steps = 0


def at(ctx, place):
    if ctx.arg("fault") and ctx.arg("at") == str(place) and ctx.arg("rank") == str(ctx.rank):
        name, _, argument = ctx.arg("fault").partition(":")
        module, _, function = name.partition(".")
        return getattr(importlib.import_module(module), function)(ctx, *filter(None, [argument]))
    return None


class Samples(torch.utils.data.Dataset):
    def __init__(self, ctx):
        self.ctx = ctx
        self.features = torch.randn(int(ctx.arg("sample_bytes")) // 4)
        self.made = 0

    def __len__(self):
        return int(self.ctx.arg("samples"))

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            self.made += 1
            at(self.ctx, "worker" if self.made == 1 else f"worker {self.made}")
            if self.made == 1 and _steps:
                at(self.ctx, "next worker")
        return self.features.clone(), index % 4


def dataset(ctx):
    if ctx.arg("at") == "exit":
        atexit.register(at, ctx, "exit")
    # A fault called at this point may return a data set to use instead.
    return at(ctx, "load") or Samples(ctx)


def model(ctx):
    at(ctx, "build")
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx, model, batch):
    global _steps
    _steps += 1
    spoilt = at(ctx, _steps)
    features, labels = batch
    value = nn.functional.cross_entropy(model(features[:, :16]), labels)
    return value if spoilt is None else value * spoilt
