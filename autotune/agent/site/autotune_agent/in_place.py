"""What knobs do to a training, in a script as in a workload: memory formats, how an optimizer visits parameters, and
whether freed host memory is kept.

Both the agent's doors and autotune's own knobs use it: one way to do a thing, and one reason not to.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from typing import Any

#: The dimensions of the tensors to which a memory format applies.
DIMENSIONS = {"channels_last": 4, "channels_last_3d": 5}
#: Why the layout of a model cannot be changed.
SHARED = "weights, gradients or buffers of the model share their memory with other tensors"
MIXED = "the model has 4-dimensional and 5-dimensional tensors"


def dimensions_of(memory_format: str) -> int:
    """Return the number of dimensions of the tensors to which a memory format applies; 0 for none."""
    return DIMENSIONS.get(memory_format, 0)


def torch_format(memory_format: str) -> Any:
    """Return torch's object for a memory format."""
    import torch

    formats = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}
    return formats.get(memory_format, torch.contiguous_format)


def may_have_format(held: Any, memory_format: str) -> bool:
    """Return whether an object is a tensor to which a memory format applies; ``contiguous`` applies to all of them."""
    import torch

    wanted = (DIMENSIONS[memory_format],) if memory_format in DIMENSIONS else (4, 5)
    return isinstance(held, torch.Tensor) and held.dim() in wanted and held.layout is torch.strided


def is_image(held: Any, dimensions: int) -> bool:
    """Return whether an input gets its channels last: a tensor of floats or bytes with this many dimensions, 4 for
    ``(N, C, H, W)`` or 5 for ``(N, C, D, H, W)``."""
    import torch

    return (
        isinstance(held, torch.Tensor)
        and dimensions in DIMENSIONS.values()
        and held.dim() == dimensions
        and held.layout is torch.strided
        and (held.is_floating_point() or held.dtype is torch.uint8)
    )


def channels_last(image: Any, dimensions: int) -> Any:
    """Return an input with its channels last."""
    import torch

    return image.contiguous(memory_format=torch.channels_last if dimensions == 4 else torch.channels_last_3d)


def cannot_lay_out(model: Any, memory_format: str) -> str | None:
    """Return why a model cannot be laid out now, as a clause; ``None`` if it can, or has that layout already.

    A tensor whose layout changes moves in memory. If it was a view, such as of one flat parameter that an optimizer
    updates, it and what it was a view of would then be trained separately.
    """
    if memory_format in DIMENSIONS and mixes_dimensions(model):
        return MIXED
    layout = torch_format(memory_format)
    for tensor in _held(model, memory_format):
        if not tensor.is_contiguous(memory_format=layout) and not _has_memory_alone(tensor):
            return SHARED
    return None


def shares_memory(model: Any) -> bool:
    """Return whether a tensor of a model whose layout could be changed shares its memory."""
    return not all(map(_has_memory_alone, _held(model, "contiguous")))


def mixes_dimensions(model: Any) -> bool:
    """Return whether a model has weights or buffers of both four and five dimensions, which no one format suits."""
    return {4, 5} <= {tensor.dim() for tensor in (*model.parameters(), *model.buffers())}


def lay_out(model: Any, memory_format: str) -> None:
    """Lay out, in place, the weights, gradients and buffers of a model to which a memory format applies.

    Raises:
        RuntimeError: see `cannot_lay_out`.
    """
    import torch

    reason = cannot_lay_out(model, memory_format)
    if reason is not None:
        raise RuntimeError(reason)
    layout = torch_format(memory_format)
    with torch.no_grad():
        for tensor in _held(model, memory_format):
            tensor.data = tensor.data.contiguous(memory_format=layout)


def follow_formats(optimizer: Any) -> None:
    """Give an optimizer's state the layout of its parameters; otherwise each step would convert it."""
    import torch

    for parameter, state in optimizer.state.items():
        if not may_have_format(parameter, "contiguous"):
            continue
        last_format = next(name for name, count in DIMENSIONS.items() if count == parameter.dim())
        layout = torch_format("contiguous" if parameter.is_contiguous() else last_format)
        for name, value in state.items():
            is_alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if is_alike and not value.is_contiguous(memory_format=layout) and _has_memory_alone(value):
                state[name] = value.contiguous(memory_format=layout)


def set_implementation(optimizer: Any, told: Mapping[str, Any]) -> None:
    """Set how an optimizer visits its parameters, between two steps.

    PyTorch's optimizers read ``foreach`` and ``fused`` from their parameter groups at every step, and making a new one
    would require knowing its signature.

    Args:
        told: ``foreach`` and ``fused``, whichever are to be set.
    """
    fused = bool(told.get("fused"))
    for group in (optimizer.defaults, *optimizer.param_groups):
        group.update({name: value for name, value in told.items() if name in group})
    # An optimizer made with fused=True has this flag, so one that is switched to it gets it, too: `GradScaler` then
    # leaves scale and overflow to the kernels. Without it, each step unscales all gradients first, and the host waits
    # for the device. Implementations other than the fused one fail where it is set.
    if fused or hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = fused and _keeps_overflows_out(optimizer)
    _count_steps_where_expected(optimizer, fused=fused)


