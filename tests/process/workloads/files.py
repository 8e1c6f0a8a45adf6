"""A small training whose samples are files of ``--data DIR``, each read by Python's `open`."""

from pathlib import Path

import torch
from torch import nn

BATCH_SIZE = 4


class Files(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.bin"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return torch.frombuffer(bytearray(self.paths[index].read_bytes()), dtype=torch.uint8)[:8].float()


def dataset(ctx):
    return Files(ctx.data.path)


def model(ctx):
    return nn.Linear(8, 1)


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=1e-6)


def loss(ctx, model, batch):
    return model(batch).square().mean()
