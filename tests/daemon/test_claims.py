"""Daemons with different state folders do not run jobs on one device at the same time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.base.records import JobState
from autotune.daemon.claims import Claims, Unclaimed
from autotune.daemon.devices import CPU
from autotune.launcher.watch import JOB_MARK

from ..process.alive import wait_until  # noqa: TID252
from .conftest import Daemon, acted_request

A, B = "GPU-aaaa", "GPU-bbbb"
HOLD = """
import sys
from pathlib import Path
from autotune.daemon.claims import Claims
claims = Claims(Path(sys.argv[1]))
claims.take(sys.argv[2])
print("taken", flush=True)
sys.stdin.read()
"""


def free(claims: Claims, *devices: str) -> list[bool]:
    return [claims.obstacle(device) is None for device in devices]


@pytest.mark.parametrize(
    ("held", "left"), [(A, [False, False, True]), (CPU, [False, False, False]), (B, [False, True, False])]
)
def test_who_shares_with_whom_and_a_killed_process_holds_nothing(tmp_path: Path, held: str, left: list[bool]) -> None:
    """A search on the processor shares it with nobody, and a card has one job."""
    claims = Claims(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path), held]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"taken\n"
        assert free(claims, CPU, A, B) == left
        taken = next(device for device, is_free in zip((CPU, A, B), left, strict=True) if not is_free)
        with pytest.raises(Unclaimed, match=r"a job of another daemon .*autotune-.*\.lock"):
            claims.take(taken)
        other.kill()
        other.wait()
    assert free(claims, CPU, A, B) == [True, True, True]


def test_a_claim_ends_when_it_is_released(tmp_path: Path) -> None:
    one, two = Claims(tmp_path), Claims(tmp_path)
    one.take(A)
    one.take(B)
    two_free = free(two, CPU, A, B)
    one.release(A)
    one.release(A)
    assert (two_free, free(two, CPU, A, B)) == ([False] * 3, [False, True, False])
    one.release(B)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert free(two, CPU, A, B) == [True, True, True]
    assert len(os.listdir("/proc/self/fd")) == before


def test_others_can_open_the_files_whatever_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        assert free(Claims(tmp_path), A) == [True]
    finally:
        os.umask(mask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o666, 0o666]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "gone"])
def test_what_is_no_lock_is_said_and_waited_for(tmp_path: Path, kind: str) -> None:
    """Anyone can put something into /tmp. Nothing is followed, nothing hangs, and no job starts unseen by others."""
    folder = tmp_path / "locks"
    path = folder / f"autotune-{A}.lock"
    if kind != "gone":
        folder.mkdir()
    if kind == "link":
        path.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    why = Claims(folder).obstacle(A)
    assert why is not None and "by which daemons agree, cannot be opened" in why
    assert not (tmp_path / "target").exists()


def test_a_lock_that_is_taken_away_is_made_again(tmp_path: Path) -> None:
    one, two = Claims(tmp_path), Claims(tmp_path)
    one.take(A)
    for path in tmp_path.iterdir():
        path.unlink()
    two.take(A)
    assert one.obstacle(B) is None and Claims(tmp_path).obstacle(A) is not None


@pytest.mark.slow
def test_two_daemons_run_their_jobs_one_after_the_other(daemon: Daemon, tmp_path: Path) -> None:
    other = Daemon(tmp_path / "other")
    daemon.start()
    other.start()
    try:
        (first,) = daemon.client.submit(acted_request(tmp_path, "first", "waits"))
        ready = daemon.files.queue.job(first.id).folder / "ready"
        wait_until(ready.exists)
        (second,) = other.client.submit(acted_request(tmp_path, "second", "well"))
        assert "a job of another daemon runs on it" in str(other.client.waits_for(second.id))
        # A job outlives its daemon, and so does its claim.
        daemon.kill()
        (pid,) = daemon.leaders()
        assert JOB_MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        wait_until(lambda: other.client.status()["uptime_s"] > 2)
        assert other.client.job(second.id).state is JobState.QUEUED
        os.kill(pid, 9)
        (ended,) = other.until_ended(second.id)
        assert ended.state is JobState.DONE
    finally:
        other.kill()
