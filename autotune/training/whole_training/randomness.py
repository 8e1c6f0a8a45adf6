"""Random numbers that do not depend on when a training was interrupted.

What makes batches and what trains draw from separate streams. A batch's is seeded by the epoch and the batch, in
whichever process makes it, so that a training that goes on in the middle of an epoch gets the same augmentation. What
trains (dropout, noise) draws from the process's own generators, whose states are kept in the checkpoints. Where one
process does both, each step is seeded as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autotune.training.sample_order import SampleOrder
from autotune.workload.wrapping import Wrapper


def seed_of(*parts: object) -> int:
    """Return a seed below 2**63 that differs with each of the parts."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed of what one of several ranks draws for itself: augmentation, dropout. The first has the seed of
    the training."""
    return seed_of(seed, "rank", rank) if rank else seed


def sow(seed: int) -> None:
    """Seed the generators of Python, NumPy, and torch on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not `torch.manual_seed`, which seeds the cards' generators, too.
    torch.default_generator.manual_seed(seed)


def sow_with(seed: int, device: torch.device) -> None:
    """Do as `sow`, and seed the generator of the device."""
    sow(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy, and torch on the CPU and the device, of what a checkpoint
    may hold."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _with_lists(np.random.get_state()),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def _with_lists(state: Any) -> Any:
    """Return a state of NumPy's with lists in place of its arrays, which it takes back as well."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {name: _with_lists(value) for name, value in state.items()}
    return tuple(map(_with_lists, state)) if isinstance(state, tuple) else state


def restore(found: dict[str, Any], device: torch.device) -> None:
    """Set the states that `states` returned."""
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    if "cuda" in found and device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], device)


@contextlib.contextmanager
def drawing_beside(seed: int, device: torch.device) -> Iterator[None]:
    """Let everything draw from a stream of its own, and afterwards from the training's again.

    Args:
        device: whose generator is seeded and set back, besides those on the CPU.
    """
    before = states(device)
    sow_with(seed, device)
    try:
        yield
    finally:
        restore(before, device)


class EpochSeeds:
    """Seeds what makes batches. The epoch is shared with the loader's workers, which may live longer than one.

    Args:
        seed: of the training. shared: there are workers.
    """

    def __init__(self, seed: int, *, shared: bool) -> None:
        self._seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64)
        if shared:
            self._epoch.share_memory_()

    def begin(self, epoch: int) -> None:
        """Say which epoch is read next. Call it before the loader's iterator is made."""
        self._epoch.fill_(epoch)

    def sow(self, *what: object) -> None:
        """Seed this process for what it makes next."""
        sow(seed_of(self._seed, int(self._epoch), *what))


class Seeded(Wrapper, Dataset[Any]):
    """A data set that seeds the process for each batch, by the epoch and the first index in it.

    The collate function goes on in the same stream: PyTorch's fetch calls it right afterwards.
    """

    def __init__(self, inner: Dataset[Any], seeds: EpochSeeds) -> None:
        super().__init__(inner)
        self._seeds = seeds

    def __getitem__(self, index: Any) -> Any:
        self._seeds.sow(index)
        return self.inner[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        self._seeds.sow(indices[0])
        return self.many(indices)


class SeededStream(Wrapper, IterableDataset[Any]):
    """A data set that is iterated, and seeds the process as each iteration begins, by the epoch and the worker."""

    def __init__(self, inner: IterableDataset[Any], seeds: EpochSeeds) -> None:
        super().__init__(inner)
        self._seeds = seeds

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        self._seeds.sow("stream", 0 if worker is None else worker.id)
        return iter(self.inner)


def seeded(dataset: Dataset[Any], seeds: EpochSeeds) -> Dataset[Any]:
    """Return the data set with its batches seeded."""
    return SeededStream(dataset, seeds) if isinstance(dataset, IterableDataset) else Seeded(dataset, seeds)


class EpochOrder(SampleOrder):
    """The order of an epoch's samples, from any place in it on: the same permutation, whether interrupted or not.

    Several ranks divide it, each with every ``ranks``-th sample.
    """

    def __init__(self, seed: int, *, rank: int, ranks: int) -> None:
        super().__init__(seed, rank=rank, ranks=ranks)
        self._epoch = self._skipped = 0

    def begin(self, epoch: int, skipped: int) -> None:
        """Say which epoch is iterated next, and how many of this rank's samples are left out at its beginning."""
        self._epoch, self._skipped = epoch, skipped

    def __len__(self) -> int:
        return super().__len__() - self._skipped

    def __iter__(self) -> Iterator[int]:
        own = self._permutation(self._epoch)[self.rank :: self.ranks][: super().__len__()]
        yield from own[self._skipped :]
