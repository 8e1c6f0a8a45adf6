"""Trains over a loader in one of several ways of its own, and prints what it has trained on."""

import random
import sys

import torch
from torch.utils.data import DataLoader, Dataset

kind = sys.argv[1]


class Numbers(Dataset):
    def __init__(self):
        self.labels = torch.zeros(8)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(index)]), self.labels[index]


class Parts:
    """Another half of the set in each epoch, chosen when an epoch is asked for."""

    epoch = -1

    def __iter__(self):
        self.epoch += 1
        return iter([[2 * i + self.epoch % 2] for i in range(4)])

    def __len__(self):
        return 4


class Drawn:
    """Draws an order from the global generator when an epoch is asked for."""

    def __iter__(self):
        return iter(torch.randperm(8).view(8, 1).tolist())

    def __len__(self):
        return 8


torch.manual_seed(0)
random.seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = Numbers()
if kind == "parts":
    loader = DataLoader(data, batch_sampler=Parts())
elif kind == "drawn":
    loader = DataLoader(data, batch_sampler=Drawn())
else:
    loader = DataLoader(data, shuffle=kind in ("shuffled", "labels"))


def train(inputs, labels):
    optimizer.zero_grad()
    (model(inputs) - labels).square().mean().backward()
    optimizer.step()
    return int(inputs), int(labels)


for epoch in range(4):
    seen = []
    # Some loops never hear that there are no more batches, and keep the iterator.
    batches = iter(loader)
    for step, batch in enumerate(batches if kind != "counted" else (next(batches) for _ in range(8))):
        seen.append(train(*batch))
        if kind == "nested" and step == 3:
            with torch.no_grad():
                seen.append(sum(int(inputs) for inputs, _ in loader))
    if kind == "labels":
        data.labels = torch.full((8,), float(epoch + 1))
    print(seen, torch.rand(()).item())
