"""A configuration applied, and the step."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from autotune.agent.site.autotune_agent import in_place
from autotune.agent.site.autotune_agent.slots import collate_in_slots
from autotune.base.errors import AutotuneError, WorkloadError
from autotune.base.records import Config, Value
from autotune.knobs import KNOBS, Knob, StepPlan
from autotune.knobs.batch_memory import in_slots
from autotune.knobs.gradient_accumulation import parts_of
from autotune.knobs.num_workers import workers_of
from autotune.space import settings
from autotune.training.exchange import exchanging, join, without_exchange
from autotune.training.feed import Collate, SampleOrder, behind_store, length_of, no_batch, slow_down
from autotune.workload import contract
from autotune.workload.contract import Context, Workload, Wrapper

# Switches a running training between configurations: only what a running process can change.
#
# It owns no loop: whoever trains calls `Switch.to` between two steps. All configurations share the model's weights and
# the optimizer's state, so that they need little more memory than the largest of them alone.

#: The original state of the process, by knob.
Found = Sequence[tuple[Knob, object]]


def fixed(config: Config) -> dict[str, Value]:
    """Return the part of a configuration to which a running training cannot be switched: it is applied at the start."""
    return {name: value for name, value in config.items() if name not in KNOBS or not KNOBS[name].switchable}


def as_found() -> Found:
    """Return the state of the process before anything is switched, as the training's own code has left it."""
    return [(knob, knob.read_process()) for knob in KNOBS.values() if knob.switchable]


