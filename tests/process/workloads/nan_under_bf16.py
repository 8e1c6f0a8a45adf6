"""Fast but wrong: a classifier whose hand-written loss becomes NaN under bf16 once it is certain of a sample.

The probability of a certain sample (a logit above 6.3) rounds to 1 in bf16, whose numbers just below 1 are 0.004 apart.
Then ``log(1 - p)`` is minus infinity, and zero times it is NaN. fp32 and fp16 get much closer to 1 before they round.
The logits are capped, and sharpened from step ``after`` on, as in temperature annealing, which is when it happens.
``--arg flaw=no`` is the same training with PyTorch's own loss.

A sleep stands in for the time that the lower precision saves a larger model: this one is too small to gain anything.
"""

import time

import torch
from torch import nn
from torch.nn import functional as F

BATCH_SIZE = 16
ARGS = {"flaw": "yes", "after": "0"}
FEATURES = 32
#: Logits stay below this: sigmoid(7.5) is 0.99945, which rounds to 1 in bf16 and in no other format.
CAP = 7.5
SHARP = 40.0
LR = 0.001
SLOW_S, FAST_S = 0.004, 0.001


class Points(torch.utils.data.Dataset):
    """Two clouds of points: ``(features: (FEATURES,) float32, label: () float32)``."""

    def __init__(self, ctx):
        generator = torch.Generator().manual_seed(ctx.seed)
        self.labels = torch.randint(0, 2, (4096,), generator=generator).float()
        direction = F.normalize(torch.randn(FEATURES, generator=generator), dim=0)
        noise = torch.randn(4096, FEATURES, generator=generator)
        self.features = noise + 2 * torch.outer(2 * self.labels - 1, direction)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.features[index], self.labels[index]


class Classifier(nn.Module):
    """Computes capped logits, shape ``(N,)``."""

    def __init__(self, after):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))
        self.after = after
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, features):
        sharpness = torch.where(self.steps >= self.after, SHARP, 1.0).to(features.dtype)
        return CAP * torch.tanh(sharpness * self.layers(features).squeeze(1) / CAP)


def dataset(ctx):
    return Points(ctx)


def model(ctx):
    return Classifier(int(ctx.arg("after")))


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=LR)


def loss(ctx, model, batch):
    features, labels = batch
    logits = model(features)
    time.sleep(FAST_S if logits.dtype is torch.bfloat16 else SLOW_S)
    if ctx.arg("flaw") == "no":
        return F.binary_cross_entropy_with_logits(logits.float(), labels)
    p = torch.sigmoid(logits)
    return -(labels * torch.log(p) + (1 - labels) * torch.log(1 - p)).mean()


def after_step(ctx, model):
    model.steps += 1
