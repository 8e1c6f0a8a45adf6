"""A leader that dies because /dev/shm is full is identified by the free space at that time, not by the signal alone."""

import signal
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from autotune.base.clock import SystemClock
from autotune.base.layout import LaunchFiles
from autotune.base.records import TrialStatus
from autotune.launcher.result import verdict
from autotune.launcher.watch import Watch

from .alive import on_small_disk

MIB = 2**20
RUN_SPECS = Path(__file__).parent / "run_specs.py"


@pytest.mark.slow
def test_a_leader_that_touches_a_page_too_many(fault, tmp_path):
    (tmp_path / "spec.json").write_text(fault("signals.outgrow_shared_memory", 2).model_dump_json())
    words = (sys.executable, RUN_SPECS, f"test-{uuid4().hex}", tmp_path / "spec.json")
    result = on_small_disk("/dev/shm", "4m", *words)[-1]["result"]
    assert (result["status"], result["phase"], result["exit_code"]) == ("shm_exhausted", "warmup", -signal.SIGBUS)
    assert "SIGBUS with 0.0 of 4 MiB free in /dev/shm" in result["cause"]
    assert "--shm-size" in result["advice"] and not result["transient"]


@pytest.mark.parametrize(
    ("free", "size", "status"),
    [
        (0, 64 * MIB, TrialStatus.SHM_EXHAUSTED),
        (MIB - 1, 64 * MIB, TrialStatus.SHM_EXHAUSTED),
        (60 * MIB, 2**33, TrialStatus.SHM_EXHAUSTED),
        (32 * MIB, 64 * MIB, TrialStatus.CRASHED),
        (0, 0, TrialStatus.CRASHED),
    ],
    ids=["full", "nearly full", "a large one nearly full", "half full", "there is none"],
)
def test_a_bus_error_is_what_there_was_too_little_of(fault, free, size, status):
    spec = fault()
    files = LaunchFiles(Path(spec.folder))
    files.folder.mkdir()
    watch = Watch(spec, SystemClock(), lambda beat: None, lambda: False)
    result = verdict(spec, files, -signal.SIGBUS, watch, kernel_killed=False, shared_memory=(free, size))
    assert result.status is status and "SIGBUS" in result.cause
    assert result.transient == (status is TrialStatus.CRASHED)


@pytest.mark.parametrize(
    ("words", "no_thread"),
    [
        ("libgomp: Thread creation failed: Resource temporarily unavailable", True),
        ("self.pid = os.fork()\nBlockingIOError: [Errno 11] Resource temporarily unavailable", True),
        ("zmq.error.Again: Resource temporarily unavailable", False),
    ],
)
def test_a_crash_has_the_cause_that_its_last_words_tell(fault, words, no_thread):
    """Of what else may be unavailable for a moment, a log may speak at any time."""
    spec = fault()
    files = LaunchFiles(Path(spec.folder))
    files.folder.mkdir()
    files.stderr.write_text(f"{words}\n")
    watch = Watch(spec, SystemClock(), lambda beat: None, lambda: False)
    result = verdict(spec, files, -signal.SIGSEGV, watch, kernel_killed=False, shared_memory=(MIB, MIB))
    assert ("since no thread or process could be started" in result.cause) is no_thread