class Switch:
    """Switches a model and its optimizer between configurations.

    Call every method from the thread that trains. `restore` leaves the process as it was before the first `to`; the
    model and the optimizer stay as they are.

    Args:
        model: the model, on its device; its parameters are those that the optimizer updates.
        before: what `as_found` returned when only what is `fixed` had been applied to the process.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, before: Found) -> None:
        self.model = model
        self.optimizer = optimizer
        self._before = before

    def to(self, config: Config) -> None:
        """Switch to a configuration. Call this between steps only: there must be no gradients.

        Raises:
            AutotuneError: something is not as the configuration demands.
        """
        self.restore()
        switched = [(knob, value) for knob, value in settings(config) if knob.switchable]
        for knob, value in switched:
            knob.apply_process(value)
            knob.switch_model(self.model, self.optimizer, value)
        wrong = [knob.name for knob, value in switched if not knob.is_in_force(self.model, self.optimizer, value)]
        if wrong:
            raise AutotuneError(f"{', '.join(wrong)} could not be switched")

    def restore(self) -> None:
        """Undo what was applied to the process."""
        for knob, before in self._before:
            knob.restore_process(before)


# Batches of any nesting: moved to a device, and split into parts.


_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def move(batch: Any, device: torch.device, *, non_blocking: bool, channels_last: int) -> Any:
    """Move all tensors of a batch to the device. Tensors of floats or bytes with `channels_last` dimensions get their
    channels last: 4 for ``(N, C, H, W)``, 5 for ``(N, C, D, H, W)``, 0 for none.

    Descends into tuples (also named ones), lists, dicts and dataclasses. Objects with a method ``to`` move themselves.
    """
    if isinstance(batch, torch.Tensor):
        if in_place.is_image(batch, channels_last):
            return batch.to(device, non_blocking=non_blocking, memory_format=_LAYOUTS[channels_last])
        return batch.to(device, non_blocking=non_blocking)

    def again(part: Any) -> Any:
        return move(part, device, non_blocking=non_blocking, channels_last=channels_last)

    if hasattr(batch, "to"):  # a PackedSequence is a tuple too, but knows which of its parts to move
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: again(part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(again, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(again, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: again(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return batch


def split(batch: Any, samples: int, parts: int) -> list[Any]:
    """Split a batch into parts of equally many samples, in order.

    Tensors are split along their first dimension, which must be that of the samples, and so are lists with one item per
    sample; the structure of mappings, tuples, lists and dataclasses of these is kept. Numbers and text go into each
    part.

    Args:
        samples: the number in the batch. parts: the number of parts, which divides `samples`.

    Raises:
        WorkloadError: the batch holds something else, or nothing with one item per sample.
    """
    size = samples // parts
    bounds = [slice(first, first + size) for first in range(0, samples, size)]

    def is_structure(part: Any) -> bool:
        """Whether a sequence with as many items as samples is still a whole batch, because it holds batches."""
        many = (p for p in part if isinstance(p, torch.Tensor | tuple | list))
        return any(p.shape[:1] == (samples,) if isinstance(p, torch.Tensor) else len(p) == samples for p in many)

    def pieces(part: Any, *, whole: bool = False) -> list[Any] | None:
        """Return the pieces of a part; ``None`` for what goes whole into each."""
        if part is None or isinstance(part, str | bytes | bool | int | float):
            return None
        if isinstance(part, torch.Tensor) and part.dim() == 0:
            return None
        if isinstance(part, torch.Tensor) and len(part) == samples:
            return [part[bound] for bound in bounds]
        if isinstance(part, Mapping):
            kind = type(part) if isinstance(part, UserDict) else dict
            return joined(part.values(), lambda values: kind(dict(zip(part, values, strict=True))))
        if isinstance(part, tuple | list):
            if len(part) == samples and not (whole and is_structure(part)):
                return [part[bound] for bound in bounds]
            is_named = isinstance(part, tuple) and hasattr(part, "_fields")
            return joined(part, lambda values: type(part)(*values) if is_named else type(part)(values))
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            names = [f.name for f in dataclasses.fields(part)]
            fields = [getattr(part, name) for name in names]
            return joined(fields, lambda values: dataclasses.replace(part, **dict(zip(names, values, strict=True))))
        shape = f" of shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else ""
        raise WorkloadError(
            f"a batch of {samples} samples cannot be split: it holds a {type(part).__name__}{shape}",
            advice="parts need tensors and lists with one item per sample, and whole batches (drop_last=True).",
        )

    def joined(inside: Iterable[Any], make: Callable[[list[Any]], Any]) -> list[Any] | None:
        values = list(inside)
        split_values = [pieces(part) for part in values]
        if all(part is None for part in split_values):
            return None
        rows = [split_values[i] or [values[i]] * parts for i in range(len(values))]
        return [make([row[number] for row in rows]) for number in range(parts)]

    split_batch = pieces(batch, whole=True)
    if split_batch is None:
        raise WorkloadError(
            f"a batch of {samples} samples cannot be split: nothing in it has one item per sample",
            advice="one part leaves it whole.",
        )
    return split_batch


# Applies every knob. Trials and the user's own training both use this module; no other code applies a knob, except
# `autotune.training.process_settings`, which acts on the whole process and runs first.
#
# `open_loader`, `apply_model`, `apply_optimizer` and `Step` act on one object each; `build` combines them for a
# workload.

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
    # Nobody would intend PyTorch's own default, batches of one sample.
    options: dict[str, Any] = {"batch_size": int(config["batch_size"])}
    for knob, value in settings(config):
        options |= knob.loader_options(value)
    if workers_of(config):
        options["multiprocessing_context"] = worker_start_method
    if in_slots(config):
        options["collate_fn"] = collate_in_slots
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
        order: the order of the samples; ``None`` shuffles them anew for every epoch. An iterable data set has its own.
        seed: for the workers' random numbers, and for shuffling; ``ctx.seed`` if ``None``.
        wrap: wraps the data set and collate function, to time them.

    Returns:
        A ``DataLoader``, or what the workload's own ``loader`` makes.

    Raises:
        WorkloadError: the data set does not fill one batch, or ``loader`` returned something that is not iterable.
    """
    dataset, collate = data or data_of(workload, ctx)
    by_knobs = loader_options(config, worker_start_method=worker_start_method)
    # Also inside of what times it.
    collate = by_knobs.pop("collate_fn", collate)
    if wrap is not None:
        dataset, collate = wrap(dataset, collate)
    generator = torch.Generator().manual_seed(ctx.seed if seed is None else seed)
    options: dict[str, Any] = {
        "dataset": dataset,
        "collate_fn": collate,
        "drop_last": True,
        "generator": generator,
        **by_knobs,
    }
    if not isinstance(dataset, IterableDataset):
        # The same options for a trial and for a training. ``shuffle=True`` would make this sampler, too.
        sampler = RandomSampler(dataset, generator=generator)  # type: ignore[arg-type]
        options["sampler"] = sampler if order is None else order.over(len(dataset))  # type: ignore[arg-type]
    make_loader = contract.optional(workload, "loader")
    loader: Iterable[Any] = DataLoader(**options) if make_loader is None else make_loader(ctx, options)
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
    collate = collate_of(workload, ctx)
    if isinstance(dataset, IterableDataset):
        return behind_store(dataset, ctx.data), collate
    size = len(dataset)  # type: ignore[arg-type]
    if size == 0:
        raise WorkloadError("the data set is empty", advice="look at what dataset(ctx) returns for this --data.")
    dataset = behind_store(dataset, ctx.data)
    if ctx.data.epoch_samples is not None and size < ctx.data.epoch_samples:
        dataset = Repeated(dataset, ctx.data.epoch_samples)
    return dataset, collate


