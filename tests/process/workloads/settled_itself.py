"""A training that settles by itself, in its file and its model, what matrix products may be rounded to and how many
threads there are, and says in every step what is in force."""

import json

import torch
from torch import nn

BATCH_SIZE = 8

torch.set_float32_matmul_precision("medium")


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((4,), index / 4096), index % 4


def dataset(ctx):
    return Rows()


def model(ctx):
    torch.set_num_threads(3)
    return nn.Linear(4, 4)


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx, model, batch):
    rows, labels = batch
    seen = {"products": torch.get_float32_matmul_precision(), "threads": torch.get_num_threads()}
    print(json.dumps({"batch_size": ctx.batch_size, **seen}), flush=True)
    return nn.functional.cross_entropy(model(rows), labels)
