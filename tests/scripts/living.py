"""A training that is known to be fastest with one thread, and cannot be computed in the format channels_last, which
there is on every machine."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from until import batches

#: Steps after the file has come: more than an epoch.
MORE = 300


class Counted(Dataset):
    def __init__(self):
        self.taken = []

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        self.taken.append(index)
        return torch.full((4,), index / 2000), index % 2


class ByHand:
    """Batches of a training that has no loader of PyTorch's."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        order = torch.randperm(len(self.data)).tolist()
        for start in range(0, len(order), 8):
            samples = [self.data[index] for index in order[start : start + 8]]
            yield torch.stack([inputs for inputs, _ in samples]), torch.tensor([label for _, label in samples])


class Network(nn.Linear):
    fails = "never"
    fast = False

    def __init__(self, *sizes):
        super().__init__(*sizes)
        # It only has a format.
        self.kernel = nn.Parameter(torch.zeros(2, 2, 3, 3))

    def forward(self, inputs):
        if not self.fast:
            time.sleep(0.002 if torch.get_num_threads() == 1 else 0.008)
        switched = not self.kernel.is_contiguous()
        if switched and self.fails == "forward":
            raise RuntimeError("not in this format")
        outputs = super().forward(inputs)
        if switched and self.fails == "backward":
            outputs.register_hook(fail)
        return outputs * float("nan") if switched and self.fails == "loss" else outputs


def fail(gradient):
    raise RuntimeError("not backward")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fails", default="forward")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--until", type=Path, help="end soon after this file has come")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--by-hand", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1 if options.fast else 2)
    model = Network(4, 2)
    model.fails, model.fast = options.fails, options.fast
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Counted()
    loader = ByHand(data) if options.by_hand else DataLoader(data, batch_size=8, shuffle=True)
    losses = []
    for inputs, labels in batches(loader, options, MORE):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps({"taken": data.taken, "losses": losses, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
