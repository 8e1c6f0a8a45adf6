"""Batches of whatever nesting: moved to a device, and split into parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autotune.agent.site.autotune_agent import applying
from autotune.base.errors import WorkloadError

_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def move(batch: Any, device: torch.device, *, non_blocking: bool, channels_last: int) -> Any:
    """Move all tensors of a batch to the device; floats and bytes of `channels_last` dimensions get their channels
    last: 4 for ``(N, C, H, W)``, 5 for ``(N, C, D, H, W)``, 0 for none.

    Descends into tuples (also named ones), lists, dicts and dataclasses. Objects with a method ``to`` move themselves.
    """
    if isinstance(batch, torch.Tensor):
        if applying.is_image(batch, channels_last):
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
    sample; mappings, tuples, lists and dataclasses of such are kept as they are. Numbers and text go into each part.

    Args:
        samples: in the batch. parts: divides this.

    Raises:
        WorkloadError: the batch holds something else, or nothing with one item per sample.
    """
    size = samples // parts
    bounds = [slice(first, first + size) for first in range(0, samples, size)]

    def is_structure(part: Any) -> bool:
        """Whether a sequence of as many items as samples is yet a whole batch: it holds batches."""
        many = (p for p in part if isinstance(p, torch.Tensor | tuple | list))
        return any(p.shape[:1] == (samples,) if isinstance(p, torch.Tensor) else len(p) == samples for p in many)

    def pieces(part: Any, *, whole: bool = False) -> list[Any] | None:
        """Return the pieces; ``None`` for what goes into each part."""
        if part is None or isinstance(part, str | bytes | bool | int | float):
            return None
        if isinstance(part, torch.Tensor) and part.dim() == 0:
            return None
        if isinstance(part, torch.Tensor) and len(part) == samples:
            return [part[bound] for bound in bounds]
        if isinstance(part, dict):
            return joined(part.values(), lambda values: dict(zip(part, values, strict=True)))
        if isinstance(part, tuple | list):
            if len(part) == samples and not (whole and is_structure(part)):
                return [part[bound] for bound in bounds]
            named = isinstance(part, tuple) and hasattr(part, "_fields")
            return joined(part, lambda values: type(part)(*values) if named else type(part)(values))
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            names = [f.name for f in dataclasses.fields(part)]
            inside = [getattr(part, name) for name in names]
            return joined(inside, lambda values: dataclasses.replace(part, **dict(zip(names, values, strict=True))))
        shape = f" of shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else ""
        raise WorkloadError(
            f"a batch of {samples} samples cannot be split: it holds a {type(part).__name__}{shape}",
            advice="parts need tensors and lists with one item per sample, and whole batches (drop_last=True).",
        )

    def joined(inside: Iterable[Any], make: Callable[[list[Any]], Any]) -> list[Any] | None:
        whole = list(inside)
        found = [pieces(part) for part in whole]
        if all(part is None for part in found):
            return None
        rows = [found[i] or [whole[i]] * parts for i in range(len(whole))]
        return [make([row[number] for row in rows]) for number in range(parts)]

    split_up = pieces(batch, whole=True)
    if split_up is None:
        raise WorkloadError(
            f"a batch of {samples} samples cannot be split: nothing in it has one item per sample",
            advice="one part leaves it whole.",
        )
    return split_up