def collate_of(workload: Workload, ctx: Context) -> Collate:
    """Return the function that makes batches of a workload's samples: its own, or PyTorch's."""
    make = contract.optional(workload, "collate")
    collate: Collate = make(ctx) if make else torch.utils.data.default_collate
    return collate


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

    If the model replays CUDA graphs, the gradients are gone when it returns. It does not call
    `torch.compiler.cudagraph_mark_step_begin`: once that is used, torch no longer takes each call of the model as a new
    iteration, and an evaluation, which does not call it, would record one more graph for every batch.

    With several ranks, the gradients of all are averaged. ``loss`` is then called with the wrapped model
    (`autotune.training.exchange.exchanging`), and everything else with the model itself.

    Args:
        loss: ``loss(model, batch) -> Tensor`` of shape ``()``, run under autocast if the precision requires it.
        after_backward: called with the model when gradients are complete and unscaled.
        after_step: called with the model after the update of the weights.
        ddp: further arguments of ``DistributedDataParallel``, for several ranks; ``None`` if the model exchanges its
            gradients itself.

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
        #: Whether gradients have been exchanged: a static graph must be exchanged as a whole once.
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
        # Gradients lie in the memory of the graphs, and an evaluation may record or replay graphs next.
        self.optimizer.zero_grad(set_to_none=True)
        # The next replay of a CUDA graph overwrites its output, but callers keep losses for longer.
        return loss.detach().clone()

    def _backward(self, batch: Any, share: int = 1, *, last: bool = True) -> torch.Tensor:
        """Add the gradients of the loss, divided by `share`, to the existing ones; return the loss, so divided.

        Ranks exchange their gradients with the `last` part of a batch.
        """
        is_local = self._has_exchanged and not (last and self.exchanges)
        with self._without_exchange() if is_local else nullcontext():
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
    module = workload.model(ctx)
    if not isinstance(module, nn.Module):
        raise WorkloadError(f"model(ctx) must return a torch.nn.Module, not {type(module).__name__}")
    model = apply_model(module.train(), config, ctx.device)
    parallel = contract.optional(workload, "parallel") if ctx.ranks > 1 else None
    if parallel is not None:
        join(ctx.device)
        model = parallel(ctx, model)
    optimizer = workload.optimizer(ctx, model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(f"optimizer(ctx, model) must return an optimizer, not {type(optimizer).__name__}")
    return step_of(workload, ctx, model, apply_optimizer(optimizer, config), config)


def at_once(ctx: Context, config: Config) -> Context:
    """Return the context for what goes through the model at once: a batch, or one of its parts."""
    return dataclasses.replace(ctx, batch_size=ctx.batch_size // parts_of(config))


def step_of(
    workload: Workload, ctx: Context, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config
) -> Step:
    """Return the workload's training step for a model and an optimizer to which the configuration is applied."""
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
    """Return the workload's own knobs without prefix, with a configuration's values, or else the first declared."""
    prefix = "workload."
    declared = {name: values[0] for name, values in getattr(workload, "KNOBS", {}).items()}
    return declared | {name.removeprefix(prefix): v for name, v in config.items() if name.startswith(prefix)}
