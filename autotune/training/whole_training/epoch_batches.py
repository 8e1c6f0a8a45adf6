"""The batches of a whole training, epoch by epoch, from any step on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from autotune.workload import contract
from autotune.base.errors import WorkloadError
from autotune.training.exchange import from_all, largest
from autotune.training.feed import length_of, workers_and_queue
from autotune.knobs.num_workers import workers_of
from autotune.training.stopwatch import Collate
from autotune.training.whole_training.randomness import (
    EpochOrder,
    EpochSeeds,
    drawing_beside,
    seed_of,
    seed_of_rank,
    seeded,
    sow,
)
from autotune.training.workload_training import WorkloadTraining

_NO_BATCH = object()


class EpochBatches:
    """The batches of a training, epoch by epoch, from any step on.

    Attributes:
        epoch_steps: steps of an epoch; ``None`` if the loader does not know its length.
    """

    def __init__(self, parts: WorkloadTraining, data: tuple[Any, Collate]) -> None:
        dataset, collate = data
        ctx = parts.ctx
        self._seed = seed_of_rank(ctx.seed, ctx.rank)
        self._ranks = ctx.ranks
        self._size = int(parts.config["batch_size"])
        self._order = EpochOrder(ctx.seed, rank=ctx.rank, ranks=ctx.ranks)
        self._seeds = EpochSeeds(self._seed, shared=workers_of(parts.config) > 0)
        own = contract.optional(parts.workload, "loader") is not None
        self._loader: Iterable[Any] = parts.open_loader(data=(seeded(dataset, self._seeds), collate), order=self._order)
        self.epoch_steps = length_of(self._loader)
        #: PyTorch's loader reads samples in our order, which can begin anywhere. Others are read from the beginning.
        self._can_skip = not own and not isinstance(dataset, IterableDataset)
        # Workers draw in their own processes.
        self._draws_here = own or not workers_and_queue(self._loader)[0]

    def meet(self) -> None:
        """Let the shortest of the ranks' epochs be that of all. Call it when they have met, before the first batch."""
        lengths = from_all(self.epoch_steps)
        known = [length for length in lengths if length is not None]
        self.epoch_steps = min(known) if len(known) == len(lengths) else None

    def begin(self, epoch: int, steps: int) -> Iterator[Any]:
        """Return the batches of an epoch, without the first ``steps``; its workers start now.

        Several ranks get the same number of them.
        """
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
        return batches if self._ranks == 1 else self._together(batches, steps)

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

    def _together(self, batches: Iterator[Any], steps: int) -> Iterator[Any]:
        """End when the epoch of the first rank ends, or the others would wait for it for ever."""
        for step in itertools.count(steps):
            if step == self.epoch_steps:
                return
            batch = next(batches, _NO_BATCH)
            over = batch is _NO_BATCH
            if self.epoch_steps is None:
                # Only streams of unknown length cost a question at each step.
                over = bool(largest(int(over))[0])
            elif over:
                raise WorkloadError(
                    f"the loader has told {self.epoch_steps} batches, and an epoch of it had {step}",
                    advice="with several ranks, let its length be that of an epoch, or leave it unknown.",
                )
            if over:
                return
            yield batch
