"""Crash-safe files and locks: each fault is injected, and then the next write must succeed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.base.errors import MachineError
from autotune.base.files import (
    exclusive_lock,
    has_room,
    no_room,
    open_regular,
    read_regular,
    sweep_temporaries,
    write_atomic,
)

from ..process.alive import wait_until  # noqa: TID252

DEADLINE_S = 20.0


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(code: str, *arguments: object) -> tuple[int, str, str]:
    child = python(code, *arguments)
    out, err = child.communicate(timeout=DEADLINE_S)
    return child.returncode, out, err


class TestWrite:
    def test_creates_and_replaces_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        write_atomic(path, "grün\n")
        assert path.read_bytes() == "grün\n".encode()
        write_atomic(path, b"\x00\xff")
        assert path.read_bytes() == b"\x00\xff"
        assert os.listdir(tmp_path) == ["a.json"]

    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
    def test_respects_the_umask(self, tmp_path: Path, umask: int, mode: int) -> None:
        before = os.umask(umask)
        try:
            write_atomic(tmp_path / "a", "x")
        finally:
            os.umask(before)
        assert (tmp_path / "a").stat().st_mode & 0o777 == mode

    @pytest.mark.parametrize("call", ["replace", "fsync", "fchmod", "fdopen"])
    def test_a_failing_disk_leaves_only_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        path = tmp_path / "a"
        write_atomic(path, "old")

        def fail(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(MachineError, match="No space left on device") as caught:
                write_atomic(path, "new")
        assert caught.value.advice and str(path) in str(caught.value)
        assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]
        write_atomic(path, "new")
        assert path.read_text() == "new"

    def test_a_file_above_the_size_limit(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        write_atomic(path, "old")
        code = (
            "import pathlib, resource, sys\n"
            "from autotune.base.errors import MachineError\n"
            "from autotune.base.files import write_atomic\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
            "try:\n    write_atomic(pathlib.Path(sys.argv[1]), 'x' * 100_000)\n"
            "except MachineError as error:\n    print(error)\n"
            "write_atomic(pathlib.Path(sys.argv[1]), 'small')\n"
        )
        code_, out, err = run(code, path)
        assert code_ == 0, err
        assert "cannot write" in out and "large" in out
        assert path.read_text() == "small" and os.listdir(tmp_path) == ["a"]

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for folder in ("gone", "file"):
            with pytest.raises(MachineError):
                write_atomic(tmp_path / folder / "a", "x")

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_killed_in_the_middle(self, tmp_path: Path, call: str) -> None:
        path = tmp_path / "deep" / "a"
        path.parent.mkdir()
        write_atomic(path, "old")
        code = (
            "import os, pathlib, signal, sys\n"
            "from autotune.base.files import write_atomic\n"
            "setattr(os, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
            "write_atomic(pathlib.Path(sys.argv[1]), 'new')\n"
        )
        assert run(code, path, call)[0] == -signal.SIGKILL
        assert path.read_text() == "old"
        assert len(os.listdir(path.parent)) == 2
        assert sweep_temporaries(tmp_path) == 1
        assert os.listdir(path.parent) == ["a"]
        assert sweep_temporaries(tmp_path) == 0

    def test_a_reader_sees_the_old_or_the_new_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        write_atomic(path, "a" * 300_000)
        code = (
            "import pathlib, sys\n"
            "from autotune.base.files import write_atomic\n"
            "for n in range(100):\n    write_atomic(pathlib.Path(sys.argv[1]), 'ab'[n % 2] * 300_000)\n"
        )
        writer = python(code, path)
        seen = set()
        while writer.poll() is None:
            text = path.read_text()
            assert len(text) == 300_000
            seen.add("".join(sorted(set(text))))
        _, err = writer.communicate()
        assert writer.returncode == 0, err
        assert seen <= {"a", "b"}


HOLD = (
    "import pathlib, subprocess, sys\n"
    "from autotune.base.files import exclusive_lock\n"
    "with exclusive_lock(pathlib.Path(sys.argv[1])) as free:\n"
    "    child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL) if 'child' in sys.argv else None\n"
    "    print(free, child.pid if child else 0, flush=True)\n"
    "    sys.stdin.read()\n"
)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds ``tmp_path/lock``, and has a child."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock"), "child"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdin is not None
    free, grandchild = child.stdout.readline().split()
    assert free == "True"
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        os.kill(int(grandchild), signal.SIGKILL)


def is_free(path: Path) -> bool:
    with exclusive_lock(path) as free:
        return free


class TestLock:
    def test_has_one_holder(self, tmp_path: Path) -> None:
        path = tmp_path / "lock"
        with exclusive_lock(path) as first:
            assert first and not is_free(path)
            # The refused attempt has not released it.
            assert not is_free(path)
        assert is_free(path)

    def test_is_released_when_the_body_raises(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="inside"), exclusive_lock(tmp_path / "lock"):
            raise RuntimeError("inside")
        assert is_free(tmp_path / "lock")

    def test_is_held_across_processes_and_released_when_the_holder_dies(
        self, tmp_path: Path, holder: subprocess.Popen[str]
    ) -> None:
        path = tmp_path / "lock"
        assert not is_free(path)
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=DEADLINE_S)
        # Its child is still alive, and has not inherited the lock.
        wait_until(lambda: is_free(path))

    def test_is_released_at_a_normal_exit(self, tmp_path: Path, holder: subprocess.Popen[str]) -> None:
        assert not is_free(tmp_path / "lock")
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait(timeout=DEADLINE_S)
        assert is_free(tmp_path / "lock")

    def test_a_place_that_cannot_hold_a_lock_is_a_machine_error(self, tmp_path: Path) -> None:
        with pytest.raises(MachineError), exclusive_lock(tmp_path / "gone" / "lock"):
            pass


class TestRoom:
    def test_is_tested_without_leaving_files(self, tmp_path: Path) -> None:
        assert has_room(tmp_path)
        assert os.listdir(tmp_path) == []

    def test_a_missing_folder_is_not_full(self, tmp_path: Path) -> None:
        assert has_room(tmp_path / "none")

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk_is_recognised_by_the_cause_of_an_error(self, tmp_path: Path, number: int) -> None:
        full = OSError(number, os.strerror(number))
        told = MachineError("cannot write")
        told.__cause__ = full
        while_saying_so = ValueError("another")
        while_saying_so.__context__ = told
        assert no_room(full) and no_room(told) and no_room(while_saying_so)
        assert not no_room(OSError(errno.EACCES, "denied")) and not no_room(MachineError("cannot write"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
class TestOwn:
    def test_a_file_of_somebody_else_is_not_opened(self, tmp_path: Path) -> None:
        path = tmp_path / "theirs"
        path.write_bytes(b"theirs")
        assert read_regular(path, 10, own=True) == b"theirs"
        os.chown(path, 12345, 12345)
        assert read_regular(path, 10) == b"theirs"
        with pytest.raises(PermissionError) as caught:
            open_regular(path, own=True)
        assert caught.value.strerror == "it belongs to the user 12345, not to you"

    def test_where_the_file_system_gives_all_files_to_one_user_that_user_is_this_one(self, tmp_path: Path) -> None:
        # As on a server that squashes root: what is made there belongs to somebody else.
        code = (
            "import ctypes, os, sys; from pathlib import Path; from autotune.base.files import read_regular\n"
            # The folders above are not open to others.
            "os.chdir(sys.argv[1]); ctypes.CDLL(None).setfsuid(12345)\n"
            "print(read_regular(Path('ours'), 10, own=True))"
        )
        folder = tmp_path / "served"
        folder.mkdir()
        (folder / "ours").write_bytes(b"ours")
        for path in (folder, folder / "ours"):
            os.chown(path, 12345, 12345)
        assert run(code, folder) == (0, "b'ours'\n", "")
        os.chown(folder / "ours", 54321, 54321)
        status, _, said = run(code, folder)
        assert status == 1 and "it belongs to the user 54321, not to you" in said


def test_a_link_says_that_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"there")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert read_regular(tmp_path / "link", 10, follow=True) == b"there"
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_regular(tmp_path / "link")
