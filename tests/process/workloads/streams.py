"""Trainings whose loaders are not PyTorch's usual ones. Samples are numbers."""

import itertools
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

BATCH_SIZE = 8
ARGS = {"kind": "stream", "samples": "96", "fails_at": "0", "sample_s": "0"}


class Stream(IterableDataset):
    """Numbers up to a count, or without end; workers share them."""

    def __init__(self, count, sample_s):
        self.count, self.sample_s = count, sample_s

    def __iter__(self):
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in itertools.count(first, stride):
            if self.count is not None and number >= self.count:
                return
            if self.sample_s:
                time.sleep(self.sample_s)
            yield torch.tensor([float(number)])


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count
        self.lengths = [number % 5 for number in range(count)]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class ByLength(Sampler):
    """Batches of samples of one length."""

    def __init__(self, lengths, batch_size):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batch_size = batch_size

    def __len__(self):
        return len(self.order) // self.batch_size

    def __iter__(self):
        for number in range(len(self)):
            yield self.order[number * self.batch_size : (number + 1) * self.batch_size]


class Foreign:
    """Batches from a library of another kind, that knows nothing of PyTorch's loader."""

    def __init__(self, count, batch_size):
        self.count, self.batch_size = count, batch_size

    def __iter__(self):
        for first in range(0, self.count - self.batch_size + 1, self.batch_size):
            yield torch.arange(first, first + self.batch_size, dtype=torch.float32)[:, None]


class Stubborn(DataLoader):
    """PyTorch's loader, with a collate function that it insists on, as PyTorch Geometric's has."""

    def __init__(self, collate_fn, **options):
        super().__init__(collate_fn=torch.stack, **options)


def dataset(ctx):
    kind, count = ctx.arg("kind"), int(ctx.arg("samples"))
    if kind in ("stream", "endless"):
        return Stream(None if kind == "endless" else count, float(ctx.arg("sample_s")))
    return Numbers(count)


def loader(ctx, options):
    if ctx.arg("kind") == "grouped":
        lengths = options["dataset"].lengths
        for name in ("shuffle", "sampler", "drop_last"):
            options.pop(name, None)
        return DataLoader(batch_sampler=ByLength(lengths, options.pop("batch_size")), **options)
    if ctx.arg("kind") == "foreign":
        return Foreign(len(options["dataset"]), options["batch_size"])
    if ctx.arg("kind") == "stubborn":
        return Stubborn(**options)
    if ctx.arg("kind") == "weighted":
        # Other samples than the loader's, as in a training with rare classes.
        return DataLoader(**{**options, "sampler": list(range(len(options["dataset"])))[::-1]})
    if ctx.arg("kind") == "reads the folder":
        return Foreign(len(ctx.data.path), options["batch_size"])
    if ctx.arg("kind") == "nothing":
        return None
    return DataLoader(**options)


_collated = 0


def collate(ctx):
    def stacked(samples):
        global _collated
        _collated += 1
        if _collated == int(ctx.arg("fails_at")):
            raise ValueError("a sample of another shape")
        return torch.stack(samples)

    return stacked


def model(ctx):
    return nn.Linear(1, 1)


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


def loss(ctx, model, batch):
    return model(batch / 100).square().mean()
