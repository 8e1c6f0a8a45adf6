"""Launches that fail on demand, each followed by checks of everything that must hold after any launch."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from autotune.base.layout import LaunchFiles
from autotune.base.records import MeasurePlan, TrialResult, TrialStatus
from autotune.launcher import STUDY_MARK

from ..alive import marked  # noqa: TID252

#: Keeps measuring until something happens.
ENDLESS = MeasurePlan(target_halfwidth=1e-9, min_windows=2, min_window_s=0.02, max_measure_s=60.0)
#: Maximum seconds until the next launch begins, so that nothing of the previous one may be in its way.
CLEAN_S = 15.0
REPETITIONS = [
    pytest.param(0, id="0"),
    *(pytest.param(n, id=f"stress{n}", marks=pytest.mark.stress) for n in range(20)),
]
SHM = Path("/dev/shm")
NEIGHBOUR = """
import sys, time
print("ready", flush=True)
time.sleep(10000)
"""


@dataclass(frozen=True)
class Ended:
    """The end of a launch, and the contents of its folder."""

    result: TrialResult
    files: LaunchFiles
    seconds: float

    @property
    def seen(self):
        """Status and phase."""
        return self.result.status, self.result.phase

    @property
    def stderr(self) -> str:
        return self.files.stderr.read_text(errors="replace")


@pytest.fixture(params=REPETITIONS)
def repetition(request):
    """Once in a normal run of the suite, twenty times under ``-m stress``."""
    return request.param


@pytest.fixture(scope="session")
def neighbour():
    """A process of another study with its own file in /dev/shm, and a file there that belongs to no process."""
    env = {**os.environ, STUDY_MARK: f"neighbour-{uuid4().hex}"}
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], env=env, stdout=subprocess.PIPE)
    process.stdout.readline()
    names = [SHM / f"torch_{process.pid}_1_1", SHM / f"psm_{uuid4().hex[:8]}"]
    for name in names:
        name.write_text("a neighbour's")
    yield process, names
    untouched = process.poll() is None and all(name.exists() for name in names)
    process.kill()
    process.communicate()
    for name in names:
        name.unlink(missing_ok=True)
    assert untouched


@pytest.fixture
def ended(process_launcher, study_mark, neighbour, fault, repetition) -> Callable[..., Ended]:
    """``ended(name, at, **spec)``: run a faulty launch; check that nothing of it is left and the next one works."""

    def run(name, at="load", *, on_beat=lambda beat: None, stop=lambda: False, **changes) -> Ended:
        spec = fault(name, at, **changes)
        began = time.monotonic()
        result = process_launcher.run(spec, on_beat=on_beat, stop=stop)
        ended = Ended(result, LaunchFiles(Path(spec.folder)), time.monotonic() - began)
        nothing_is_left(ended, study_mark, neighbour)
        after = process_launcher.run(fault(folder="next"), on_beat=lambda beat: None, stop=lambda: False)
        assert after.status is TrialStatus.COMPLETE, after.cause
        assert after.measurement is not None and not after.unclean_exit
        assert list(marked(study_mark).values()) == [os.getpid()]
        assert time.monotonic() - began - ended.seconds < CLEAN_S
        return ended

    return run


def nothing_is_left(ended, mark, neighbour):
    # Immediately, not within 15 s: `run` must not return before.
    assert list(marked(mark).values()) == [os.getpid()], "more than the template is alive"
    for pid in noted(ended, "left-behind"):
        assert not psutil.pid_exists(int(pid))
        assert not list(SHM.glob(f"torch_{pid}_*"))
    assert not [name for name in noted(ended, "shared-memory") if (SHM / name).exists()]
    held = ended.files.folder / "held"
    if held.exists():
        # A process that keeps forking itself can be missed when looking at one at a time; its lock cannot.
        with held.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process, files = neighbour
    assert process.poll() is None
    assert all(file.exists() for file in files)


def noted(ended, name):
    note = ended.files.folder / name
    return note.read_text().split() if note.exists() else []
