"""A training whose samples are numbers. Prints those of its first batch."""

import torch
from torch import nn

BATCH_SIZE = 8

_told = False


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def dataset(ctx):
    return Numbers()


def model(ctx):
    return nn.Linear(1, 1)


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


def loss(ctx, model, batch):
    global _told
    if not _told:
        _told = True
        print([int(number) for number in batch[:, 0]])
    return model(batch / 4096).square().mean()
