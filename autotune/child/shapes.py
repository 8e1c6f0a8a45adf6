"""Looks at batches: do the shapes of their images vary?

cuDNN's benchmark and CUDA graphs prepare for one shape at a time, so images of varying shapes forbid them. Lists of
boxes, labels and other tensors without an image's two long sides do not reach a convolution, and are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from autotune.base.clock import Clock

#: Batches to look at, the largest number of samples in each, and the seconds that all may take.
LOOK_BATCHES, LOOK_SAMPLES, LOOK_S = 50, 32, 3.0
#: Both sides of an image have at least this many elements; the rows of a box list have four.
LEAST_SIDE = 8


def images_vary(
    dataset: Dataset[Any], collate: Callable[[list[Any]], Any], *, batch_size: int, seed: int, clock: Clock
) -> bool | None:
    """Return whether images at the same place of several batches differ in shape.

    Looks at `LOOK_BATCHES` random batches, or at as many as `LOOK_S` seconds allow.

    Returns:
        ``None`` if that is not known: there are no images, or fewer than two batches could be read.
    """
    deadline = clock.now() + LOOK_S
    seen: dict[tuple[object, ...], tuple[int, ...]] = {}
    for looked, batch in enumerate(_random_batches(dataset, min(batch_size, LOOK_SAMPLES), seed)):
        samples = []
        for sample in batch:
            samples.append(sample)
            if clock.now() > deadline:
                return False if seen and looked > 1 else None
        for place, shape in _images(collate(samples), ()):
            if seen.setdefault(place, shape) != shape:
                return True
    return False if seen else None


def _random_batches(dataset: Dataset[Any], size: int, seed: int) -> Iterator[Iterator[Any]]:
    """Yield the samples of random batches; those of a data set that is iterated as they come."""
    if isinstance(dataset, IterableDataset):
        samples = iter(dataset)
        for _ in range(LOOK_BATCHES):
            batch = list(itertools.islice(samples, size))
            if len(batch) < size:
                return
            yield iter(batch)
        return
    assert isinstance(dataset, Sized)
    rng = random.Random(seed)
    count = len(dataset)
    for _ in range(LOOK_BATCHES):
        yield (dataset[index] for index in rng.sample(range(count), min(size, count)))


def _images(part: Any, place: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], tuple[int, ...]]]:
    """Yield the place of each image-like tensor of a batch, with its shape: ``(H, W)``, or ``(D, H, W)`` of volumes.

    The number of samples, channels or masks is not part of it.
    """
    if isinstance(part, torch.Tensor):
        if part.dim() >= 3 and min(part.shape[-2:]) >= LEAST_SIDE:
            yield place, tuple(part.shape[1:] if part.dim() == 3 else part.shape[2:])
    elif isinstance(part, dict):
        for name, inside in part.items():
            yield from _images(inside, (*place, name))
    elif isinstance(part, tuple | list):
        for index, inside in enumerate(part):
            yield from _images(inside, (*place, index))
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            yield from _images(getattr(part, field.name), (*place, field.name))
