"""A small training with a metric of its own. `--arg flaw=…`: under bf16 the metric's pass takes another way
("evaluation"), or is no number ("nan"); "always nan" is none whatever the precision, "text" is no number either, and
"raises" raises."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH_SIZE = 16
ARGS = {"flaw": "no"}


class Points(torch.utils.data.Dataset):
    def __init__(self, seed):
        self.features = torch.randn(256, 8, generator=torch.Generator().manual_seed(seed))
        self.labels = (self.features[:, :4].sum(dim=1) > 0).long()

    def __len__(self):
        return 256

    def __getitem__(self, index):
        return self.features[index], self.labels[index]


def dataset(ctx):
    return Points(ctx.seed)


def model(ctx):
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def loss(ctx, model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def metric(ctx, model):
    assert not model.training and not torch.is_grad_enabled()
    held_out, flaw = Points(ctx.seed + 1), ctx.arg("flaw")
    outputs = model(held_out.features)
    lower = outputs.dtype is torch.bfloat16
    if flaw == "raises":
        raise KeyError("target")
    if flaw == "text":
        return "good"
    if flaw == "always nan" or (flaw == "nan" and lower):
        return float("nan")
    chosen = outputs.argmin(dim=1) if flaw == "evaluation" and lower else outputs.argmax(dim=1)
    return (chosen == held_out.labels).float().mean()
