"""Applies every knob. Trials and the user's own training both use this module; no other code applies a knob, except for
`autotune.training.process_settings`, which acts on the whole process and runs first.

`open_loader`, `apply_model`, `apply_optimizer` and `Step` act on one object each; `build` combines them for a workload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from autotune.workload import contract
from autotune.training.batches import move, split
from autotune.base.errors import WorkloadError
from autotune.training.exchange import exchanging, join, without_exchange
from autotune.training.feed import length_of, no_batch
from autotune.knobs import StepPlan
from autotune.knobs.gradient_accumulation import parts_of
from autotune.knobs.num_workers import workers_of
from autotune.base.records import Config
from autotune.training.sample_order import SampleOrder
from autotune.training.slow_store import behind_store, slow_down
from autotune.space import settings
from autotune.training.stopwatch import Collate
from autotune.workload.contract import Context, Workload
from autotune.workload.wrapping import Wrapper

#: Wraps a data set and its collate function.
Wrap = Callable[[Dataset[Any], Collate], tuple[Dataset[Any], Collate]]


class Repeated(Wrapper, Dataset[Any]):
    """A data set repeated up to a given epoch length.

    A generated set of 1,024 files stands in for ImageNet's 1.28 million: it fills batches of any size, and epochs end
    as rarely as in the real training.
    """

    def __init__(self, inner: Dataset[Any], length: int) -> None:
        super().__init__(inner)
        self.length = length
        self._size = len(inner)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.inner[index % self._size]


def loader_options(config: Config, *, worker_start_method: str) -> dict[str, Any]:
    """Return the configuration's keyword arguments for ``torch.utils.data.DataLoader``."""
    # PyTorch's own default, batches of one sample, would be nobody's intention.
    options: dict[str, Any] = {"batch_size": int(config["batch_size"])}
    for knob, value in settings(config):
        options |= knob.loader_options(value)
    if workers_of(config):
        options["multiprocessing_context"] = worker_start_method
    return options


def open_loader(
    workload: Workload,
    ctx: Context,
    config: Config,
    *,
    worker_start_method: str,
    data: tuple[Dataset[Any], Collate] | None = None,
    order: SampleOrder | None = None,
    seed: int | None = None,
    wrap: Wrap | None = None,
) -> Iterable[Any]:
    """Open the workload's loader under a configuration. Its workers start at the first ``iter``.

    Incomplete last batches are dropped, because their shape would cause a recompilation.

    Args:
        data: what `data_of` returns, if it has been called already.
        order: of the samples; ``None`` shuffles them anew for every epoch. A data set that is iterated has its own.
        seed: of the workers' random numbers, and of shuffling; ``ctx.seed`` if ``None``.
        wrap: wraps data set and collate function, to time them.

    Returns:
        A ``DataLoader``, or what the workload's own ``loader`` makes.

    Raises:
        WorkloadError: the data set does not fill one batch, or ``loader`` returned what cannot be iterated.
    """
    dataset, collate = data or data_of(workload, ctx)
    if wrap is not None:
        dataset, collate = wrap(dataset, collate)
    generator = torch.Generator().manual_seed(ctx.seed if seed is None else seed)
    options: dict[str, Any] = {
        "dataset": dataset,
        "collate_fn": collate,
        "drop_last": True,
        "generator": generator,
        **loader_options(config, worker_start_method=worker_start_method),
    }
    if not isinstance(dataset, IterableDataset):
        # The same options for a trial and for a training. This is what ``shuffle=True`` makes, too.
        shuffled = RandomSampler(dataset, generator=generator)  # type: ignore[arg-type]
        options["sampler"] = shuffled if order is None else order.over(len(dataset))  # type: ignore[arg-type]
    own = contract.optional(workload, "loader")
    loader: Iterable[Any] = DataLoader(**options) if own is None else own(ctx, options)
    if not isinstance(loader, Iterable):
        raise WorkloadError(f"loader(ctx, options) must return batches to iterate over, not {type(loader).__name__}")
    if length_of(loader) == 0:
        raise WorkloadError(f"the data set does not fill one batch of {config['batch_size']}")
    return loader


