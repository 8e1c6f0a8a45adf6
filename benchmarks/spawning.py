"""Makes launches in two ways, by autotune's forking template and in a fresh interpreter, in alternating order."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from autotune.base.records import TrialResult, TrialSpec
from autotune.launcher import Launcher
from autotune.launcher.watch import open_folder
from benchmarks.launching import measurement_of, run
from benchmarks.tables import seconds

#: A launch without a template: a fresh interpreter with the same imports and the same work.
SPAWNED = """
import os, sys
from pathlib import Path
import torch, torchvision
from autotune.child.run import run
sys.exit(run(Path(sys.argv[1]), os.open(os.devnull, os.O_WRONLY)))
"""


class Forked:
    """Launches by autotune's own launcher, with a template that forks."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def __call__(self, spec: TrialSpec) -> tuple[TrialResult, float]:
        began = time.monotonic()
        result = run(self._launcher, spec)
        return result, time.monotonic() - began


def spawned(spec: TrialSpec) -> tuple[TrialResult, float]:
    """Make the same launch in a fresh interpreter; return the result and its wall seconds."""
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
    """Return the wall seconds minus first step, warm-up and measured steps. Includes the epoch turn."""
    m = measurement_of(result)
    return wall_s - m.compile_s - m.warmup_s - sum(w.seconds for w in (*m.windows, *m.discarded))


def in_turns(
    repetitions: int, sides: Sequence[Callable[[int], float]], what: str, on_done: Callable[[str], None]
) -> list[list[float]]:
    """Run every side once per repetition, reversing the order each time."""
    found: list[list[float]] = [[] for _ in sides]
    for number in range(repetitions):
        numbers = range(len(sides)) if number % 2 == 0 else range(len(sides) - 1, -1, -1)
        for side in numbers:
            found[side].append(sides[side](number))
        on_done(f"{what}: {', '.join(seconds(v[-1]) for v in found)}")
    return found


def ratios(large: Sequence[float], small: Sequence[float]) -> list[float]:
    """Return the ratios of pairs that were run consecutively."""
    return [a / b for a, b in zip(large, small, strict=True)]
