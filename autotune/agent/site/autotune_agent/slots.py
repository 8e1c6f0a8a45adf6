"""Batches from workers through memory that is used again, instead of new shared memory for each.

PyTorch's worker stacks a batch into a new file of /dev/shm, of which it touches every page for the first time; the
training's process maps the file, touches the pages again, and gives them back. For large batches that is most of the
work on both sides. Here, each worker has slots, each as large as its first batch, in anonymous shared memory
(memfd_create(2)), which /dev/shm does not limit. A batch is stacked into a free slot, and only the places of its
tensors are sent. Unpickled, they are tensors in that slot. When the last of these is gone, through whatever view
somebody kept it, the slot is free again: a byte at its beginning says so to the worker.

A worker makes as many slots as are in use at once, up to a limit. Whatever does not fit (a larger batch, no free slot,
a tensor that is not plain) takes PyTorch's way. Samples, their order and their types are the same in either.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import pickle
import weakref
from collections.abc import Mapping
from functools import partial
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map

#: Bytes to which tensors are aligned, as by PyTorch's allocator.
_ALIGN = 64
#: Of a slot, before its batch: the byte that says whether it is in use.
_HEAD = mmap.PAGESIZE
_FREE, _USED = 0, 1
#: Slots of a worker: more are in use at once only where a training keeps batches, and each is an open file.
_MOST = 16


def why_not(collate_fn: Any) -> str | None:
    """Return why the batches that a collate function makes cannot take this way, as a clause; ``None`` if they can."""
    if not hasattr(os, "memfd_create"):
        return "there is no anonymous shared memory here"
    if collate_fn is not default_collate:
        return "batches are made by a function of its own"
    return None


def collate_in_slots(samples: list[Any]) -> Any:
    """Do what PyTorch's ``default_collate`` does; tensors lie in slots if a worker calls this."""
    if get_worker_info() is None:
        return default_collate(samples)
    if _worker.size is None:
        batch = default_collate(samples)
        _worker.size = _bytes_of(batch) if _can_be_sent() else 0
        return batch
    slot = _worker.take() if _worker.size else None
    if slot is None:
        return default_collate(samples)
    filling = _Filling(slot)
    try:
        return collate(samples, collate_fn_map=filling.functions)
    except Exception:
        # A mapping or sequence of the user's own may look at its values. Or the samples cannot be stacked at all, which
        # PyTorch then says itself.
        _worker.size, filling.is_used = 0, False
        return default_collate(samples)
    finally:
        if not filling.is_used:
            slot.memory[0] = _FREE


