"""A real cluster for all tests of a file, and a user's project on it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.base.layout import STATE_DIR, StudyFiles

from ..process.alive import measuring, wait_until  # noqa: TID252
from .slurm import SlurmCluster, missing, slurm_cluster

#: Options of a search that takes seconds. Whatever it tries is several times as fast as the baseline.
SHORT = (
    *("--model", "tiny.py", "--device", "cpu", "--allow-busy", "--budget", "75s", "--trials", "2"),
    *("--fix", "workload.pause=false", "--fix", "compile_mode=off", "--set", "num_workers=0", "--keep-batch-size"),
    *("--fix", "precision=fp32", "--fix", "optimizer_impl=for-loop"),
    *("--baseline", "intra_op_threads=1", "--fix", "intra_op_threads=1"),
)


def processes_of(number: int) -> set[int]:
    """Return the processes of a job, its slurmstepd included."""
    found = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                words = Path(f"/proc/{entry}/cmdline").read_bytes()
                variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                if f"SLURM_JOB_ID={number}".encode() in variables or f"[{number}." in words.decode(errors="replace"):
                    found.add(int(entry))
    return found


@dataclass(frozen=True)
class User:
    """A user of the cluster, who types in the folder of a project that every node sees."""

    folder: Path
    cluster: SlurmCluster

    def run(self, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "autotune", *words],
            cwd=self.folder,
            env={**self.cluster.env, STATE_DIR: str(self.folder / "state"), **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )

    def json(self, *words: str) -> dict[str, Any]:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def submit(self, study: str, *words: str) -> int:
        """Submit a short search; return Slurm's number of its job."""
        (job,) = self.json("submit", "--to", "slurm", *SHORT, "--study", study, *words)["jobs"]
        assert job == {"id": job["id"], "study": study, "state": "queued", "queue": "slurm"}
        return int(job["id"])

    def study(self, name: str) -> StudyFiles:
        return StudyFiles(self.folder / "studies" / name)

    def states(self) -> dict[int, str]:
        return {job["id"]: job["state"] for job in self.json("jobs")["jobs"] if job["queue"] == "slurm"}

    def restarts(self, number: int) -> int:
        """Return how often Slurm has queued a job again."""
        return int(re.findall(r"Restarts=(\d+)", self.cluster.ask("scontrol", "show", "job", str(number)))[0])

    def until_started_again(self, number: int) -> None:
        """Wait until a job that has run is queued again, and let it start: Slurm holds it back for two minutes."""

        def waits() -> bool:
            state = self.cluster.ask("squeue", "--noheader", f"--jobs={number}", "--format=%T").strip()
            return state == "PENDING" and self.restarts(number) > 0 and not processes_of(number)

        wait_until(waits, 60)
        # A node refuses a job that starts in the second in which it was requeued: its old credential is not told from
        # the new one.
        self.cluster.ask("scontrol", "update", f"jobid={number}", "starttime=now+2")

    def log(self, number: int) -> str:
        return self.run("jobs", "log", f"slurm:{number}").stdout

    def until_ended(self, *numbers: int, deadline_s: float = 180.0) -> dict[int, str]:
        found: dict[int, str] = {}

        def ended() -> bool:
            found.update(self.states())
            return all(found[number] not in ("queued", "running", "paused") for number in numbers)

        wait_until(ended, deadline_s)
        return {number: found[number] for number in numbers}

    def until_measuring(self, study: str, *, after: int = 0, deadline_s: float = 90.0) -> None:
        """Wait until a launch of a study runs, and so many of its launches have a result."""
        wait_until(lambda: measuring(self.study(study), after), deadline_s)


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    why = missing()
    if why is None and importlib.util.find_spec("submitit") is None:
        why = "submitit is not installed"
    if why is not None:
        pytest.skip(why)
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def user(slurm: SlurmCluster, tmp_path: Path, workloads: Path) -> Iterator[User]:
    (tmp_path / "tiny.py").write_text((workloads / "tiny.py").read_text())
    yield User(tmp_path, slurm)
    slurm.ask("scancel", "--me", "--state=PENDING")
    slurm.ask("scancel", "--me")
    wait_until(lambda: not slurm.ask("squeue", "--noheader"), 60)
