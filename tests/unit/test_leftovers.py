"""Leftover files in shared memory: ours are deleted if their owner is dead, files of other programs are kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.launcher.watch import remove_leftovers


def dead() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    "name", ["torch_{0}_1234_0", "torch_{0}_9_1", "pym-{0}-abc_1", "cuda.shm.0.{0:x}.1"], ids=lambda n: n.split("{")[0]
)
def test_files_of_a_dead_process_are_deleted(tmp_path: Path, name: str) -> None:
    ours, neighbour = dead(), dead()
    for pid in (ours, neighbour):
        (tmp_path / name.format(pid)).write_bytes(b"x" * 100)
    assert remove_leftovers([ours], folder=tmp_path) == [name.format(ours)]
    # The other program's process is also dead, but its files are not ours.
    assert os.listdir(tmp_path) == [name.format(neighbour)]
    assert remove_leftovers([ours], folder=tmp_path) == []


def test_files_of_a_live_process_are_kept(tmp_path: Path) -> None:
    (tmp_path / f"torch_{os.getpid()}_1_0").touch()
    assert remove_leftovers([os.getpid()], folder=tmp_path) == []


def test_only_names_with_their_makers_pid_are_considered(tmp_path: Path) -> None:
    pid = dead()
    names = [f"model_{pid}_1", f"torch_{pid}", f"xtorch_{pid}_1_0", f"torch_{pid}1_1_0", f"psm_{pid}", f"sem.{pid}"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / f"torch_{pid}_folder").mkdir()
    assert remove_leftovers([pid], folder=tmp_path) == []
    assert len(os.listdir(tmp_path)) == len(names) + 1


def test_without_shared_memory_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert remove_leftovers([dead()], folder=tmp_path / "none") == []
