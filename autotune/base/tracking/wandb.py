"""Weights & Biases: offline, unless ``WANDB_MODE`` says otherwise; ``wandb sync`` sends the run later.

https://docs.wandb.ai/ref/python/init/
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from autotune.base.tracking import TrackedRun, Tracker


class Wandb(Tracker):
    package = "wandb"
    pip = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        found: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.key,
            resume="allow",
            config=dict(run.parameters),
            mode=None if os.environ.get("WANDB_MODE") else "offline",
            # The user's own run in this process stays as it is.
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run = found

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def tell(self, step: int, name: str, text: str) -> None:
        self._run.summary[name] = text

    def end(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


TRACKER = Wandb
