"""A user's project, and one real search in it that several tests read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autotune.cli import main
from autotune.search import find_study
from autotune.study.request import read_request

from ..process.alive import marked  # noqa: TID252

WORKLOAD = '''\
"""A user's own workload: a small network on random vectors. Today it pauses for long in every step."""

import time

import torch
from torch import nn
from torch.utils.data import Dataset

import autotune

BATCH_SIZE = 32
KNOBS = {"pause": autotune.knob(True, False, changes_maths=False)}


class Vectors(Dataset):
    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(1024, 256, generator=generator)
        self.labels = torch.randint(0, 10, (1024,), generator=generator)

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return self.inputs[index % 1024], self.labels[index % 1024]


def model(ctx):
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def dataset(ctx):
    return Vectors(ctx.seed)


def optimizer(ctx, m):
    return torch.optim.SGD(m.parameters(), lr=0.01)


def loss(ctx, m, batch):
    inputs, labels = batch
    # Both sleep more than they compute, so that other load hardly changes their ratio.
    time.sleep(0.02 if ctx.knob("pause") else 0.004)
    return nn.functional.cross_entropy(m(inputs), labels)
'''
STATUSES = {
    *("complete", "pruned", "oom", "host_oom", "shm_exhausted", "loader_worker_died", "crashed"),
    *("killed", "timeout", "hang", "compile_failed", "diverged", "user_error", "interrupted"),
}
SEARCH = [
    *("search", "--model", "my_tiny_net.py", "--device", "cpu"),
    *("--fix", "compile_mode=off", "--set", "num_workers=0"),
    # Whatever is tried is several times as fast as the baseline, so there is a verdict even on a busy machine.
    *("--fix", "workload.pause=false"),
    # Two threads that wait for each other at every step can be many times slower beside other tests; one hardly is.
    *("--baseline", "intra_op_threads=1", "--fix", "intra_op_threads=1"),
    # These tests do not depend on the measured rates, so other load on the machine does not matter.
    "--allow-busy",
]
#: With these fixed, the search has little to compare, and a verdict soon, on a busy machine, too.
PLAIN = ["--fix", "precision=fp32", "--fix", "optimizer_impl=for-loop"]
DEADLINE_S = 150.0


def typed_here(
    folder: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command line in this process, which saves the imports of another one."""
    out, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        contextlib.chdir(folder),
        # What the command itself sets, for its own process and children, does not outlast it either.
        mock.patch.dict(os.environ, environment or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        code = main.run(list(arguments))
    printed, said = (stream.buffer.getvalue().decode() for stream in (out, errors))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(list(arguments), code, printed, said)


@dataclass(frozen=True)
class Project:
    """A user's project. It has a package called ``models``, like the folder in autotune's repository."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "autotune", *arguments]

    def typed(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command that trains nothing, in this process."""
        return typed_here(self.folder, arguments)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a process of its own."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run a command that trains nothing with ``--json``, in this process, and return the object that it prints."""
        done = self.typed(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1
        found = json.loads(done.stdout)
        assert found["schema_version"] == 1
        assert isinstance(found, dict)
        return found


def new_project(folder: Path) -> Project:
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "__init__.py").write_text("OURS = False\n")
    (folder / "my_tiny_net.py").write_text(WORKLOAD + "\n\nimport models\n\nassert models.OURS is False\n")
    return Project(folder)


def survivors(study: Path) -> list[int]:
    """Return the ids of the processes that carry the study's mark."""
    return list(marked(read_request(find_study(str(study), study.parent)).mark))


@dataclass(frozen=True)
class Finished:
    project: Project
    done: subprocess.CompletedProcess[str]

    @property
    def study(self) -> Path:
        return self.project.folder / "studies" / "my_tiny_net-1"


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project of the finished search, shared with all tests that leave no study behind."""
    return new_project(tmp_path_factory.mktemp("user") / "project")


@pytest.fixture(scope="session")
def finished(project: Project) -> Finished:
    """A search that has finished, run in a subprocess from an editable install."""
    return Finished(project, project.run(*SEARCH, *PLAIN, "--trials", "2", "--budget", "90s", "--json", "--no-input"))
