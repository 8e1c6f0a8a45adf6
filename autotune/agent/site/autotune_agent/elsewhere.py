"""Training where the agent does not act: in a process that the script has forked, or started by `multiprocessing`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

from autotune_agent.setting import safely, say


class Elsewhere:
    """Tells once in a process that it trains, although the agent is not for it.

    Args:
        plan: as of the `Agent`. If the training is watched, an event says so, and otherwise a line on stderr.
        how: such processes come about: ``forked`` or ``spawned``.
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
        """Tell when an optimizer is about to take a step. ``import torch`` has just ended."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                safely(self.tell)

        register_optimizer_step_pre_hook(step)

    def tell(self) -> None:
        """Tell that this process trains, if that has not been told yet."""
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


def _is_first_rank() -> bool:
    """Return whether this is the only process that trains, or the first of several, as far as they have told torch."""
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
