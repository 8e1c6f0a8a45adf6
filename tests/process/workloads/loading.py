"""A training of milliseconds whose data set goes on from sample to sample: ``--arg kind=file | random | plain``."""

import torch
from torch import nn

BATCH_SIZE = 8
ARGS = {"kind": "plain", "path": ""}
LENGTH, SIZE = 160, 64


class Numbers(torch.utils.data.Dataset):
    def __init__(self, kind, path):
        self.kind = kind
        with open(path, "wb") as file:
            file.write(b"".join(i.to_bytes(4, "little") + bytes(SIZE - 4) for i in range(LENGTH + 1)))
        self.readers = {"one": open(path, "rb", buffering=0)} if kind == "file" else {}  # noqa: SIM115

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if self.kind == "file":
            self.readers["one"].seek(SIZE * index)
            number = float(int.from_bytes(self.readers["one"].read(4), "little"))
        else:
            number = index + (float(torch.rand(())) if self.kind == "random" else 0.0)
        return torch.full((4,), number), index % 2


def model(ctx):
    return nn.Linear(4, 2)


def dataset(ctx):
    return torch.utils.data.Subset(Numbers(ctx.arg("kind"), ctx.arg("path")), range(LENGTH))


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=1e-6)


def loss(ctx, model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
