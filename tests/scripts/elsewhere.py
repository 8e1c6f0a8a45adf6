"""A script that knows nothing of autotune, and trains in a process that it has started, or lets one load its data."""

import argparse
import itertools
import multiprocessing
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loader():
    return DataLoader(TensorDataset(torch.zeros(320, 4), torch.zeros(320, dtype=torch.long)), batch_size=8)


def train(batches, steps):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in itertools.islice(batches, steps):
        time.sleep(0.01)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_on_own(steps):
    train(itertools.chain.from_iterable(itertools.repeat(loader())), steps)


def load(queue):
    for batch in itertools.chain.from_iterable(itertools.repeat(loader())):
        queue.put(batch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["fork", "spawn", "background", "loader"])
    parser.add_argument("--steps", type=int, default=10**9)
    options = parser.parse_args()
    if options.how == "background":
        if not os.fork():
            os.setsid()
            train_on_own(options.steps)
        return
    if options.how == "loader":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue(maxsize=4)
        context.Process(target=load, args=(queue,), daemon=True).start()
        train(iter(queue.get, None), options.steps)
        return
    child = multiprocessing.get_context(options.how).Process(target=train_on_own, args=(options.steps,))
    child.start()
    child.join()


if __name__ == "__main__":
    main()
