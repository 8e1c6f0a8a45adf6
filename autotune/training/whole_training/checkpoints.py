"""The checkpoints of a training: the newest two, each complete or absent, whatever happens to the process.

A file's name ends with a hash of its content, so damage is seen before anything is made of it; a JSON file beside it
says whose it is, so that this is known before. It holds tensors and plain values only, so that ``torch.load`` reads it
without running anything that it says, whoever has written it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import nn

from autotune.base.errors import MachineError, ResumeRefusedError, UsageError, WorkloadError
from autotune.base.files import create_atomic, open_regular, read_regular, sweep_temporaries, write_atomic
from autotune.training.whole_training.identity import VERSION, Head

#: Number of checkpoints that are kept.
KEPT = 2
#: A head takes some thousand.
_HEAD_BYTES = 2**20
_NAME = re.compile(r"checkpoint-(\d{6,})-([0-9a-f]{16})\.pt")
_CHUNK_BYTES = 2**22
#: `open_regular` raises errors of these numbers for files that autotune would not have written.
_NOT_OURS = (errno.EPERM, errno.ELOOP)
#: How parts of a checkpoint are called by those who wrote what is in them.
_PARTS = {
    "workload": "state(ctx, model)",
    "model": "model.state_dict()",
    "optimizer": "optimizer.state_dict()",
    "scheduler": "scheduler.state_dict()",
}
_ANOTHER = "or name another folder with --checkpoints DIR."


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is intact. ``head`` is what stands beside it."""

    path: Path
    head: Head


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

    def save(self, head: Head, state: dict[str, Any]) -> Path:
        """Write a checkpoint, and remove those that are older than the newest two.

        Raises:
            WorkloadError: the state has something that is not plain; see `check_plain`.
            MachineError: it could not be written. Those that were there still are.
        """
        check_plain(state)
        newest = self.files()[:1]
        number = int(newest[0].name.split("-")[1]) + 1 if newest else 1

        def fill(stream: IO[bytes]) -> str:
            target = _Hashing(stream)
            torch.save(state, cast(IO[bytes], target))
            if target.error is not None:
                raise target.error
            path = self.folder / f"checkpoint-{number:06d}-{target.hexdigest()}.pt"
            # Before the checkpoint gets its name, so that none is ever without. Of one that never does, it is removed.
            write_atomic(_head_of(path), head.model_dump_json(indent=1))
            return path.name

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
        for left in self.folder.glob("checkpoint-*.json"):
            if not left.with_suffix(".pt").exists():
                with contextlib.suppress(OSError):
                    left.unlink()
        return path

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is intact; ``None`` if there is none.

        Damaged ones are set aside under another name, and told.

        Raises:
            ResumeRefusedError: another version has written it, or it belongs to somebody else. Nothing of it was read.
            MachineError: there are checkpoints, and none is intact.
        """
        damaged = []
        for path in self.files():
            head = self._head(path)
            why = head if isinstance(head, str) else _damage(path)
            if why is None and isinstance(head, Head):
                return Checkpoint(path, head)
            aside = _set_aside(path)
            damaged.append(aside)
            self._say(f"the checkpoint {path.name} is damaged ({why}); it is set aside as {aside.name}")
        if damaged:
            raise MachineError(
                f"none of the checkpoints in {self.folder} is intact",
                advice="they are set aside under other names; the same command now begins anew.",
            )
        return None

    def _head(self, path: Path) -> Head | str:
        """Return what stands beside a checkpoint, or what is wrong with it.

        Raises:
            ResumeRefusedError: see `newest`.
        """
        beside = _head_of(path)
        try:
            told = json.loads(read_regular(beside, _HEAD_BYTES, own=True))
            if isinstance(told, dict) and told.get("version", VERSION) != VERSION:
                raise self._of_another_version()
            return Head.model_validate(told)
        except FileNotFoundError:
            # An earlier one has put it into the checkpoint.
            raise self._of_another_version() from None
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise _not_taken_up(beside, error) from error
            return f"{beside.name}: {error.strerror or error}"
        except (ValueError, RecursionError):
            return f"{beside.name} is not what was written"

    def _of_another_version(self) -> ResumeRefusedError:
        return ResumeRefusedError(
            f"the checkpoints in {self.folder} were written by another version of autotune",
            advice=f"go on with that version, {_ANOTHER}",
        )


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return what is in an intact checkpoint, its tensors on the CPU. Nothing that the file says is run.

    Raises:
        ResumeRefusedError: it has more in it than a checkpoint has, or is not this user's.
        MachineError: it cannot be loaded here.
    """
    try:
        with open_regular(path, own=True) as stream:
            found: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=True)
        return found
    except pickle.UnpicklingError as error:
        raise ResumeRefusedError(
            f"the checkpoint {path.name} is not one of autotune's: it holds more than tensors and plain values, "
            "and was not loaded",
            advice=f"remove it, {_ANOTHER}",
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NOT_OURS:
            raise _not_taken_up(path, error) from error
        # It is what was written, so the reason is here, and it must not be put aside for that.
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise MachineError(
            f"the checkpoint {path.name} is intact, and cannot be loaded here: {why}",
            advice="mend that, and the same command goes on; or name another --checkpoints DIR.",
        ) from error


def _not_taken_up(path: Path, error: OSError) -> ResumeRefusedError:
    return ResumeRefusedError(
        f"{path} is not gone on from: {error.strerror}",
        advice="if you trust who wrote it, copy the folder, and name the copy with --checkpoints DIR.",
    )


def check_plain(state: Mapping[str, Any]) -> None:
    """Refuse what could not be loaded again without running code that the file names.

    Args:
        state: parts of a checkpoint by their names.

    Raises:
        WorkloadError: there is something, which is named.
    """
    for name, part in state.items():
        found = _not_plain(part, frozenset())
        if found is not None:
            where, kind = found
            raise WorkloadError(
                f"{_PARTS.get(name, name)}{where} is a {kind.__module__}.{kind.__qualname__}, which no checkpoint can "
                "hold: they hold tensors, numbers, text, and dicts, lists and tuples of them",
                advice="make it one of these, by float(…), torch.from_numpy(…) or its state_dict(), say.",
            )


def _not_plain(value: Any, above: frozenset[int]) -> tuple[str, type] | None:
    """Return the place in a value of one that is not plain, and its kind; ``None`` if there is none.

    Args:
        above: the ids of what the value is in, which may be the value itself.
    """
    kind = type(value)
    if value is None or kind in (bool, float, complex, str, bytes):
        return None
    if kind not in (dict, OrderedDict, list, tuple):
        return None if _comes_back(value) else ("", kind)
    if id(value) in above:
        return None
    above |= {id(value)}
    if kind in (list, tuple):
        for number, inner in enumerate(value):
            if (found := _not_plain(inner, above)) is not None:
                return f"[{number}]{found[0]}", found[1]
        return None
    for key, inner in value.items():
        if (found := _not_plain(key, above)) is not None:
            return f" key {key!r}", found[1]
        if (found := _not_plain(inner, above)) is not None:
            return f"[{key!r}]{found[0]}", found[1]
    # An `OrderedDict` is saved with its attributes.
    return _not_plain(vars(value), above) if kind is OrderedDict else None


def _comes_back(value: Any) -> bool:
    """Return whether ``torch.load`` takes a value back; what it takes differs from version to version."""
    if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        # Without attributes of its own, which are saved with it, there is nothing to try.
        if not vars(value):
            return True
    elif type(value) is int and value.bit_length() < 64:
        return True
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            # Of slow kinds, say: it is only tried.
            warnings.simplefilter("ignore")
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


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


def _head_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _damage(path: Path) -> str | None:
    """Return what is wrong with a file; ``None`` if its content has the hash in its name.

    Raises:
        ResumeRefusedError: it is not this user's.
    """
    found = hashlib.sha256()
    try:
        with open_regular(path, own=True) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                found.update(chunk)
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise _not_taken_up(path, error) from error
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
        with contextlib.suppress(FileNotFoundError):
            os.replace(_head_of(path), _head_of(aside))
    except OSError as error:
        raise MachineError(
            f"{path} is damaged, and cannot be renamed: {error.strerror}", advice="move it away, and start again."
        ) from error
    return aside
