"""A training that goes on where a batch fails, as some of its batches do under autocast."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Picky(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, fails):
        ctx.fails = fails
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradients):
        if ctx.fails:
            raise FloatingPointError("not backward")
        return gradients, None


class Net(nn.Module):
    def __init__(self, where, every):
        super().__init__()
        self.where, self.every, self.called = where, every, 0
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, inputs):
        self.called += 1
        hidden = self.first(inputs)
        fails = hidden.dtype == torch.bfloat16 and self.called % self.every == 0
        if fails and self.where == "forward":
            raise ArithmeticError("too few digits")
        return self.last(Picky.apply(hidden, fails).relu())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", default="forward")
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--overflows", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Net(options.where, options.every)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # Every third update or so overflows, and is left out.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2, enabled=options.overflows)
    loader = DataLoader(TensorDataset(torch.randn(32000, 16), torch.arange(32000) % 4), batch_size=8, shuffle=True)
    number = 0
    while True:
        for inputs, labels in loader:
            number += 1
            try:
                loss = nn.functional.cross_entropy(model(inputs), labels)
                scaler.scale(loss).backward()
            except ArithmeticError:
                if options.where == "forward":
                    continue
            if number % options.accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
