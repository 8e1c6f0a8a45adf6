"""A training whose data set holds what workers could not share."""

import argparse
import random

import torch
from torch.utils.data import DataLoader, Dataset


class Holding(Dataset):
    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 80

    def __getitem__(self, index):
        return torch.full((4,), float(index))


parser = argparse.ArgumentParser()
parser.add_argument("held", choices=["file", "generator", "nothing"])
makes = {
    "file": lambda: open(__file__),  # noqa: SIM115
    "generator": lambda: random.Random(0),
    "nothing": lambda: None,
}
held = makes[parser.parse_args().held]()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Holding(held), batch_size=8)
for inputs in loader:
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
print(loader.num_workers)
