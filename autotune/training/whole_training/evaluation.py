"""The evaluation after an epoch: `evaluate` over the workload's `validation` set, and its `metric`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autotune.base.errors import WorkloadError
from autotune.knobs.persistent_workers import KNOB as PERSISTENT
from autotune.training import step as training
from autotune.training.exchange import first_ranks_buffers, from_all, is_shared, largest
from autotune.training.step import Step, move
from autotune.training.whole_training.checkpoints import drawing_beside, finite, seed_of, seed_of_rank
from autotune.training.workload_training import WorkloadTraining
from autotune.workload import contract

#: The name of what `evaluate` returns, if that is a number.
ONLY = "validation"


class Evaluation:
    """Evaluates a model as the workload says. Gradients, modes and random numbers of the training stay as they are.

    It runs under ``torch.inference_mode``, or where the model replays CUDA graphs under ``torch.no_grad``: under any
    other mode than that of the graphs, they would be recorded once more.

    Several ranks divide a set that has a length, with the weights and buffers of the first one. All of them call
    `metric`, and the first one's counts.
    """

    def __init__(self, parts: WorkloadTraining, step: Step) -> None:
        self._parts = parts
        self._step = step
        self._plan = training.step_plan(parts.config)
        self._ctx = training.at_once(parts.ctx, parts.config)
        make = contract.optional(parts.workload, "validation")
        self._dataset: Dataset[Any] | None = make(parts.ctx) if make else None
        self._metric = contract.optional(parts.workload, "metric")
        self._is_shared = is_shared(step.model)

    @property
    def what(self) -> str | None:
        """What is evaluated, in words; ``None`` for nothing."""
        names = [name for name, there in (("validation", self._dataset), ("metric", self._metric)) if there is not None]
        return " and ".join(names) or None

    def run(self, epoch: int, between: Callable[[], None]) -> dict[str, float | None]:
        """Evaluate the model after an epoch; return its metrics by name, ``None`` for those that are not finite.

        Args:
            between: called after each batch. It may raise.

        Raises:
            WorkloadError: `validation` has no sample, or `evaluate` returned something other than numbers.
        """
        metrics: dict[str, float | None] = {}
        ctx, model = self._parts.ctx, self._step.model
        seed = seed_of(seed_of_rank(ctx.seed, ctx.rank), "evaluation", epoch)
        # What a sharded model gathers in inference mode, it cannot train with.
        without = torch.no_grad if self._plan.cudagraphs or self._is_shared else torch.inference_mode
        with first_ranks_buffers(model), _evaluating(model), drawing_beside(seed, self._step.device), without():
            if self._dataset is not None:
                metrics |= self._averages(self._dataset, between)
            if self._metric is not None:
                with training.autocast(self._step.device, self._plan):
                    metrics["metric"] = finite(float(self._metric(self._ctx, model)))
        return metrics

    def _averages(self, dataset: Dataset[Any], between: Callable[[], None]) -> dict[str, float | None]:
        sums: dict[str, Any] = {}
        samples = 0
        loader = self._loader(dataset)
        for batch, counts in _in_step(loader) if self._is_shared else ((batch, True) for batch in loader):
            size, found = self._samples_in(batch), self._of(batch)
            samples += size if counts else 0
            for name, value in found.items() if counts else ():
                # On the device, so that nothing waits for it.
                sums[name] = sums.get(name, 0.0) + torch.as_tensor(value).detach().double() * size
            between()
        of_ranks = from_all((samples, {name: float(total) for name, total in sums.items()}))
        samples = sum(size for size, _ in of_ranks)
        if not samples:
            raise WorkloadError("validation(ctx) has no sample", advice="look at what it reads.")
        names = dict.fromkeys(name for _, totals in of_ranks for name in totals)
        return {name: finite(sum(totals.get(name, 0.0) for _, totals in of_ranks) / samples) for name in names}

    def _of(self, batch: Any) -> Mapping[str, Any]:
        plan, workload = self._plan, self._parts.workload
        moved = move(batch, self._step.device, non_blocking=plan.non_blocking, channels_last=plan.channels_last)
        evaluate = contract.optional(workload, "evaluate") or workload.loss
        with training.autocast(self._step.device, plan):
            found = evaluate(self._ctx, self._step.model, moved)
        numbers = found if isinstance(found, Mapping) else {ONLY: found}
        for name, value in numbers.items():
            if not isinstance(value, int | float) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
                raise WorkloadError(
                    f"evaluate(ctx, model, batch) returned a {type(value).__name__} as {name!r}, which is no number",
                    advice="let it return a number, or a dict of numbers by name.",
                )
        return numbers

    def _loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        make = contract.optional(self._parts.workload, "collate")
        options = training.loader_options(self._parts.config, worker_start_method=self._parts.worker_start_method)
        options |= {"batch_size": self._ctx.batch_size, "collate_fn": make(self._parts.ctx) if make else None}
        # Workers that stay would hold memory throughout the next epoch.
        options.pop(PERSISTENT.name, None)
        if isinstance(dataset, IterableDataset):
            return DataLoader(dataset, **options)
        own = range(self._ctx.rank, len(dataset), self._ctx.ranks)  # type: ignore[arg-type]
        return DataLoader(dataset, sampler=own, **options)

    def _samples_in(self, batch: Any) -> int:
        count = contract.optional(self._parts.workload, "samples")
        return int(count(self._ctx, batch)) if count else _first_dimension(batch) or self._ctx.batch_size


def _in_step(loader: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield batches, and whether they count, as often in each rank: a sharded model computes in all of them at once.

    A rank that has no more repeats its last one, which does not count then.

    Raises:
        WorkloadError: it has had none.
    """
    batches, batch = iter(loader), None
    while True:
        new = next(batches, None)
        if not largest(int(new is not None))[0]:
            return
        batch = batch if new is None else new
        if batch is None:
            raise WorkloadError(
                "validation(ctx) has fewer samples than there are ranks", advice="a sharded model needs one for each."
            )
        yield batch, new is not None


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and afterwards the modes that the modules had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _first_dimension(batch: Any) -> int | None:
    """Return the length of the first tensor in a batch, or of a list of which each item is a sample's."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        inside = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    elif isinstance(batch, Mapping):
        inside = list(batch.values())
    elif isinstance(batch, tuple | list):
        inside = list(batch)
    else:
        return None
    return next((size for part in inside if (size := _first_dimension(part)) is not None), None)