def _held(model: Any, memory_format: str) -> Iterator[Any]:
    """Yield the weights, gradients and buffers of a model to which a memory format applies."""
    for held in (*model.parameters(), *model.buffers()):
        for tensor in (held, held.grad):
            if tensor is not None and may_have_format(tensor, memory_format):
                yield tensor


def _has_memory_alone(tensor: Any) -> bool:
    """Return whether a tensor fills its memory, and no other tensor, whoever holds it, uses that memory."""
    import torch

    try:
        fills = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return bool(fills and _uses(tensor) <= _uses(torch.empty(1)))
    except (RuntimeError, NotImplementedError):
        # The tensor is made of others, such as one that is spread over devices.
        return False


def _uses(tensor: Any) -> int:
    """Return the number of references to a tensor's memory, including those made by this call."""
    import torch

    # Some builds for CPUs lack it; there, only tensors that do not fill their memory are recognized as sharing it.
    count: Any = getattr(torch._C, "_storage_Use_Count", lambda place: 1)
    storage = tensor.untyped_storage()
    return int(count(storage._cdata))


def _keeps_overflows_out(optimizer: Any) -> bool:
    """Return whether an optimizer's fused kernels leave its state alone in a step that overflowed.

    SGD's do not on CUDA (observed with torch 2.11): when the first step overflows, as it mostly does under fp16, they
    skip it, but the momentum that they should have initialized is taken as initialized, and the training diverges.
    Without the flag, GradScaler unscales and skips by itself.
    """
    import torch

    return not isinstance(optimizer, torch.optim.SGD)


def _count_steps_where_expected(optimizer: Any, *, fused: bool) -> None:
    """Move existing step counts to where the implementation expects them: fused kernels count on the device, the others
    on the host, where reading them costs nothing."""
    import torch

    for group in optimizer.param_groups:
        if group.get("capturable"):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            count = state.get("step") if state else None
            if isinstance(count, torch.Tensor):
                state["step"] = count.to(parameter.device if fused else "cpu", torch.float32)


# Freed host memory. https://www.gnu.org/software/libc/manual/html_node/Malloc-Tunable-Parameters.html

#: Why it cannot be set.
NOT_GLIBCS = "malloc is not glibc's own, or the environment has settings of it"
#: Values of parameters by their numbers in glibc's <malloc.h>: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_MMAP_MAX.
#: glibc raises its thresholds while a process runs, unless one has been set: the default cannot be brought back
#: exactly, and has the largest thresholds at which glibc itself arrives.
_MALLOC = {"keep": {-1: -1, -4: 0}, "default": {-1: 64 * 2**20, -3: 32 * 2**20, -4: 65536}}
#: The variables by which a process that is started with them keeps its memory.
MALLOC_KEEPS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
#: All that set either of them, or what they depend on.
_MALLOC_VARIABLES = (*MALLOC_KEEPS, "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")

_is_kept = all(os.environ.get(name) == value for name, value in MALLOC_KEEPS.items())
#: What is in force in this process.
_in_force = {"malloc": "keep" if _is_kept else "default"}


def malloc_now() -> str:
    """Return ``keep`` if this process keeps the memory that it frees, because of `set_malloc` or of `MALLOC_KEEPS`, or
    else ``default``."""
    return _in_force["malloc"]


def set_malloc(value: str) -> str | None:
    """Let this process keep the memory that it frees, or not.

    Processes that it forks inherit it. Threads other than the main one have heaps of their own, which keep no large
    blocks.

    Args:
        value: ``keep`` or ``default``.

    Returns:
        Why it cannot, as a clause; ``None`` if it does now.
    """
    reason = cannot_set_malloc(value)
    if reason is None and value != malloc_now():
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, setting in _MALLOC[value].items():
            mallopt(parameter, setting)
        _in_force["malloc"] = value
    return reason


def cannot_set_malloc(value: str) -> str | None:
    """Return why `set_malloc` would have no effect, or undo a setting of the user's, as a clause; ``None`` if it would
    not, or if the value is in force already."""
    if value == malloc_now():
        return None
    env = os.environ
    stated = any(name in env for name in _MALLOC_VARIABLES) or "glibc.malloc" in env.get("GLIBC_TUNABLES", "")
    replaced = "malloc" in env.get("LD_PRELOAD", "") or not hasattr(ctypes.CDLL(None), "mallopt")
    return NOT_GLIBCS if stated or replaced else None


def own_malloc() -> str | None:
    """Return what this process does by itself with memory that it frees; ``None`` if `set_malloc` would have no
    effect."""
    return malloc_now() if cannot_set_malloc("keep") is None else None
