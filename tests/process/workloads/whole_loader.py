"""The training of `whole`, with a loader of its own that draws the order of the samples in the training's process."""

import random

from torch.utils.data import DataLoader
from whole import (  # noqa: F401
    ARGS,
    BATCH_SIZE,
    after_step,
    collate,
    dataset,
    evaluate,
    load_state,
    loss,
    metric,
    model,
    optimizer,
    schedule,
    state,
    validation,
)


class Shuffled:
    def __init__(self, samples, size):
        self.samples = samples
        self.size = size

    def __len__(self):
        return self.samples // self.size

    def __iter__(self):
        order = random.sample(range(self.samples), self.samples)
        for first in range(0, len(self) * self.size, self.size):
            yield order[first : first + self.size]


def loader(ctx, options):
    for name in ("sampler", "drop_last"):
        options.pop(name)
    return DataLoader(batch_sampler=Shuffled(len(options["dataset"]), options.pop("batch_size")), **options)
