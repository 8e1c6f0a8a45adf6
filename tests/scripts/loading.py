"""A training whose data set goes on from sample to sample in one of many ways; says what is true of its epochs.

Usage: ``loading.py KIND [EPOCHS]``. By workers, samples of some kinds are those of other indices, or are drawn alike,
or do not follow what the training sets.
"""

import json
import os
import random
import sys
import time

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, get_worker_info

LENGTH, SIZE = 320, 64
rng = np.random.default_rng(0)


class Numbers(Dataset):
    """Samples ``(features, label, the index that it is of)``."""

    def __init__(self, of):
        self.of = of

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        time.sleep(0.0005)  # a slow disk
        number = self.of(index)
        return torch.full((4,), float(number)), index % 2, number


class Transformed(Dataset):
    def __init__(self, subset):
        self.subset = subset

    def __len__(self):
        return len(self.subset)

    def __getitem__(self, index):
        return self.subset[index]


class InFile:
    def __init__(self, opened, apart=False):
        self.shards = {"a": opened} if apart else opened

    def __call__(self, index):
        file = self.shards["a"] if isinstance(self.shards, dict) else self.shards
        file.seek(SIZE * index)
        time.sleep(0.0005)
        return int.from_bytes(file.read(4), "little")


class ByNumber:
    def __init__(self, descriptor):
        self.descriptor = descriptor

    def __call__(self, index):
        os.lseek(self.descriptor, SIZE * index, os.SEEK_SET)
        time.sleep(0.0005)
        return int.from_bytes(os.read(self.descriptor, 4), "little")


class Lazily:
    file = None

    def __call__(self, index):
        if self.file is None:
            self.file = open("numbers.bin", "rb", buffering=0)  # noqa: SIM115
        return InFile(self.file)(index)


class Augmented:
    def __init__(self, augment):
        self.augment = augment

    def __call__(self, index):
        return self.augment()


class Curriculum:
    difficulty = 0

    def __call__(self, index):
        return self.difficulty


class Cached:
    def __init__(self):
        self.kept = {}

    def __call__(self, index):
        if index not in self.kept:
            time.sleep(0.01)
            self.kept[index] = index
        return self.kept[index]


class ItsOwnIterator(IterableDataset):
    at = None

    def __iter__(self):
        if self.at is None:
            self.at = get_worker_info().id if get_worker_info() else 0
        return self

    def __next__(self):
        if self.at >= LENGTH:
            raise StopIteration
        index, self.at = self.at, self.at + (get_worker_info().num_workers if get_worker_info() else 1)
        return torch.full((4,), float(index)), index % 2, index


def opened():
    with open("numbers.bin", "wb") as file:
        file.write(b"".join(i.to_bytes(4, "little") + bytes(SIZE - 4) for i in range(LENGTH + 1)))
    return open("numbers.bin", "rb", buffering=0)


def stream():
    number = 0
    while True:
        yield number
        number += 1


def set_of(kind):
    if kind == "iterated":
        return ItsOwnIterator()
    numbers = stream()
    of = {
        "nested": lambda: InFile(opened()),
        "dict": lambda: InFile(opened(), apart=True),
        "concat": lambda: InFile(opened()),
        "descriptor": lambda: (opened(), ByNumber(os.open("numbers.bin", os.O_RDONLY)))[1],
        "lazy": lambda: (opened(), Lazily())[1],
        "global": lambda: Augmented(lambda: float(rng.normal())),
        "attribute": lambda: Augmented(random.Random(0).random),
        "stream": lambda: Augmented(lambda: next(numbers)),
        "curriculum": Curriculum,
        "cached": Cached,
        "random": lambda: Augmented(lambda: random.random() + float(torch.rand(()))),
        "plain": lambda: float,
        "dear": lambda: float,
    }[kind]()
    if kind == "nested":
        return Transformed(Subset(Numbers(of), range(LENGTH)))
    return ConcatDataset([Numbers(of)]) if kind == "concat" else Numbers(of)


def main(kind, epochs):
    torch.manual_seed(0)
    data = set_of(kind)
    loader = DataLoader(data, batch_size=8, shuffle=kind != "iterated", num_workers=2 if kind == "iterated" else 0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    seen = []
    for epoch in range(epochs):
        if kind == "curriculum":
            data.of.difficulty = epoch
        seen.append([])
        for features, labels, numbers in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features.float()), labels).backward()
            optimizer.step()
            if kind == "dear":
                time.sleep(1.1)  # a large model
            seen[-1] += numbers.tolist()
        seen = seen[-2:]
    print(json.dumps(seen), loader.num_workers)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100000)
