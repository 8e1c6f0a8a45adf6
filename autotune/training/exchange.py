"""What the ranks of one training do together: meet, divide samples, average gradients. Imports torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from autotune.base.ranks import RENDEZVOUS, own_rank
from autotune.base.records import Value
from autotune.knobs import Knob

_T = TypeVar("_T")

#: In a trial, waits between ranks are watched from outside, where the rank at fault is known.
_TIMEOUT = timedelta(days=1)


class RankSampler(DistributedSampler[Any]):
    """Divides a data set among the ranks, differently in each epoch if it is shuffled.

    Attributes:
        was_told: somebody else has set the epoch.
    """

    was_told = False

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.was_told = True

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        # At once, as an epoch may be abandoned.
        self.epoch += 1
        yield from order


def join(device: torch.device | str) -> None:
    """Meet the other ranks, if there are any and this has not been done. Return when all are there."""
    rank, kind = own_rank(), torch.device(device).type
    if rank.count < 2 or distributed.is_initialized():
        return
    if kind == "cuda":
        # Otherwise all ranks would begin on the first card.
        torch.cuda.set_device(device)
    file = os.environ.get(RENDEZVOUS)
    distributed.init_process_group(
        # Numbers of batches are exchanged on the CPU.
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        init_method=None if file is None else f"file://{file}",
        rank=rank.number,
        world_size=rank.count,
        timeout=_TIMEOUT if file is not None else None,
    )


def exchanging(model: nn.Module, settings: Iterable[tuple[Knob, Value]], **further: Any) -> nn.Module:
    """Return the module to call in place of a model, so that the ranks' gradients are averaged in the backward pass.

    The model must be on its device, and have a parameter to train. With one rank, or if the user has wrapped or sharded
    it, the result is the model itself.

    Args:
        settings: knobs with their values.
        further: other arguments of ``DistributedDataParallel``.
    """
    if own_rank().count < 2 or isinstance(model, DistributedDataParallel) or is_shared(model):
        return model
    chosen = list(settings)
    # PyTorch's own defaults are not passed: some of these arguments are being deprecated.
    changed = [(knob, value) for knob, value in chosen if value != knob.default]
    options = {name: option for knob, value in changed for name, option in knob.exchange_options(value).items()}
    device = next(model.parameters()).device
    join(device)
    wrapped = DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, **{**further, **options}
    )
    for knob, value in chosen:
        knob.apply_exchange(wrapped, value)
    return wrapped


@contextlib.contextmanager
def without_exchange(model: nn.Module) -> Iterator[None]:
    """Keep a model that several ranks train from exchanging its gradients, as `DistributedDataParallel.no_sync` does,
    and ``set_requires_gradient_sync`` of a model that `fully_shard` has sharded."""
    switch = getattr(model, "set_requires_gradient_sync", None)
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif switch is not None:
        switch(False)
        try:
            yield
        finally:
            switch(True)
    else:
        yield


def load_whole(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load the weights of a whole model into one that may be sharded.

    Raises:
        RuntimeError: the weights are those of another model.
    """
    if not is_shared(model):
        model.load_state_dict(weights)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ``state_dict`` of a model and of its optimizer. All ranks call this; what is sharded is gathered in
    the first one, on the CPU, and the others get nothing."""
    if not is_shared(model):
        return model.state_dict(), optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Any], state: dict[str, Any]
) -> None:
    """Load what `whole_states` has returned in the first rank. All ranks call this, each with all of it."""
    if not is_shared(model):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)


def own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's buffers by name, such as the averages of batch normalization over what this rank has seen."""
    return {name: buffer for name, buffer in model.named_buffers() if not _is_sharded(buffer)}


@contextlib.contextmanager
def first_ranks_buffers(model: nn.Module) -> Iterator[None]:
    """Give a model the buffers of the first rank, and restore its own at the end. All ranks enter this context."""
    buffers = own_buffers(model)
    if own_rank().count < 2 or not buffers:
        yield
        return
    first = [{name: buffer.cpu() for name, buffer in buffers.items()}]
    distributed.broadcast_object_list(first, 0)
    kept = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        fill(buffers, first[0])
        yield
    finally:
        fill(buffers, kept)


def fill(buffers: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    """Copy values into the buffers of the same names."""
    with torch.no_grad():
        for name, value in values.items():
            buffers[name].copy_(value)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, which is all of it unless the model is sharded."""
    return tensor.to_local() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_shared(model: nn.Module) -> bool:
    """Return whether a model is sharded, by FSDP of either kind, and averages its gradients itself."""
    if own_rank().count < 2:
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return wrapped or any(_is_sharded(p) for p in model.parameters())


def same_in_all_ranks(model: nn.Module) -> bool:
    """Return whether a model's parameters are the same in all ranks, or parts of one that is sharded."""
    if own_rank().count < 2 or is_shared(model):
        return True
    every = from_all([float(p.detach().double().sum()) for p in model.parameters()])
    return all(other == every[0] for other in every)


def _is_sharded(tensor: torch.Tensor) -> bool:
    if own_rank().count < 2:
        return False
    # Takes half a second to import.
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def largest(*numbers: int) -> list[int]:
    """Return, for each argument, the largest of the numbers that the ranks call this with."""
    if own_rank().count < 2:
        return list(numbers)
    maxima = torch.tensor(numbers)
    distributed.all_reduce(maxima, distributed.ReduceOp.MAX)
    return [int(number) for number in maxima]


def from_all(thing: _T) -> list[_T]:
    """Return what each rank calls this with, by rank number. The objects are pickled."""
    if own_rank().count < 2:
        return [thing]
    things: list[Any] = [None] * own_rank().count
    distributed.all_gather_object(things, thing)
    return things


def wait_for_all() -> None:
    """Return when all ranks have called this."""
    largest(0)
