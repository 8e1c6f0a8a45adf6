"""A training of seconds that draws random numbers wherever one may: in samples, batches, model, loss and metric."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

BATCH_SIZE = 8
#: ``stream=yes``: the data set is iterated. ``width``: of the model. ``keeps``: something no checkpoint can hold.
ARGS = {"stream": "no", "samples": "200", "width": "16", "validation": "yes", "schedule": "yes", "keeps": ""}

average = None


def sample(index):
    noise = random.random() + np.random.rand() + torch.rand(())
    inputs = torch.full((8,), float(index % 13)) / 13 + 0.1 * noise
    return inputs, inputs.sum() + torch.randn(())


class Noisy(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return sample(index)


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(torch.initial_seed() % 2**60))
        for index in order[first::step].tolist():
            yield sample(index)


def dataset(ctx):
    kind = Stream if ctx.arg("stream") == "yes" else Noisy
    return kind(int(ctx.arg("samples")))


def collate(ctx):
    return mixed


def mixed(samples):
    inputs, targets = torch.utils.data.default_collate(samples)
    return inputs * (1 + 0.01 * torch.rand(len(inputs), 1)), targets


class Counting(nn.Module):
    """Computes otherwise in each step, by a buffer that is not among the model's weights."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.steps += 1
        return inputs * (1 + 0.1 * torch.sin(self.steps))


def model(ctx):
    width = int(ctx.arg("width"))
    inner = nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), Counting(), nn.Dropout(0.3)
    return nn.Sequential(*inner, nn.Linear(width, 1))


def optimizer(ctx, model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def schedule(ctx, optimizer, steps):
    if ctx.arg("schedule") == "no":
        return None
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=steps or 10_000)


def loss(ctx, model, batch):
    return nn.functional.mse_loss(model(batch[0]).squeeze(1).float(), batch[1] + 0.01 * torch.randn(()).item())


def after_step(ctx, model):
    global average
    weights = next(model.parameters()).detach()
    average = weights.clone() if average is None else 0.9 * average + 0.1 * weights


def validation(ctx):
    return Noisy(21) if ctx.arg("validation") == "yes" else None


def evaluate(ctx, model, batch):
    error = model(batch[0]).squeeze(1).float() - batch[1]
    return {"mse": (error**2).mean(), "largest": error.abs().max()}


def metric(ctx, model):
    return float(average.sum()) + random.random()


def state(ctx, model):
    return {"average": average, **({"best": np.float64(1.0)} if ctx.arg("keeps") else {})}


def load_state(ctx, model, state):
    global average
    average = state["average"]
