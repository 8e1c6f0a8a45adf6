"""A training that knows nothing of autotune, counts how often it is started, and dies at some of these times."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("starts", type=Path)
    for how in ("raises", "exits", "crashes"):
        parser.add_argument(f"--{how}", type=int, help="at this start")
    options = parser.parse_args()
    with options.starts.open("a") as file:
        file.write("x")
    start = options.starts.stat().st_size
    model = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in range(10**9):
        time.sleep(0.005)
        model(torch.zeros(8, 3, 8, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 10:
            continue
        if start == options.raises:
            raise RuntimeError("as it had to")
        if start == options.exits:
            sys.exit(7)
        if start == options.crashes:
            os.kill(os.getpid(), signal.SIGSEGV)


if __name__ == "__main__":
    main()