def data_of(workload: Workload, ctx: Context) -> tuple[Dataset[Any], Collate]:
    """Return the workload's data set, behind its store and repeated as ``ctx.data`` says, and its collate function.

    Raises:
        WorkloadError: the data set is empty.
    """
    if ctx.data.store is not None and ctx.data.path is not None:
        slow_down(ctx.data.path, ctx.data.store)
    dataset = workload.dataset(ctx)
    make_collate = contract.optional(workload, "collate")
    collate: Collate = make_collate(ctx) if make_collate else torch.utils.data.default_collate
    if isinstance(dataset, IterableDataset):
        return behind_store(dataset, ctx.data), collate
    size = len(dataset)  # type: ignore[arg-type]
    if size == 0:
        raise WorkloadError("the data set is empty", advice="look at what dataset(ctx) returns for this --data.")
    dataset = behind_store(dataset, ctx.data)
    if ctx.data.epoch_samples is not None and size < ctx.data.epoch_samples:
        dataset = Repeated(dataset, ctx.data.epoch_samples)
    return dataset, collate


def first_batch(loader: Iterable[Any]) -> Any:
    """Return the first batch of an epoch.

    Raises:
        WorkloadError: there is none.
    """
    for batch in loader:
        return batch
    raise no_batch()


def apply_model(model: nn.Module, config: Config, device: torch.device | str) -> nn.Module:
    """Move a model to the device, set its memory layout, and finally compile it in place, so that its ``state_dict``
    keeps its keys."""
    model = model.to(device)
    for knob, value in settings(config):
        model = knob.apply_model(model, value)
    for knob, value in settings(config):
        knob.compile_model(model, value)
    return model


