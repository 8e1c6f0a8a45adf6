"""The door of the loaders: `DataLoader.__iter__`, before a loader's first epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from autotune_agent.setting import Setting

#: PyTorch's own, where there are workers.
_PREFETCH = 2


class LoaderDoor:
    """Sets arguments of loaders: ``num_workers``, ``prefetch_factor``, ``pin_memory``, ``persistent_workers``; compares
    ``batch_size``.

    They are set when a loader is first iterated over, not when it is made: then it is known whether it is for training.
    One that is iterated over without gradients evaluates, and stays as it is.

    Args:
        ours: returns whether this process may be the one that trains.
    """

    def __init__(self, settings: list[Setting], ours: Callable[[], bool]) -> None:
        self._settings = settings
        self._ours = ours
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        """Act whenever a loader is iterated over."""
        import torch
        from torch.utils.data import DataLoader

        theirs = DataLoader.__iter__

        def iterate(loader: Any) -> Any:
            if torch.is_grad_enabled() and loader not in self._known and self._ours():
                self._known.add(loader)
                self._set(loader)
            return theirs(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    def _set(self, loader: Any) -> None:
        wanted: dict[str, Any] = {}

        def want(setting: Setting) -> str | None:
            if "batch_size" in setting.arguments:
                return _compare(loader, setting)
            if setting.ask:
                # Other arguments are asked for as if there were workers.
                return _why_not(loader, {"num_workers": max(1, loader.num_workers), **setting.arguments})
            reason = _why_not(loader, {**wanted, **setting.arguments})
            if reason is None:
                wanted.update(setting.arguments)
            return reason

        # The number of workers comes first in a configuration, and others depend on it.
        for setting in self._settings:
            setting.try_to(partial(want, setting))
        if not wanted:
            return
        workers = wanted.get("num_workers", loader.num_workers)
        if workers == 0:
            wanted.update(prefetch_factor=None, persistent_workers=False)
        elif loader.prefetch_factor is None:
            wanted.setdefault("prefetch_factor", _PREFETCH)
        # The loader forbids to set some of them once it is made, because most loaders have an iterator then.
        loader.__dict__.update(wanted)


def _compare(loader: Any, setting: Setting) -> str | None:
    """Samples belong to the maths of the training: nothing is set, and what differs is said."""
    own = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if own != setting.arguments["batch_size"]:
        return f"the script's own is {own or 'not known'}; put {{batch_size}} into its command"
    # It is the script that says so.
    setting.plain = True
    return None


def _why_not(loader: Any, told: dict[str, Any]) -> str | None:
    """Return why arguments cannot be set for a loader, as a clause; ``None`` if they can."""
    from torch.utils.data import IterableDataset

    own, data = loader.num_workers, loader.dataset
    workers = told.get("num_workers", own)
    if getattr(loader, "_iterator", None) is not None:
        return "the loader's workers were started before"
    if workers != own and isinstance(data, IterableDataset):
        return "an iterable data set may share its samples out by the number of workers"
    if workers == 0 and loader.timeout:
        return "the loader has a timeout, which needs workers"
    if workers == 0 and (told.get("prefetch_factor") or told.get("persistent_workers")):
        return "the loader has no workers"
    if ((workers and not own) or told.get("pin_memory")) and _on_device(data):
        return "the data is on the device already"
    if told.get("persistent_workers") and not loader.persistent_workers and hasattr(data, "set_epoch"):
        return "workers that persist would not see the data set's set_epoch"
    return None


def _on_device(data: Any) -> bool:
    """Return whether a data set holds tensors on a device."""
    import torch

    inner = getattr(data, "dataset", data)
    held = [part for value in getattr(inner, "__dict__", {}).values() for part in _parts(value)]
    return any(isinstance(part, torch.Tensor) and part.device.type != "cpu" for part in held)


def _parts(value: Any) -> tuple[Any, ...]:
    # Of long lists, the first few tell.
    return tuple(value[:8]) if isinstance(value, (list, tuple)) else (value,)
