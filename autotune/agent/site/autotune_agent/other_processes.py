"""Processes where the agent does not act: those that the script has forked, or started by `multiprocessing`. If they
train, that is reported; and they are kept from touching workers of loaders that are not theirs."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.process
import os
import time
from functools import wraps
from typing import Any

from autotune_agent.setting import safely, say


class Elsewhere:
    """Reports once that this process trains, although the agent does not act in it.

    Args:
        plan: that of the `Agent`. If the training is watched, an event reports it, and otherwise a line on stderr.
        how: how the process was started: ``forked`` or ``spawned``.
    """

    def __init__(self, plan: dict[str, Any], how: str) -> None:
        live = bool(plan.get("live"))
        self._path: str | None = plan.get("watch")
        self._says = self._path is None or live
        what = "live: not tuned" if live else f"{plan['title']}: not applied"
        self._sentence = f"{what}: the script trains in a process that it has {how} itself"
        self._how = how
        self._told = False

    def install(self) -> None:
        """Report when an optimizer is about to take a step. Called when ``import torch`` has just ended."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                safely(self.tell)

        register_optimizer_step_pre_hook(step)

    def tell(self) -> None:
        """Report that this process trains, unless that has been done."""
        if self._told:
            return
        self._told = True
        if self._path is not None:
            line = json.dumps({"e": "elsewhere", "at": round(time.monotonic(), 6), "how": self._how})
            with contextlib.suppress(OSError):
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                try:
                    os.write(descriptor, f"{line}\n".encode())
                finally:
                    os.close(descriptor)
        if self._says and _is_first_rank():
            say(self._sentence)


def spare_workers() -> None:
    """Keep processes that the script forks from touching the workers of their parent's loaders.

    A script without workers may fork in the middle of an epoch, to save in the background, say. With workers, the child
    would end those of its parent when it exits, through PyTorch's iterators or `multiprocessing`, and take batches from
    its parent.
    """
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    end, reset, take = (
        getattr(_MultiProcessingDataLoaderIter, name) for name in ("_shutdown_workers", "_reset", "_next_data")
    )
    # Bound now: iterators may be collected when modules have already been emptied.
    this = os.getpid

    def is_parents(iterator: Any) -> bool:
        workers = iterator.__dict__.get("_workers")
        return bool(workers) and workers[0]._parent_pid != this()

    @wraps(end)
    def shutdown_workers(iterator: Any) -> Any:
        return None if is_parents(iterator) else end(iterator)

    @wraps(reset)
    def begin_again(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_parents(iterator):
            return reset(iterator, loader, *args, **kwargs)
        # For persistent workers; `DataLoader.__iter__` then returns this iterator.
        loader._iterator = loader._get_iterator()
        return None

    @wraps(take)
    def next_data(iterator: Any) -> Any:
        if is_parents(iterator):
            raise RuntimeError(
                "this process was forked in the middle of an epoch, whose batches the loader's workers make for its "
                "parent: it cannot go on with the epoch unless num_workers is 0"
            )
        return take(iterator)

    for name, replacement in (
        ("_shutdown_workers", shutdown_workers),
        ("_reset", begin_again),
        ("_next_data", next_data),
    ):
        setattr(_MultiProcessingDataLoaderIter, name, replacement)

    def forget() -> None:
        # This is what `multiprocessing` does in children that it forks itself.
        children: set[Any] = getattr(multiprocessing.process, "_children")  # noqa: B009
        children.difference_update([child for child in children if child._parent_pid != this()])

    os.register_at_fork(after_in_child=forget)


def _is_first_rank() -> bool:
    """Return whether this is the only process that trains, or the first of several, as far as torch knows."""
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