class _Worker:
    """The slots of a worker, which makes batches for one loader.

    Attributes:
        size: bytes of a slot, once the first batch is made; 0 for batches that cannot lie in one.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self._slots: list[_Slot] = []

    def take(self) -> _Slot | None:
        """Return a slot that was free, and is in use now; ``None`` if there is none."""
        slot = next((slot for slot in self._slots if slot.memory[0] == _FREE), None)
        if slot is None and len(self._slots) < _MOST:
            try:
                slot = _Slot(self.size or 0)
            except (OSError, ValueError):
                return None
            self._slots.append(slot)
        if slot is not None:
            slot.memory[0] = _USED
        return slot


_worker = _Worker()


class _Slot:
    """Memory for a batch in the worker that makes it; lent memory where it is unpickled (`_lend`)."""

    _numbers = itertools.count()

    def __init__(self, size: int) -> None:
        self.name = f"{os.getpid()}-{next(self._numbers)}"
        self.size = size
        descriptor = os.memfd_create(f"autotune-{self.name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, _HEAD + size)
            #: The whole, which has a descriptor of its own.
            self.memory = mmap.mmap(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        #: To be sent with the slot's first batch.
        self._descriptor: int | None = descriptor

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _tensor(memoryview(self.memory)[_HEAD:], offset, shape, dtype)

    def __reduce__(self) -> Any:
        # A worker's queue pickles in the order in which it sends.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return _lend, (self.name, None)
        try:
            return _lend, (self.name, DupFd(descriptor))
        finally:
            os.close(descriptor)


class _Place:
    """A tensor of a batch in the worker; a tensor in its slot where it is unpickled."""

    def __init__(self, slot: _Slot, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._at = slot, offset, shape, dtype

    def __reduce__(self) -> Any:
        return _tensor, self._at


class _Filling:
    """A batch that is stacked into a slot.

    Attributes:
        is_used: whether anything lies in the slot. functions: for PyTorch's ``collate``, by the type of samples.
    """

    def __init__(self, slot: _Slot) -> None:
        self._slot = slot
        self._offset = 0
        self.is_used = False
        self.functions: dict[Any, Any] = {kind: partial(self._made, by) for kind, by in default_collate_fn_map.items()}
        self.functions[torch.Tensor] = self._stacked

    def _stacked(self, samples: Any, *, collate_fn_map: Any = None) -> Any:
        first = samples[0]
        place = self._place((len(samples), *first.shape), first.dtype) if _is_plain(first) else None
        if place is None:
            return default_collate_fn_map[torch.Tensor](samples, collate_fn_map=default_collate_fn_map)
        torch.stack(samples, 0, out=self._slot.tensor(*place))
        return _Place(self._slot, *place)

    def _made(self, by: Any, samples: Any, *, collate_fn_map: Any = None) -> Any:
        """Let PyTorch make something else of samples, such as a tensor of numbers."""
        made = by(samples, collate_fn_map=collate_fn_map)
        place = self._place(tuple(made.shape), made.dtype) if _is_plain(made) else None
        if place is None:
            return made
        self._slot.tensor(*place).copy_(made)
        return _Place(self._slot, *place)

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, tuple[int, ...], torch.dtype] | None:
        """Return where in the slot a tensor is to lie; ``None`` if there is no room."""
        size, offset = math.prod(shape) * dtype.itemsize, self._offset
        if not size or offset + size > self._slot.size:
            return None
        self._offset += _aligned(size)
        self.is_used = True
        return offset, shape, dtype


def _is_plain(held: Any) -> bool:
    return (
        type(held) is torch.Tensor
        and held.layout is torch.strided
        and held.device.type == "cpu"
        and not held.is_quantized
        and not held.requires_grad
    )


def _can_be_sent() -> bool:
    """Return whether the training's process finds the functions below: not if this is in no module that is imported."""
    try:
        pickle.dumps((_lend, _tensor))
    except (pickle.PicklingError, ImportError, AttributeError):
        return False
    return True


def _aligned(size: int) -> int:
    return size + -size % _ALIGN


def _bytes_of(batch: Any) -> int:
    """Return the bytes that a slot for such a batch needs."""
    if _is_plain(batch):
        return _aligned(batch.numel() * batch.element_size())
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return sum(map(_bytes_of, parts))


# In the training's process.

#: The slots of workers, by name.
_lent_by: dict[str, mmap.mmap] = {}
#: What tells that the last tensor in a slot is gone, by name.
_lent: dict[str, weakref.ref[Any]] = {}


def _lend(name: str, sent: Any) -> memoryview:
    """Return the memory of a slot, which is free again when nobody holds it."""
    if sent is not None:
        _forget_the_dead()
        descriptor = sent.detach()
        try:
            _lent_by[name] = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
    slot = _lent_by[name]
    memory, process = memoryview(slot)[_HEAD:], os.getpid()

    def give_back(_: Any) -> None:
        # What a process that was forked from this one drops, this one may still hold.
        if os.getpid() == process:
            slot[0] = _FREE

    # A slot is not lent again before this one is gone.
    _lent[name] = weakref.ref(memory, give_back)
    return memory


def _forget_the_dead() -> None:
    """Forget the slots of workers that have ended. What is still lent of them stays as it is."""
    for name in [name for name in _lent_by if not os.path.exists(f"/proc/{name.split('-')[0]}")]:
        del _lent_by[name]


def _tensor(memory: Any, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
