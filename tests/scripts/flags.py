"""A training script with options of its own for what autotune sets from outside. It prints what it has been told."""

import argparse
import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-j", "--workers", type=int, default=1)
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--amp", choices=["none", "bfloat16", "float16"], default="none")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--log")
    parser.add_argument("--out")
    parser.add_argument("--data")
    options = parser.parse_args()
    if options.log:
        with open(options.log, "a") as file:
            print(json.dumps({"words": sys.argv[1:], "folder": os.getcwd(), "there": os.listdir()}), file=file)
    for folder in (options.out, options.data):
        if folder:
            with open(f"{folder}/checkpoint", "w") as file:
                file.write("weights")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    model = nn.Linear(16, 4)
    run = torch.compile(model, backend="eager") if options.compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=options.amp == "float16")
    lower = getattr(torch, options.amp, None)
    seen, taken = set(), 0
    while taken < options.steps:
        loader = DataLoader(data, options.batch_size, num_workers=options.workers)
        for inputs, labels in loader:
            with torch.autocast("cpu", dtype=lower, enabled=lower is not None):
                outputs = run(inputs)
            seen.add(str(outputs.dtype))
            scaler.scale(nn.functional.cross_entropy(outputs.float(), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            taken += 1
            if taken == options.steps:
                break
    print(json.dumps({"words": sys.argv[1:], "outputs": sorted(seen), "workers": loader.num_workers}))


if __name__ == "__main__":
    main()
