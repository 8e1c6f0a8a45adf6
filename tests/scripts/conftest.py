"""Scripts that know nothing of autotune, and profiles to run them with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune import profile as profiles
from autotune.base.records import CheckPlan, CommandRef, LaunchKind, MeasurePlan, PhaseLimits, TrialResult, Value
from autotune.launcher import ProcessLauncher
from tests.support import make_profile, make_spec

from ..cli.conftest import typed_here  # noqa: TID252

SCRIPTS = Path(__file__).parent
DEADLINE_S = 240.0
#: The pauses of a search are none of these tests' business; one thread hardly disturbs what runs beside.
PLAIN = {"precision": "fp32", "batch_size": 8, "num_workers": 0, "intra_op_threads": 1}


#: So short that a launch takes seconds.
PLAN = MeasurePlan(target_halfwidth=10.0, min_windows=3, min_window_s=0.1, max_measure_s=4.0)


def python(name: str, *options: str) -> tuple[str, ...]:
    """The command of a script in this folder."""
    return (sys.executable, str(SCRIPTS / name), *options)


def code(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def written(folder: Path, **configuration: Value) -> Path:
    """Write a profile; return its path."""
    profile = make_profile(
        workload={"name": "train"},
        configuration={**PLAIN, **configuration},
        gives={"same_batch": True},
        baseline={"configuration": PLAIN},
        best_same_batch=None,
        conditions={"image_size": None, "data": "none", "epoch_samples": None},
        fingerprint={"values": {"cores": 2}},
        provenance={"study": "train-1"},
    )
    path = folder / "profile.yaml"
    profiles.write(profile, path)
    return path


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def seen(self) -> dict[str, Any]:
        """What the script has seen of itself."""
        assert self.code == 0, self.stderr
        found = json.loads(self.stdout)
        assert isinstance(found, dict)
        return found


@dataclass(frozen=True)
class Runner:
    """Runs commands in a folder that has a profile."""

    folder: Path

    def command(self, *words: str, **configuration: Value) -> list[str]:
        profile = written(self.folder, **configuration)
        return [sys.executable, "-P", "-m", "autotune", "run", "--profile", str(profile), "--", *words]

    def __call__(self, *words: str, env: dict[str, str] | None = None, **configuration: Value) -> Ran:
        return self.run(self.command(*words, **configuration), env)

    def script(self, name: str, *options: str, env: dict[str, str] | None = None, **configuration: Value) -> Ran:
        return self(sys.executable, str(SCRIPTS / name), *options, env=env, **configuration)

    def typed(self, *words: str) -> Ran:
        """Run a command of autotune in this process. Not `run`, which becomes the script."""
        done = typed_here(self.folder, words)
        return Ran(done.returncode, done.stdout, done.stderr)

    def run(self, command: list[str], env: dict[str, str] | None = None) -> Ran:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
            stdin=subprocess.DEVNULL,
        )
        return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.fixture
def command_launch(process_launcher: ProcessLauncher, tmp_path: Path):
    """``command_launch(words, config, said=…, **spec)``: how a launch of a command ended, of which more may be said."""

    def run(
        words: Sequence[str],
        config: Mapping[str, Value] = PLAIN,
        *,
        folder: str = "launch",
        said: dict[str, Any] | None = None,
        **spec: Any,
    ) -> TrialResult:
        command = CommandRef(**{"words": tuple(words), "folder": str(tmp_path), **(said or {})})
        made = make_spec(tmp_path / folder, command=command, config=dict(config), **spec)
        return process_launcher.run(made, on_beat=lambda beat: None, stop=lambda: False)

    return run


@pytest.fixture
def launched(command_launch: Any):
    """``launched(words, …)``: how a launch of a command ended."""

    def run(
        *words: str,
        plan: MeasurePlan = PLAN,
        check: CheckPlan | None = None,
        limits: PhaseLimits | None = None,
        **config: Value,
    ) -> TrialResult:
        kind = LaunchKind.MEASURE if check is None else LaunchKind.TRAIN_CHECK
        spec = {"plan": plan, "kind": kind, "check": check, "limits": limits or PhaseLimits()}
        return command_launch(words, {**PLAIN, **config}, **spec)

    return run
