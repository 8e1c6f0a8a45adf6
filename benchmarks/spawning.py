"""One launch made in two ways: by the product's template that forks, and in a fresh interpreter; and taking turns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from autotune.launcher import Launcher
from autotune.launcher.folder import open_folder
from autotune.records import TrialResult, TrialSpec
from benchmarks.launching import measurement_of, run
from benchmarks.tables import seconds

#: A launch as anybody would make it without a template: an interpreter of its own, that imports and does the same.
SPAWNED = """
import os, sys
from pathlib import Path
import torch, torchvision
from autotune.child.run import run
sys.exit(run(Path(sys.argv[1]), os.open(os.devnull, os.O_WRONLY)))
"""


class Forked:
    """Launches by the product's own launcher: a template that forks."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def __call__(self, spec: TrialSpec) -> tuple[TrialResult, float]:
        began = time.monotonic()
        result = run(self._launcher, spec)
        return result, time.monotonic() - began


def spawned(spec: TrialSpec) -> tuple[TrialResult, float]:
    """The same launch in a fresh interpreter, and its wall seconds."""
    began = time.monotonic()
    files = open_folder(spec)
    with files.stdout.open("wb") as out, files.stderr.open("wb") as err:
        command = [sys.executable, "-P", "-c", SPAWNED, str(files.spec)]
        subprocess.run(command, env={**os.environ, **spec.env}, stdout=out, stderr=err, check=False)
    wall_s = time.monotonic() - began
    if not files.result.exists():
        raise SystemExit(f"the spawned child ended without a result: {files.stderr.read_text()[-500:]}")
    return TrialResult.model_validate_json(files.result.read_text()), wall_s


def fixed_s(result: TrialResult, wall_s: float) -> float:
    """What is neither the first step, nor warm-up, nor measured steps. The epoch's turn is in it."""
    m = measurement_of(result)
    return wall_s - m.compile_s - m.warmup_s - sum(w.seconds for w in (*m.windows, *m.discarded))


def in_turns(
    repetitions: int, sides: Sequence[Callable[[int], float]], what: str, on_done: Callable[[str], None]
) -> list[list[float]]:
    """Every side once per repetition, in an order that is turned round each time."""
    found: list[list[float]] = [[] for _ in sides]
    for number in range(repetitions):
        numbers = range(len(sides)) if number % 2 == 0 else range(len(sides) - 1, -1, -1)
        for side in numbers:
            found[side].append(sides[side](number))
        on_done(f"{what}: {', '.join(seconds(v[-1]) for v in found)}")
    return found


def ratios(large: Sequence[float], small: Sequence[float]) -> list[float]:
    """Of pairs that were run one after the other."""
    return [a / b for a, b in zip(large, small, strict=True)]