def apply_optimizer(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.Optimizer:
    """Set the optimizer's implementation, before its first step."""
    for knob, value in settings(config):
        knob.apply_optimizer(optimizer, value)
    return optimizer


def step_plan(config: Config) -> StepPlan:
    """Return what a training step does besides forward, backward and update."""
    plan = StepPlan()
    for knob, value in settings(config):
        knob.apply_step(plan, value)
    return plan


class Step:
    """One training step under a configuration: move the batch, forward, backward, update.

    Called with a batch from the loader, it returns the loss, shape ``()``, detached and still on the device, because
    reading it would synchronize.

    Where the model replays CUDA graphs, the gradients are gone when it returns. It does not call
    `torch.compiler.cudagraph_mark_step_begin`: once that is used, torch no longer takes each call of the model as a new
    iteration, and an evaluation, which does not call it, would record one more graph for every batch.

    With several ranks, the gradients of all are averaged. ``loss`` is then called with the model wrapped
    (`autotune.base.ranks.exchanging`), and everything else with the model itself.

    Args:
        loss: ``loss(model, batch) -> Tensor`` of shape ``()``, run under autocast if the precision requires it.
        after_backward: called with the model when gradients are complete and unscaled.
        after_step: called with the model after the update of the weights.
        ddp: further arguments of ``DistributedDataParallel``, where there are several ranks; ``None`` if the model
            exchanges its gradients itself.

    Attributes:
        exchanges: whether ranks exchange gradients; False computes as if there was nothing to wait for, and wrongly.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[nn.Module, Any], torch.Tensor],
        config: Config,
        device: torch.device | str,
        *,
        after_backward: Callable[[nn.Module], None] | None = None,
        after_step: Callable[[nn.Module], None] | None = None,
        ddp: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> None:
        self._called = model if ddp is None else exchanging(model, settings(config), **ddp)
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.exchanges = True
        #: A static graph must have been exchanged once as a whole.
        self._has_exchanged = False
        self.optimizer = optimizer
        self.device = torch.device(device)
        self._loss = loss
        self._after_backward = after_backward
        self._after_step = after_step
        self._plan = step_plan(config)
        self._samples = int(config["batch_size"]) if "batch_size" in config else 0
        self.scaler = torch.amp.GradScaler(self.device.type) if self._plan.scale_loss else None

    def __repr__(self) -> str:
        return f"<Step of {type(self.model).__name__} with {type(self.optimizer).__name__} on {self.device}>"

    def __call__(self, batch: Any) -> torch.Tensor:
        plan = self._plan
        batch = move(batch, self.device, non_blocking=plan.non_blocking, channels_last=plan.channels_last)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(batch) if plan.parts == 1 else self._backward_in_parts(batch)
        self._has_exchanged = True
        if self.scaler is None:
            if self._after_backward is not None:
                self._after_backward(self.model)
            self.optimizer.step()
        else:
            if self._after_backward is not None:
                self.scaler.unscale_(self.optimizer)
                self._after_backward(self.model)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self._after_step is not None:
            self._after_step(self.model)
        if not plan.cudagraphs or plan.parts > 1:
            return loss.detach()
        # Gradients lie in the memory of the graphs, which an evaluation may record or replay next.
        self.optimizer.zero_grad(set_to_none=True)
        # The next replay of a CUDA graph overwrites its output, but callers keep losses for longer.
        return loss.detach().clone()

    def _backward(self, batch: Any, share: int = 1, *, last: bool = True) -> torch.Tensor:
        """Add the gradients of the loss, divided by `share`, to those that there are; return what was added up.

        Ranks exchange their gradients with the `last` part of a batch.
        """
        quiet = self._has_exchanged and not (last and self.exchanges)
        with self._without_exchange() if quiet else nullcontext():
            with autocast(self.device, self._plan):
                loss = self._loss(self._called, batch)
            if share > 1:
                loss = loss / share
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def _without_exchange(self) -> AbstractContextManager[Any]:
        return without_exchange(self._called)

    def _backward_in_parts(self, batch: Any) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(split(batch, self._samples, self._plan.parts)):
            last = number == self._plan.parts - 1
            total += self._backward(part, self._plan.parts, last=last).detach()
            if self._plan.cudagraphs and number == 0:
                # The next replay of the graph would overwrite the gradients of the first one.
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.clone()
        return total


def autocast(device: torch.device, plan: StepPlan) -> AbstractContextManager[Any]:
    """Return the context in which forward and loss run."""
    return nullcontext() if plan.autocast is None else torch.autocast(device.type, dtype=plan.autocast)


def build(workload: Workload, ctx: Context, config: Config) -> Step:
    """Build the workload's model and optimizer on ``ctx.device`` under a configuration, as a `Step`.

    Raises:
        WorkloadError: ``model`` or ``optimizer`` returned an object of the wrong type.
    """
    torch.manual_seed(ctx.seed)
    made = workload.model(ctx)
    if not isinstance(made, nn.Module):
        raise WorkloadError(f"model(ctx) must return a torch.nn.Module, not {type(made).__name__}")
    model = apply_model(made.train(), config, ctx.device)
    share = contract.optional(workload, "parallel") if ctx.ranks > 1 else None
    if share is not None:
        join(ctx.device)
        model = share(ctx, model)
    visiting = workload.optimizer(ctx, model)
    if not isinstance(visiting, torch.optim.Optimizer):
        raise WorkloadError(f"optimizer(ctx, model) must return an optimizer, not {type(visiting).__name__}")
    return step_of(workload, ctx, model, apply_optimizer(visiting, config), config)


def at_once(ctx: Context, config: Config) -> Context:
    """Return the context of what goes through the model at once: of a batch, or of one of its parts."""
    return dataclasses.replace(ctx, batch_size=ctx.batch_size // parts_of(config))


def step_of(
    workload: Workload, ctx: Context, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config
) -> Step:
    """Return the workload's training step for a model and an optimizer that are as the configuration demands."""
    after_backward = contract.optional(workload, "after_backward")
    after_step = contract.optional(workload, "after_step")
    of_part = at_once(ctx, config)
    return Step(
        model,
        optimizer,
        lambda m, batch: workload.loss(of_part, m, batch),
        config,
        ctx.device,
        after_backward=(lambda m: after_backward(ctx, m)) if after_backward else None,
        after_step=(lambda m: after_step(ctx, m)) if after_step else None,
        ddp=getattr(workload, "DDP", {}) if contract.optional(workload, "parallel") is None else None,
    )


def samples_in(workload: Workload, ctx: Context, batch: Any) -> int:
    """Return the number of samples in a batch."""
    count = contract.optional(workload, "samples")
    return int(count(ctx, batch)) if count else ctx.batch_size


def workload_knobs(workload: Workload, config: Config) -> dict[str, Any]:
    """Return the workload's own knobs without prefix: a configuration's values, or else the first declared."""
    prefix = "workload."
    declared = {name: values[0] for name, values in getattr(workload, "KNOBS", {}).items()}
    return declared | {name.removeprefix(prefix): v for name, v in config.items() if name.startswith(prefix)}
