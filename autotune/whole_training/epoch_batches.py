"""The batches of a whole training, epoch by epoch, from any step on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from autotune import workload as contract
from autotune.feed import length_of, workers_and_queue
from autotune.knobs.num_workers import workers_of
from autotune.stopwatch import Collate
from autotune.whole_training.randomness import EpochOrder, EpochSeeds, drawing_beside, seed_of, seeded, sow
from autotune.workload_training import WorkloadTraining

_NO_BATCH = object()


class EpochBatches:
    """The batches of a training, epoch by epoch, from any step on."""

    def __init__(self, parts: WorkloadTraining, data: tuple[Any, Collate]) -> None:
        dataset, collate = data
        self._seed = parts.ctx.seed
        self._size = int(parts.config["batch_size"])
        self._order = EpochOrder(self._seed)
        self._seeds = EpochSeeds(self._seed, shared=workers_of(parts.config) > 0)
        own = contract.optional(parts.workload, "loader") is not None
        self._loader: Iterable[Any] = parts.open_loader(data=(seeded(dataset, self._seeds), collate), order=self._order)
        #: Steps of an epoch; ``None`` if the loader does not know its length.
        self.epoch_steps = length_of(self._loader)
        #: PyTorch's loader reads samples in our order, which can begin anywhere. Others are read from the beginning.
        self._can_skip = not own and not isinstance(dataset, IterableDataset)
        # Workers draw in their own processes.
        self._draws_here = own or not workers_and_queue(self._loader)[0]

    def begin(self, epoch: int, steps: int) -> Iterator[Any]:
        """Return the batches of an epoch, without the first ``steps``; its workers start now."""
        seed = seed_of(self._seed, epoch)
        self._seeds.begin(epoch)
        self._order.begin(epoch, steps * self._size if self._can_skip else 0)
        generator = getattr(self._loader, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        with drawing_beside(seed, torch.device("cpu")):
            batches = self._sown(iter(self._loader), epoch, steps if self._can_skip else 0)
            for _ in range(0 if self._can_skip else steps):
                next(batches, None)
        return batches

    def _sown(self, batches: Iterator[Any], epoch: int, steps: int) -> Iterator[Any]:
        """Where batches are made in this process, let both batch and step draw from a seed of their own.

        Saving and restoring the generators' states instead would take longer than many a step.
        """
        for step in itertools.count(steps):
            if self._draws_here:
                sow(seed_of(self._seed, epoch, "batch", step))
            batch = next(batches, _NO_BATCH)
            if batch is _NO_BATCH:
                return
            if self._draws_here:
                sow(seed_of(self._seed, epoch, "step", step))
            yield batch
