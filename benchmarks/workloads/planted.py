"""A planted, known slowdown: every step multiplies matrices `repetitions` times, and trains next to nothing besides.

The multiplications are real work of the same kind in both, so that 105 of them take 5 % longer than 100 on any
machine. Their result is thrown away: the training, and with it every loss, is the same whatever the knob says.
Which value is the baseline is for `--baseline workload.repetitions=…` to say.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from autotune import Context

BATCH_SIZE = 8
KNOBS = {"repetitions": (100, 102, 105)}

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs (N, 16) float32, labels (N,) int64

#: Side of the matrices: one product takes some tenths of a millisecond on one core.
SIDE = 192


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Two clouds of points, dealt again and again."""

    def __init__(self, seed: int) -> None:
        self.points = torch.randn(512, 16, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return 65_536

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 2
        return self.points[index % len(self.points)] + label, label


class Busy(nn.Module):
    """A linear classifier, and the matrices of the planted work."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(16, 2)
        # A rotation: however often it is applied, the numbers stay of one size.
        rotation, _ = torch.linalg.qr(torch.randn(SIDE, SIDE))
        self.register_buffer("rotation", rotation)
        self.register_buffer("state", torch.randn(SIDE, SIDE))

    def work(self, repetitions: int) -> None:
        with torch.no_grad():
            state = self.get_buffer("state")
            for _ in range(repetitions):
                state = self.get_buffer("rotation") @ state

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(points)
        return scores


def model(ctx: Context) -> nn.Module:
    torch.manual_seed(ctx.seed)
    return Busy()


def dataset(ctx: Context) -> Dataset[Any]:
    return Points(ctx.seed)


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    points, labels = batch
    assert isinstance(model, Busy)
    model.work(int(ctx.knob("repetitions")))
    return nn.functional.cross_entropy(model(points), labels)
