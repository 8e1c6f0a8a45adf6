"""Reading real files into the page cache."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from autotune.base.clock import SystemClock
from autotune.machine import page_cache
from tests.support import FakeClock

BIG = 3 * 2**20 + 123
AMPLE = {"limit_bytes": 2**30, "limit_s": 60.0}


def drop(path: Path) -> bool:
    """Drop a file from the page cache; return whether that worked, which some file systems do not support."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return not resident(path)
    finally:
        os.close(descriptor)


def resident(path: Path) -> bool:
    """Whether all of a file is in the page cache."""
    descriptor, size = os.open(path, os.O_RDONLY), path.stat().st_size
    try:
        return page_cache._resident_pages(descriptor, size) == -(-size // mmap.PAGESIZE)
    finally:
        os.close(descriptor)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "big").write_bytes(os.urandom(BIG))
    (root / "a" / "b" / "small").write_bytes(b"x" * 1000)
    (root / "empty").touch()
    return root


def test_files_that_are_read_are_in_the_cache(folder: Path) -> None:
    big = folder / "a" / "big"
    if not drop(big):
        pytest.skip("this file system keeps its files in memory")
    assert page_cache.warm(folder, **AMPLE, clock=SystemClock()) == "warm"
    assert resident(big)
    assert page_cache.warm(folder, **AMPLE, clock=SystemClock()) == "warm"


def test_cached_files_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page_cache.warm(folder, **AMPLE, clock=SystemClock()) == "warm"
    read: list[int] = []
    readv = os.readv

    def counted(descriptor: int, buffers: list[memoryview]) -> int:
        read.append(readv(descriptor, buffers))
        return read[-1]

    monkeypatch.setattr(os, "readv", counted)
    assert page_cache.warm(folder, **AMPLE, clock=SystemClock()) == "warm"
    # Small files are read in any case, because checking would take longer.
    assert sum(read) == 1000


def test_progress_ends_at_the_total(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    page_cache.warm(folder, **AMPLE, clock=SystemClock(), on_progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (BIG + 1000, BIG + 1000)
    assert told == sorted(told)


def test_a_folder_larger_than_memory_is_not_read_at_all(folder: Path) -> None:
    told: list[int] = []
    limit = BIG + 999
    answer = page_cache.warm(
        folder, limit_bytes=limit, limit_s=60, clock=SystemClock(), on_progress=lambda done, _: told.append(done)
    )
    assert (answer, told) == ("cold", [])
    assert page_cache.warm(folder, limit_bytes=limit + 1, limit_s=60, clock=SystemClock()) == "warm"


def test_reading_ends_at_the_time_limit(folder: Path) -> None:
    clock = FakeClock()

    def slow(done: int, total: int) -> None:
        clock.advance(1.0)

    assert page_cache.warm(folder, limit_bytes=2**30, limit_s=0.5, clock=clock, on_progress=slow) == "cold"


def test_links_inside_the_folder_are_accepted(folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to(folder / "a" / "big")
    (folder / "a" / "b" / "round").symlink_to(folder)
    itself = tmp_path / "itself"
    itself.symlink_to(folder)
    assert page_cache.warm(itself, **AMPLE, clock=SystemClock()) == "warm"


def test_links_to_the_outside_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (folder / "out").symlink_to(tmp_path / "outside")
    assert page_cache.warm(folder, **AMPLE, clock=SystemClock()) == "cold"


def test_unreadable_files_are_cold(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page_cache.warm(tmp_path / "nothing", **AMPLE, clock=SystemClock()) == "cold"
    assert page_cache.warm(folder / "empty", **AMPLE, clock=SystemClock()) == "cold"

    # A failing disk. Permissions would not stop a test that runs as root.
    def refuse(descriptor: int, buffers: list[memoryview]) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "readv", refuse)
    assert page_cache.warm(folder, **AMPLE, clock=SystemClock()) == "cold"


def test_special_files_are_ignored(folder: Path) -> None:
    # Reading a pipe would block forever.
    os.mkfifo(folder / "pipe")
    assert page_cache.warm(folder, **AMPLE, clock=SystemClock()) == "warm"


def test_files_are_dropped_from_the_cache(folder: Path) -> None:
    big = folder / "a" / "big"
    if not drop(big):
        pytest.skip("this file system keeps its files in memory")
    assert page_cache.warm(folder, **AMPLE, clock=SystemClock()) == "warm"
    assert page_cache.evict(folder, limit_s=60.0, clock=SystemClock())
    assert not resident(big)
    assert big.stat().st_size == BIG


def test_dropping_that_does_not_work_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: None)
    page_cache.warm(folder, **AMPLE, clock=SystemClock())
    assert not page_cache.evict(folder, limit_s=60.0, clock=SystemClock())
    # Where the kernel does not tell, nothing is claimed.
    monkeypatch.setattr(page_cache, "_resident_pages", lambda descriptor, size: None)
    assert not page_cache.evict(folder, limit_s=60.0, clock=SystemClock())
    assert not page_cache.evict(folder / "missing", limit_s=60.0, clock=SystemClock())
    assert not page_cache.evict(folder, limit_s=-1.0, clock=FakeClock())
