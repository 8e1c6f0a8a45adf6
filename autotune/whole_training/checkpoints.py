"""The checkpoints of a training: the newest two, each complete or absent, whatever happens to the process.

A file's name ends with a hash of its content, so damage is seen before anything is made of it. ``torch.load`` reads a
file as any other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch

from autotune.errors import MachineError, UsageError
from autotune.files import create_atomic, sweep_temporaries

#: Number of checkpoints that are kept.
KEPT = 2
_NAME = re.compile(r"checkpoint-(\d{6,})-([0-9a-f]{16})\.pt")
_CHUNK_BYTES = 2**22


class Checkpoints:
    """The checkpoints in a folder. One process writes to it at a time: do everything within `held`.

    Args:
        say: called with a sentence about what was found damaged.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._say = say

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder, and keep other trainings out of it.

        Raises:
            UsageError: another training writes to it. MachineError: it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise MachineError(
                f"cannot write checkpoints to {self.folder}: {error.strerror or error}",
                advice="name a folder that can be written with --checkpoints DIR.",
            ) from error
        try:
            try:
                # Not `flock`, which the loader's forked workers would hold for some seconds after a kill.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"another training writes its checkpoints to {self.folder}",
                    advice="wait for its end, or name another folder with --checkpoints DIR.",
                ) from None
            sweep_temporaries(self.folder)
            yield
        finally:
            os.close(descriptor)

    def files(self) -> list[Path]:
        """Return the checkpoints, the newest first."""
        found = [(int(name[1]), path) for path in self.folder.iterdir() if (name := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def save(self, state: dict[str, Any]) -> Path:
        """Write a checkpoint, and remove those that are older than the newest two.

        Raises:
            MachineError: it could not be written. Those that were there still are.
        """
        newest = self.files()[:1]
        number = int(newest[0].name.split("-")[1]) + 1 if newest else 1

        def fill(stream: IO[bytes]) -> str:
            target = _Hashing(stream)
            torch.save(state, cast(IO[bytes], target))
            if target.error is not None:
                raise target.error
            return f"checkpoint-{number:06d}-{target.hexdigest()}.pt"

        try:
            path = create_atomic(self.folder, fill)
        except MachineError as error:
            advice = "free some space"
            if newest:
                advice += "; the same command then goes on from the checkpoint before, which is intact"
            raise MachineError(f"no checkpoint could be written: {error}", advice=f"{advice}.") from error
        for old in self.files()[KEPT:]:
            with contextlib.suppress(OSError):
                old.unlink()
        return path

    def newest(self) -> Path | None:
        """Return the newest checkpoint that is intact; ``None`` if there is none.

        Damaged ones are set aside under another name, and told.

        Raises:
            MachineError: there are checkpoints, and none is intact.
        """
        damaged = []
        for path in self.files():
            why = _damage(path)
            if why is None:
                return path
            aside = _set_aside(path)
            damaged.append(aside)
            self._say(f"the checkpoint {path.name} is damaged ({why}); it is set aside as {aside.name}")
        if damaged:
            raise MachineError(
                f"none of the checkpoints in {self.folder} is intact",
                advice="they are set aside under other names; the same command now begins anew.",
            )
        return None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return what is in an intact checkpoint, its tensors on the CPU.

    Raises:
        MachineError: it cannot be loaded here.
    """
    try:
        # The training that goes on wrote this file, and its workload may keep objects of any class in it.
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
        return found
    except Exception as error:
        # It is what was written, so the reason is here, and it must not be put aside for that.
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise MachineError(
            f"the checkpoint {path.name} is intact, and cannot be loaded here: {why}",
            advice="mend that, and the same command goes on; or name another --checkpoints DIR.",
        ) from error


class _Hashing:
    """A stream for `torch.save`, which hashes what is written.

    It does not raise if the disk is full, but keeps the error: torch's writer would end the process when it is
    destroyed with a file that is not finished.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self._stream.write(data)
                self._hash.update(data)
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Nothing: the file is flushed when it is complete."""

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:16]


def _damage(path: Path) -> str | None:
    """Return what is wrong with a file; ``None`` if its content has the hash in its name."""
    found = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                found.update(chunk)
    except OSError as error:
        return error.strerror or str(error)
    name = _NAME.fullmatch(path.name)
    return None if name and found.hexdigest()[:16] == name[2] else "its content is not what was written"


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"damaged-{path.name}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"damaged-{number}-{path.name}")
    try:
        os.replace(path, aside)
    except OSError as error:
        raise MachineError(
            f"{path} is damaged, and cannot be renamed: {error.strerror}", advice="move it away, and start again."
        ) from error
    return aside
