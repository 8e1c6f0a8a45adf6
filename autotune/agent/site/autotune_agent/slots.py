"""Batches from workers through memory that is used again, instead of new shared memory for each.

PyTorch's worker stacks a batch into a new file of /dev/shm, of which it touches every page for the first time; the
training's process maps the file, touches the pages again, and gives them back. For large batches that is most of the
work on both sides. Here, each worker has slots, each as large as its first batch, in anonymous shared memory
(memfd_create(2)), which /dev/shm does not limit. A batch is stacked into tensors that lie in a free slot; where the
queue pickles them, only their places are sent, and where they are unpickled, they are tensors in that slot again. When
the last of these is gone, through whatever view somebody kept it, the slot is free: a byte at its beginning says so to
the worker.

A worker makes as many slots as are in use at once, up to a limit. Whatever does not fit (a larger batch, no free slot,
a tensor that is not plain) takes PyTorch's way. Samples, their order and their types are the same in either.

Two things differ from shared memory of PyTorch's own: ``is_shared()`` says no, and a tensor that is itself put into
shared memory moves there, away from NumPy's views of it, as tensors do that were never shared.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import pickle
import weakref
from functools import partial
from multiprocessing.reduction import DupFd, ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import collate as pytorchs

#: Bytes to which tensors are aligned, as by PyTorch's allocator.
_ALIGN = 64
#: Of a slot, before its batch: the byte that tells its state.
_HEAD = mmap.PAGESIZE
#: In use in the training's process, or a process that was forked from it may still read it.
_FREE, _USED, _LOST = 0, 1, 2
#: Slots of a worker: more are in use at once only where a training keeps batches, and each is an open file.
MOST = 16
#: A slot that was not needed for so many batches gives its pages back.
_IDLE = 64


def why_not(collate_fn: Any) -> str | None:
    """Return why the batches that a collate function makes cannot take this way, as a clause; ``None`` if they can."""
    if not hasattr(os, "memfd_create"):
        return "there is no anonymous shared memory here"
    if collate_fn is not default_collate or not _is_pytorchs():
        return "batches are made by a function of its own"
    return None


def collate_in_slots(samples: list[Any]) -> Any:
    """Do what PyTorch's ``default_collate`` does; tensors lie in slots if a worker calls this."""
    if get_worker_info() is None or not _is_pytorchs():
        return default_collate(samples)
    filling = _Filling(_worker.take())
    batch = pytorchs.collate(samples, collate_fn_map={**pytorchs.default_collate_fn_map, **filling.functions()})
    _worker.learn(filling)
    return batch


def _is_pytorchs() -> bool:
    """Return whether tensors are stacked as PyTorch does it: ``default_collate_fn_map`` may be extended by anybody."""
    return pytorchs.default_collate_fn_map.get(torch.Tensor) is pytorchs.collate_tensor_fn


