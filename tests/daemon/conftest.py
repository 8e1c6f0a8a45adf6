"""Fixtures for real daemons, each in its own state folder, and for a user's project."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.base.errors import DaemonUnreachableError
from autotune.base.layout import LOCK_DIR, DaemonFiles
from autotune.base.records import ENDED, Job, JobRequest
from autotune.daemon.client import Client
from tests.support import make_job_request, make_study_spec

from ..cli.conftest import WORKLOAD  # noqa: TID252
from ..process.alive import wait_until  # noqa: TID252

SURFACE = Path(__file__).parent.parent.parent / "benchmarks" / "recorded" / "resnet18-jpeg.jsonl"
INTERPRETER = Path(__file__).parent / "interpreter.py"
#: Options that make the machine count as quiet whatever else runs on it.
ALWAYS_QUIET = ("--quiet-for", "0s", "--idle-cores", "1000")
PYTHON = (sys.executable, "-P")


@dataclass
class Daemon:
    """A daemon's state folder, and the daemon process if one was started there."""

    state: Path
    options: tuple[str, ...] = ALWAYS_QUIET
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def files(self) -> DaemonFiles:
        return DaemonFiles(self.state, self.state / "run")

    @property
    def client(self) -> Client:
        return Client(self.files, limit_s=10.0)

    def command(self, *options: str, program: Sequence[str] = ("-m", "autotune")) -> list[str]:
        return [*PYTHON, *program, "daemon", "run", "--state-dir", str(self.state), *(options or self.options)]

    def start(self, *options: str, program: Sequence[str] = ("-m", "autotune"), wait: bool = True) -> Daemon:
        """Start the daemon and wait until it answers.

        Args:
            program: arguments of the interpreter, instead of ``-m autotune``.
        """
        self.process = subprocess.Popen(
            self.command(*options, program=program),
            # The daemons of one test share the devices with each other, but not with those of other tests.
            env={**os.environ, LOCK_DIR: str(self.state.parent), **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if wait:
            self.until_it_answers()
        return self

    def until_it_answers(self) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def answers() -> bool:
            assert self.process is None or self.process.poll() is None, self.log()
            with contextlib.suppress(DaemonUnreachableError):
                found.update(self.client.status())
            return bool(found)

        wait_until(answers)
        return found

    def kill(self) -> None:
        """Kill the daemon with SIGKILL."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def stop(self) -> int:
        """Stop the daemon with SIGTERM and return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def log(self) -> str:
        return self.files.log.read_text() if self.files.log.exists() else ""

    def until_ended(self, *numbers: int, deadline_s: float = 120.0) -> list[Job]:
        """Wait until these jobs have ended. The daemon may be down meanwhile."""
        found: list[Job] = []

        def ended() -> bool:
            with contextlib.suppress(DaemonUnreachableError):
                found[:] = [self.client.job(n) for n in numbers]
                return all(job.state in ENDED for job in found)
            return False

        wait_until(ended, deadline_s)
        return found

    def leaders(self) -> dict[int, str]:
        """Return the living main processes of jobs as ``{pid: mark}``."""
        found = {}
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0") if entry.isdigit() else []
                if b"autotune.daemon.job" in words and any(w.startswith(os.fsencode(self.state)) for w in words):
                    found[int(entry)] = words[words.index(b"autotune.daemon.job") + 3].decode()
        return found


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with an empty queue that the test starts. It is killed after the test together with its jobs."""
    found = Daemon(tmp_path / "state")
    yield found
    found.kill()
    for pid in found.leaders():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a user's workload, ``tiny.py``."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "tiny.py").write_text(WORKLOAD)
    return folder


def replay_request(folder: Path, name: str, *, seed: int = 0, budget_s: float = 120.0, **changes: Any) -> JobRequest:
    """Make a request for a job that searches a recorded surface."""
    spec = make_study_spec(name, mark=f"mark-of-{name}", model="recorded", budget_s=budget_s, seed=seed)
    places = {"studies_dir": str(folder / "studies"), "folder": str(folder), "python": sys.executable}
    return make_job_request(spec=spec, label="replay", replay=str(SURFACE), **{**places, **changes})


def real_request(project: Path, name: str, *, budget_s: float = 10.0, trials: int = 2, **changes: Any) -> JobRequest:
    """Make a request for a job that runs a real search."""
    spec = make_study_spec(
        name,
        mark=f"mark-of-{name}",
        model=str(project / "tiny.py"),
        device="cpu",
        budget_s=budget_s,
        trials=trials,
        allow_busy=True,
        fixed={"compile_mode": "off", "workload.pause": "false"},
        narrowed={"num_workers": ("0",)},
    )
    places = {"studies_dir": str(project / "studies"), "folder": str(project), "python": sys.executable}
    environment = {"PATH": os.environ["PATH"]}
    return make_job_request(spec=spec, label="tiny", environment=environment, **{**places, **changes})


def acted_request(folder: Path, name: str, behaviour: str, **changes: Any) -> JobRequest:
    """Make a request for a job whose process runs ``interpreter.py`` with a given behaviour instead of a search."""
    environment = {"BEHAVIOUR": behaviour, "PATH": os.environ["PATH"]}
    places = {"studies_dir": str(folder / "studies"), "folder": str(folder), "environment": environment}
    spec = make_study_spec(name, mark=f"mark-of-{name}", device="cpu")
    return make_job_request(spec=spec, python=str(INTERPRETER), **{**places, **changes})


def replayed(daemon: Daemon, number: int) -> dict[str, Any]:
    """Return the result of a replayed search."""
    found = json.loads(daemon.files.queue.job(number).replayed.read_text())
    assert isinstance(found, dict)
    return found
