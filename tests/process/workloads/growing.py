"""A training on texts of different lengths, whose memory grows as its arguments say. Prints each pass without
gradients."""

import json

import torch
from torch import nn

BATCH_SIZE = 4
VARYING_SHAPES = True
#: Bytes that each training step leaks; bytes that a pass without gradients takes while it runs; floats in the longest
#: sample; `silent`: the model returns no loss in evaluation mode.
ARGS = {"leak_bytes": "0", "pass_bytes": "0", "longest": "1000", "silent": "no", "samples": "512"}

_kept = []


class Texts(torch.utils.data.Dataset):
    """``(length,) float32``: between 100 and 199 long, except for one sample of length `longest`."""

    def __init__(self, ctx):
        self.count = int(ctx.arg("samples"))
        self.longest = int(ctx.arg("longest"))

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.ones(self.longest if index == self.count // 2 else 100 + index % 100)


def dataset(ctx):
    return Texts(ctx)


def collate(ctx):
    return nn.utils.rnn.pad_sequence


def model(ctx):
    return nn.Linear(1, 1)


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=1e-6)


def loss(ctx, model, batch):
    if torch.is_grad_enabled():
        _kept.append(torch.ones(int(ctx.arg("leak_bytes")) // 4))
    else:
        tell(model, batch)
        if ctx.arg("silent") == "yes" and not model.training:
            raise KeyError("no losses in evaluation mode")
        torch.ones(int(ctx.arg("pass_bytes")) // 4)
    return model(batch[..., None]).mean()


def tell(model, batch):
    bf16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    print(json.dumps({"training": model.training, "bf16": bf16, "shape": list(batch.shape)}))