class _Worker:
    """The slots of a worker, which makes batches for one loader."""

    def __init__(self) -> None:
        #: The worker, once its first batch is made.
        self._process: int | None = None
        #: Bytes of a slot, once the first batch is made; 0 if there are to be none.
        self._size: int | None = None
        self._slots: list[_Slot] = []
        self._batches = 0

    def take(self) -> _Slot | None:
        """Return a slot that nobody uses; ``None`` if there is none."""
        if not self._size or self._process != os.getpid():
            # Those of the process that this one was forked from are not its own.
            return None
        self._batches += 1
        # What a forked process may read is its own from now on.
        self._slots = [slot for slot in self._slots if slot.memory[0] != _LOST]
        slot = next((slot for slot in self._slots if slot.is_free()), None)
        if slot is None and len(self._slots) < MOST:
            with contextlib.suppress(OSError, ValueError):
                slot = _Slot(self._size)
                self._slots.append(slot)
        if slot is not None:
            slot.last = self._batches
        if self._batches % _IDLE == 0:
            for one in self._slots:
                if self._batches - one.last >= _IDLE:
                    one.give_pages_back()
        return slot

    def learn(self, filling: _Filling) -> None:
        """Learn from the first batch how large they are."""
        if self._size is not None:
            return
        self._size, self._process = filling.bytes if _can_be_sent() else 0, os.getpid()
        if self._size:
            ForkingPickler.register(torch.Tensor, self._reduced)
            # At the end of the process, which the training's may outlive for long.
            Finalize(self, self._end, exitpriority=10)

    def _reduced(self, tensor: torch.Tensor) -> Any:
        """Pickle a tensor as the place in its slot, if it lies in one, or else as PyTorch does."""
        is_own = self._process == os.getpid() and _is_plain(tensor) and tensor.numel() > 0
        slot = next((slot for slot in self._slots if slot.holds(tensor)), None) if is_own else None
        if slot is None:
            return reduce_tensor(tensor)
        # From here on, the training's process says when it is free.
        slot.memory[0] = _USED
        offset = tensor.data_ptr() - slot.address
        return _tensor, (slot, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _end(self) -> None:
        for slot in self._slots:
            slot.give_pages_back()


class _Slot:
    """Memory for a batch in the worker that makes it; lent memory where it is unpickled (`_lend`).

    Attributes:
        memory: the whole, of which the first byte is its state. address: of the batch. last: the number of the batch
            for which it was taken last.
    """

    _numbers = itertools.count()

    def __init__(self, size: int) -> None:
        self.name = f"{os.getpid()}-{next(self._numbers)}"
        self.size, self.last = size, 0
        descriptor = os.memfd_create(f"autotune-{self.name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, _HEAD + size)
            # It has a descriptor of its own.
            self.memory = mmap.mmap(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        #: To be sent with the slot's first batch.
        self._descriptor: int | None = descriptor
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr() + _HEAD
        #: What the tensors of a batch hold while they are in this process.
        self._view: weakref.ref[memoryview] | None = None

    def is_free(self) -> bool:
        # In this order: the queue's thread marks it as used before it lets go of the batch.
        return (self._view is None or self._view() is None) and self.memory[0] == _FREE

    def view(self) -> memoryview:
        """Return the memory of a new batch."""
        view = memoryview(self.memory)[_HEAD:]
        self._view = weakref.ref(view)
        return view

    def holds(self, tensor: torch.Tensor) -> bool:
        return bool(self.address <= tensor.data_ptr() < self.address + self.size)

    def give_pages_back(self) -> None:
        """Give memory back to the system if nobody uses it; it is there again when it is written to."""
        if self.is_free():
            with contextlib.suppress(OSError):
                self.memory.madvise(mmap.MADV_REMOVE)

    def __reduce__(self) -> Any:
        # A worker's queue pickles in the order in which it sends.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return _lend, (self.name, None)
        try:
            return _lend, (self.name, DupFd(descriptor))
        finally:
            os.close(descriptor)


class _Filling:
    """A batch that is stacked into a slot.

    Args:
        slot: ``None`` to stack it as PyTorch does.

    Attributes:
        bytes: that its tensors need in a slot.
    """

    def __init__(self, slot: _Slot | None) -> None:
        self._slot = slot
        self._view = None if slot is None else slot.view()
        self.bytes = 0

    def functions(self) -> dict[Any, Any]:
        """Return functions for PyTorch's ``collate``, by the type of samples: those that make tensors, as far as they
        are PyTorch's own."""
        numbers = (pytorchs.collate_numpy_scalar_fn, pytorchs.collate_float_fn, pytorchs.collate_int_fn)
        own = {kind: by for kind, by in pytorchs.default_collate_fn_map.items() if by in numbers}
        return {**{kind: partial(self._numbers, by) for kind, by in own.items()}, torch.Tensor: self._stacked}

    def _stacked(self, samples: Any, *, collate_fn_map: Any = None) -> Any:
        first = samples[0]
        out = self._place((len(samples), *first.shape), first.dtype) if _is_plain(first) else None
        if out is None:
            return pytorchs.collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
        return torch.stack(samples, 0, out=out)

    def _numbers(self, by: Any, samples: Any, *, collate_fn_map: Any = None) -> Any:
        made = by(samples, collate_fn_map=collate_fn_map)
        out = self._place(tuple(made.shape), made.dtype) if _is_plain(made) else None
        return made if out is None else out.copy_(made)

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor in the slot; ``None`` if there is no room."""
        size, offset = math.prod(shape) * dtype.itemsize, self.bytes
        self.bytes += size + -size % _ALIGN
        if not size or self._slot is None or offset + size > self._slot.size:
            return None
        return torch.frombuffer(self._view, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


def _is_plain(held: Any) -> bool:
    return (
        type(held) is torch.Tensor
        and held.layout is torch.strided
        and held.device.type == "cpu"
        and not (held.is_quantized or held.requires_grad or held.is_conj() or held.is_neg())
    )


def _can_be_sent() -> bool:
    """Return whether the training's process finds the functions below, which it does not if this is in no module that
    is imported, and whether descriptors may be sent to it."""
    try:
        pickle.dumps((_lend, _tensor))
    except (pickle.PicklingError, ImportError, AttributeError):
        return False
    return bool(get_sharing_strategy() == "file_descriptor")


_worker = _Worker()


# In the training's process.

#: The slots of workers, by name.
_mapped: dict[str, mmap.mmap] = {}
#: Those that are lent, and what tells that the last tensor in one is gone.
_lent: dict[str, weakref.ref[memoryview]] = {}


def _lend(name: str, sent: Any) -> memoryview:
    """Return the memory of a slot, which is free again when nobody holds it."""
    if sent is not None:
        _forget_the_dead()
        descriptor = sent.detach()
        try:
            _mapped[name] = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
    slot = _mapped[name]
    memory, process = memoryview(slot)[_HEAD:], os.getpid()

    def give_back(_: Any) -> None:
        # What a process that was forked from this one drops, this one may still hold.
        if os.getpid() == process and slot[0] == _USED:
            slot[0] = _FREE

    # A slot is not lent again before this one is gone.
    _lent[name] = weakref.ref(memory, give_back)
    return memory


def _forget_the_dead() -> None:
    """Forget the slots of workers that have ended. What is still lent of them stays as it is."""
    # Other threads, such as those that pin memory, may do the same.
    for name in list(_mapped):
        if not os.path.exists(f"/proc/{name.split('-')[0]}"):
            _mapped.pop(name, None)
            _lent.pop(name, None)


def _lose_the_lent() -> None:
    """Never use a slot again that a process which is forked now may go on to read."""
    for name, memory in list(_lent.items()):
        slot = _mapped.get(name)
        if slot is not None and memory() is not None:
            slot[0] = _LOST
            _mapped.pop(name, None)
            _lent.pop(name, None)


def _tensor(
    memory: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    size = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    return torch.frombuffer(memory, dtype=dtype, count=size, offset=offset).as_strided(shape, stride)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lose_the_lent)
