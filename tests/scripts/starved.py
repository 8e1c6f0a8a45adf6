"""A training that waits for its loader, and needs four workers. Its workers may fail."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info
from until import batches


class Slow(Dataset):
    fails = "never"
    fast = False
    samples = 600

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        worker = get_worker_info()
        if worker is not None and index % 200 == 7:
            if self.fails == "raises":
                raise OSError("not in a worker")
            if self.fails == "dies":
                os._exit(3)
        time.sleep(0.0 if self.fast else 0.005)
        return torch.full((4,), index / 600), index


class Network(nn.Linear):
    fast = False

    def forward(self, inputs):
        time.sleep(0.0 if self.fast else 0.012)
        return super().forward(inputs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fails", default="never")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--until", type=Path, help="end soon after this file has come")
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Network(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Slow()
    data.fails, data.samples = options.fails, options.samples
    data.fast = model.fast = options.fast
    loader = DataLoader(data, batch_size=8, shuffle=True)
    taken, losses = [], []
    for inputs, numbers in batches(loader, options, 100):
        taken += numbers.tolist()
        loss = nn.functional.cross_entropy(model(inputs), numbers % 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps({"taken": taken, "losses": losses, "workers": loader.num_workers}))


if __name__ == "__main__":
    main()
