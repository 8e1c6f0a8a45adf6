"""The sample of a data set that takes the most memory: named by the workload, or looked for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from autotune.workload import contract
from autotune.base.clock import Clock
from autotune.workload.contract import Context, Workload
from autotune.workload.wrapping import innermost

#: Limits of the search for it.
LOOK_SAMPLES = 256
LOOK_S = 5.0


def largest_sample(workload: Workload, ctx: Context, dataset: Dataset[Any], clock: Clock) -> tuple[Any, int | None]:
    """Return ``(sample, its size in bytes)``, or ``(None, None)`` if all samples have the same shape.

    The workload names the sample, or samples spread over the data set are compared.
    """
    dataset = innermost(dataset)
    known = contract.optional(workload, "largest_sample")
    if known is not None:
        sample = known(ctx, dataset)
        return sample, _size_bytes(sample)
    if not getattr(workload, "VARYING_SHAPES", False):
        return None, None
    deadline = clock.now() + LOOK_S
    best, best_bytes = None, -1
    for sample in _spread(dataset):
        if (size := _size_bytes(sample)) > best_bytes:
            best, best_bytes = sample, size
        if clock.now() > deadline:
            break
    return best, best_bytes


def _spread(dataset: Dataset[Any]) -> Iterator[Any]:
    """Yield up to some more than `LOOK_SAMPLES` samples, from all over a data set if it can be indexed."""
    if isinstance(dataset, IterableDataset):
        yield from itertools.islice(dataset, LOOK_SAMPLES)
        return
    count = len(dataset)  # type: ignore[arg-type]
    for index in range(0, count, max(1, count // LOOK_SAMPLES)):
        yield dataset[index]


def _size_bytes(part: Any) -> int:
    """Return the size of a sample in bytes: tensors, arrays, and numbers and strings not yet converted to tensors."""
    size = getattr(part, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(part, dict):
        return sum(map(_size_bytes, part.values()))
    if isinstance(part, tuple | list):
        return sum(map(_size_bytes, part))
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return sum(_size_bytes(getattr(part, f.name)) for f in dataclasses.fields(part))
    if isinstance(part, str | bytes):
        return len(part)
    return 8 if isinstance(part, int | float) else 0
