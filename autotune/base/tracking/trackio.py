"""trackio: a run on this machine, in trackio's own folder; ``trackio show`` opens it.

https://huggingface.co/docs/trackio
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.base.tracking import TrackedRun, Tracker


class Trackio(Tracker):
    package = "trackio"
    pip = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        # A run is found again by its name.
        name = f"{run.name}-{run.key[:8]}"
        self._run: Any = trackio.init(
            project=run.project,
            name=name,
            config=dict(run.parameters),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def tell(self, step: int, name: str, text: str) -> None:
        self._run.log({name: text}, step=step)

    def end(self, *, failed: bool) -> None:
        import trackio

        # Not the run's own method: trackio would end the run once more as the process exits, and print so on stdout.
        trackio.finish()


TRACKER = Trackio
