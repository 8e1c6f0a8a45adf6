"""A training script of several ranks, as `torchrun` starts it: ``two_ranks.py [STEPS]``. It does not know autotune."""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE, SAMPLES = 32, 8192


def main(steps: int) -> None:
    """Train a small network for some steps: on the card of the rank's number, or the CPU if there is none."""
    on_card = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_card else torch.device("cpu")
    if on_card:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_card else "gloo")
    network = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(SAMPLES, 3, 32, 32), torch.randint(10, (SAMPLES,)))
    taken = 0
    while taken < steps:
        for images, labels in DataLoader(data, BATCH_SIZE, shuffle=True, pin_memory=on_card):
            optimizer.zero_grad()
            scores = model(images.to(device, non_blocking=True))
            nn.functional.cross_entropy(scores, labels.to(device, non_blocking=True)).backward()
            optimizer.step()
            taken += 1
            if taken >= steps:
                break
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10**9)
