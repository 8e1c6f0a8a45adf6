"""Another process on the card: ``python -m benchmarks.card.other idle|computing cuda|cpu``. Runs until it is killed."""

from __future__ import annotations

import sys
import time

import torch

HELD_BYTES = {"cuda": 2 * 2**30, "cpu": 2**28}


def main() -> None:
    """Hold memory; then idle, or compute."""
    how, device = sys.argv[1:]
    held = torch.ones(HELD_BYTES[device], dtype=torch.uint8, device=device)
    matrix = torch.randn(2048, 2048, device=device)
    torch.set_num_threads(1)
    print("ready", flush=True)
    while len(held):
        if how == "idle":
            time.sleep(1)
            continue
        for _ in range(20):
            matrix @ matrix
        if device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
