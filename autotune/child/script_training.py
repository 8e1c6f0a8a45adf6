"""A script that trains, with the agent in it, as those see it who let configurations take turns there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from autotune.child.trail import SeenStep, Trail
from autotune.child.unseen import too_short


class Training(Protocol):
    """A script that trains, with the agent in it; see `ScriptProcess`."""

    trail: Trail
    found: list[SeenStep]
    in_background: bool
    rate_per_s: float | None

    @property
    def has_ended(self) -> bool:
        """Whether the script has ended by itself."""
        ...

    def looks(self) -> Iterator[int]:
        """Yield again and again, with `found` renewed, until the script ends."""
        ...


def wait_for_all(script: Training, looks: Iterator[int]) -> None:
    """Wait until all that a script trains with has been seen.

    Raises:
        WorkloadError: it ended before.
    """
    for _ in looks:
        if script.trail.own is not None:
            return
    raise too_short(script)


def tell(commands: int, told: Mapping[str, Any]) -> None:
    """Tell the agent what comes next.

    Args:
        commands: descriptor of its pipe, which takes as much at once. Nothing is told before the last turn has ended.
    """
    os.write(commands, json.dumps(told).encode() + b"\n")
