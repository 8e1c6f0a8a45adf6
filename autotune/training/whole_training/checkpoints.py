"""Everything that a training needs to resume."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import pickle
import random
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autotune.base.errors import MachineError, ResumeRefusedError, UsageError, WorkloadError
from autotune.base.files import create_atomic, open_regular, read_regular, sweep_temporaries, write_atomic
from autotune.base.ranks import own_rank
from autotune.base.records import DataRef, Record, WorkloadRef
from autotune.knobs import spell
from autotune.training.exchange import largest
from autotune.training.feed import SampleOrder
from autotune.workload.catalog import source_hash
from autotune.workload.contract import Context, Wrapper

# Which training a checkpoint belongs to: what must be the same for the losses to be those of one training.
#
# A JSON file beside the checkpoint records it, so that it is known before anything of the checkpoint is loaded.

#: Version of the content of a checkpoint, and of its head.
VERSION = 3


class Head(Record):
    """The content of the JSON file beside a checkpoint.

    Attributes:
        version: see `VERSION`. torch: the version of torch.
        identity: that of the training, as `identity_of` returns it. mark: that of the training, for trackers.
        epochs: the number that the training was to have. epoch: the number of the checkpoint's epoch, from 0 on.
        steps: the number taken. over: whether all those of the epoch were taken.
    """

    version: int
    torch: str
    identity: dict[str, str]
    mark: str
    epochs: int
    epoch: int
    steps: int
    over: bool


def identity_of(
    ref: WorkloadRef, ctx: Context, config: Mapping[str, bool | int | float | str], facts: Mapping[str, object]
) -> dict[str, str]:
    """Return what identifies a training, by name, as text.

    Args:
        facts: what only this training knows, such as the number of its samples.
    """
    data: DataRef = ctx.data
    identity = {
        "model": ref.name,
        "code of the workload": (ref.sha256 or _hash_of(ref))[:16],
        "data": data.kind,
        "files of the data": data.identity[:16],
        "image size": str(ctx.image_size),
        "seed": str(ctx.seed),
        "ranks": str(ctx.ranks),
    }
    identity |= {f"--arg {name}": value for name, value in ctx.args.items()}
    identity |= {name: spell(value) for name, value in config.items()}
    return identity | {name: str(value) for name, value in facts.items()}


def _hash_of(ref: WorkloadRef) -> str:
    """Return the hash of a workload that was given as a module, and has been imported."""
    file = getattr(sys.modules.get(ref.module), "__file__", None)
    return source_hash(Path(file)) if file else ""


def refuse_another(then: Mapping[str, str], now: Mapping[str, str], folder: str) -> None:
    """Refuse checkpoints of another training.

    Raises:
        ResumeRefusedError: something is different.
    """
    absent = "not there"
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if names:
        changes = [f"{name} was {then.get(name, absent)}, and is {now.get(name, absent)}" for name in names]
        raise ResumeRefusedError(
            f"the checkpoints in {folder} are of another training: {'; '.join(changes)}",
            advice="undo the change, or name another folder with --checkpoints DIR.",
        )


def check(head: Head, identity: Mapping[str, str], epochs: int, folder: Path, say: Callable[[str], None]) -> None:
    """Refuse a checkpoint from which a training cannot resume.

    Args:
        head: that of the checkpoint. identity: that of the training, as `identity_of` returns it. epochs: the number
            that it is to have.
        say: called with a sentence about what may differ.

    Raises:
        ResumeRefusedError: the checkpoint is of another training, or already beyond these epochs.
    """
    refuse_another(head.identity, identity, str(folder))
    if head.epoch >= epochs:
        raise ResumeRefusedError(
            f"the checkpoints in {folder} are in epoch {head.epoch + 1} already",
            advice="give at least so many --epochs, or name another folder with --checkpoints DIR.",
        )
    if head.torch != str(torch.__version__):
        say(
            f"the checkpoint was written with torch {head.torch}, and this is {torch.__version__}: "
            "the losses may differ in their last digits"
        )


# The checkpoints of a training: the newest two, each complete or absent, whatever happens to the process.
#
# A file's name ends with a hash of its content, so that damage is detected before anything is loaded; a JSON file
# beside it says to which training it belongs, so that this is known before as well. It holds tensors and plain values
# only, so that ``torch.load`` reads it without running code that it names, whoever has written it.

#: Number of checkpoints to keep.
KEPT = 2
#: The most bytes of a head, which takes a few thousand.
_HEAD_BYTES = 2**20
_NAME = re.compile(r"checkpoint-(\d{6,})-([0-9a-f]{16})\.pt")
_CHUNK_BYTES = 2**22
#: `open_regular` raises errors with these numbers for files that autotune would not have written.
_NOT_OURS = (errno.EPERM, errno.ELOOP)
#: The parts of a checkpoint, by the names that the authors of their content know them by.
_PARTS = {
    "workload": "state(ctx, model)",
    "model": "model.state_dict()",
    "optimizer": "optimizer.state_dict()",
    "scheduler": "scheduler.state_dict()",
}
_ANOTHER = "or name another folder with --checkpoints DIR."


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint. ``head`` is what the JSON file beside it holds."""

    path: Path
    head: Head


class Checkpoints:
    """The checkpoints in a folder. Only one process may write to it at a time, so do everything within `held`.

    Args:
        say: called with a sentence about each damaged checkpoint.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._say = say

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder, and keep other trainings out of it.

        Raises:
            UsageError: another training writes to the folder. MachineError: it cannot be made.
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
        numbered = [(int(name[1]), path) for path in self.folder.iterdir() if (name := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(numbered, reverse=True)]

    def save(self, head: Head, state: dict[str, Any]) -> Path:
        """Write a checkpoint, and remove all but the newest two.

        Raises:
            WorkloadError: the state has something that is not plain; see `check_plain`.
            MachineError: it could not be written. The earlier ones are still there.
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
            # Before the checkpoint gets its name, so that none is ever without. Orphaned heads are removed below.
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
        for orphan in self.folder.glob("checkpoint-*.json"):
            if not orphan.with_suffix(".pt").exists():
                with contextlib.suppress(OSError):
                    orphan.unlink()
        return path

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is intact; ``None`` if there is none.

        Damaged ones are set aside under another name, and reported.

        Raises:
            ResumeRefusedError: another version has written it, or it belongs to another user. Nothing of it was read.
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
        """Return the head of a checkpoint, or what is wrong with it.

        Raises:
            ResumeRefusedError: see `newest`.
        """
        beside = _head_of(path)
        try:
            content = json.loads(read_regular(beside, _HEAD_BYTES, own=True))
            if isinstance(content, dict) and content.get("version", VERSION) != VERSION:
                raise self._of_another_version()
            return Head.model_validate(content)
        except FileNotFoundError:
            # An earlier version put the head into the checkpoint.
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
    """Return the content of an intact checkpoint, its tensors on the CPU. No code that the file names is run.

    Raises:
        ResumeRefusedError: it holds more than a checkpoint does, or does not belong to this user.
        MachineError: it cannot be loaded here.
    """
    try:
        with open_regular(path, own=True) as stream:
            state: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=True)
        return state
    except pickle.UnpicklingError as error:
        raise ResumeRefusedError(
            f"the checkpoint {path.name} is not one of autotune's: it holds more than tensors and plain values, "
            "and was not loaded",
            advice=f"remove it, {_ANOTHER}",
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NOT_OURS:
            raise _not_taken_up(path, error) from error
        # The file is as it was written, so the reason lies in this environment, and it must not be set aside.
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
    """Refuse anything that could not be loaded again without running code that the file names.

    Args:
        state: parts of a checkpoint by their names.

    Raises:
        WorkloadError: there is such a value; the message says where.
    """
    for name, part in state.items():
        culprit = _not_plain(part, frozenset())
        if culprit is not None:
            place, kind = culprit
            raise WorkloadError(
                f"{_PARTS.get(name, name)}{place} is a {kind.__module__}.{kind.__qualname__}, which no checkpoint can "
                "hold: they hold tensors, numbers, text, and dicts, lists and tuples of them",
                advice="make it one of these, by float(…), torch.from_numpy(…) or its state_dict(), say.",
            )


def _not_plain(value: Any, above: frozenset[int]) -> tuple[str, type] | None:
    """Return the place within a value of one that is not plain, and its type; ``None`` if there is none.

    Args:
        above: the ids of the containers around the value, which may include the value itself.
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
            if (culprit := _not_plain(inner, above)) is not None:
                return f"[{number}]{culprit[0]}", culprit[1]
        return None
    for key, inner in value.items():
        if (culprit := _not_plain(key, above)) is not None:
            return f" key {key!r}", culprit[1]
        if (culprit := _not_plain(inner, above)) is not None:
            return f"[{key!r}]{culprit[0]}", culprit[1]
    # An `OrderedDict` is saved with its attributes.
    return _not_plain(vars(value), above) if kind is OrderedDict else None


def _comes_back(value: Any) -> bool:
    """Return whether ``torch.load`` accepts a value; what it accepts differs from version to version."""
    if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        # Without attributes of its own, which are saved with it, there is nothing to try.
        if not vars(value):
            return True
    elif type(value) is int and value.bit_length() < 64:
        return True
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            # Warnings about slow types, for instance, do not matter: this is only an attempt.
            warnings.simplefilter("ignore")
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


class _Hashing:
    """A stream for `torch.save` that hashes what is written.

    It does not raise if the disk is full, but keeps the error: torch's writer would end the process on being destroyed
    with an unfinished file.
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
        """Do nothing: the file is flushed when it is complete."""

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:16]


def _head_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _damage(path: Path) -> str | None:
    """Return what is wrong with a file; ``None`` if its content has the hash in its name.

    Raises:
        ResumeRefusedError: it does not belong to this user.
    """
    digest = hashlib.sha256()
    try:
        with open_regular(path, own=True) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise _not_taken_up(path, error) from error
        return error.strerror or str(error)
    name = _NAME.fullmatch(path.name)
    return None if name and digest.hexdigest()[:16] == name[2] else "its content is not what was written"


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


# Random numbers that do not depend on when a training was interrupted.
#
# The making of batches and the training draw from separate streams. That of a batch is seeded by the epoch and the
# batch, in whichever process makes it, so that a training resumed in the middle of an epoch gets the same
# augmentation. The training (dropout, noise) draws from the process's own generators, whose states are kept in the
# checkpoints. Where one process does both, each step is seeded as well.


def seed_of(*parts: object) -> int:
    """Return a seed below 2**63 that differs with each of the parts."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed for what one of several ranks draws for itself, such as augmentation and dropout. The first rank
    has the seed of the training."""
    return seed_of(seed, "rank", rank) if rank else seed


def sow(seed: int) -> None:
    """Seed the generators of Python, NumPy, and torch on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not `torch.manual_seed`, which also seeds the cards' generators.
    torch.default_generator.manual_seed(seed)


def sow_with(seed: int, device: torch.device) -> None:
    """Do what `sow` does, and seed the generator of the device."""
    sow(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy, and torch on the CPU and the device, in types that a
    checkpoint may hold."""
    generators: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _with_lists(np.random.get_state()),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    return generators


def _with_lists(state: Any) -> Any:
    """Return a state of NumPy's with lists in place of arrays, which NumPy accepts as well."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {name: _with_lists(value) for name, value in state.items()}
    return tuple(map(_with_lists, state)) if isinstance(state, tuple) else state


def restore(found: dict[str, Any], device: torch.device) -> None:
    """Set the states that `states` returned."""
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    if "cuda" in found and device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], device)


@contextlib.contextmanager
def drawing_beside(seed: int, device: torch.device) -> Iterator[None]:
    """Let everything draw from a separate stream, and afterwards from the training's again.

    Args:
        device: its generator is seeded and restored, besides those on the CPU.
    """
    before = states(device)
    sow_with(seed, device)
    try:
        yield
    finally:
        restore(before, device)


class EpochSeeds:
    """Seeds the making of batches. The epoch is shared with the loader's workers, which may live longer than one epoch.

    Args:
        seed: that of the training. shared: whether there are workers.
    """

    def __init__(self, seed: int, *, shared: bool) -> None:
        self._seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64)
        if shared:
            self._epoch.share_memory_()

    def begin(self, epoch: int) -> None:
        """Say which epoch is read next. Call it before the loader's iterator is made."""
        self._epoch.fill_(epoch)

    def sow(self, *what: object) -> None:
        """Seed this process for what it makes next."""
        sow(seed_of(self._seed, int(self._epoch), *what))


class Seeded(Wrapper, Dataset[Any]):
    """A data set that seeds the process for each batch, by the epoch and the first index in it.

    The collate function draws from the same stream, as PyTorch's fetch calls it right afterwards.
    """

    def __init__(self, inner: Dataset[Any], seeds: EpochSeeds) -> None:
        super().__init__(inner)
        self._seeds = seeds

    def __getitem__(self, index: Any) -> Any:
        self._seeds.sow(index)
        return self.inner[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        self._seeds.sow(indices[0])
        return self.many(indices)


class SeededStream(Wrapper, IterableDataset[Any]):
    """An iterable data set that seeds the process as each iteration begins, by the epoch and the worker."""

    def __init__(self, inner: IterableDataset[Any], seeds: EpochSeeds) -> None:
        super().__init__(inner)
        self._seeds = seeds

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        self._seeds.sow("stream", 0 if worker is None else worker.id)
        return iter(self.inner)


def seeded(dataset: Dataset[Any], seeds: EpochSeeds) -> Dataset[Any]:
    """Return the data set with its batches seeded."""
    return SeededStream(dataset, seeds) if isinstance(dataset, IterableDataset) else Seeded(dataset, seeds)


class EpochOrder(SampleOrder):
    """The order of an epoch's samples, from any place on: the same permutation, whether interrupted or not.

    Several ranks divide it: each gets every ``ranks``-th sample.
    """

    def __init__(self, seed: int, *, rank: int, ranks: int) -> None:
        super().__init__(seed, rank=rank, ranks=ranks)
        self._epoch = self._skipped = 0

    def begin(self, epoch: int, skipped: int) -> None:
        """Say which epoch is iterated next, and how many of this rank's samples are left out at its beginning."""
        self._epoch, self._skipped = epoch, skipped

    def __len__(self) -> int:
        return super().__len__() - self._skipped

    def __iter__(self) -> Iterator[int]:
        indices = self._permutation(self._epoch)[self.rank :: self.ranks][: super().__len__()]
        yield from indices[self._skipped :]


# The history of a training, epoch by epoch: ``history.jsonl``, one JSON object a line.


class EpochRow(Record):
    """One epoch.

    Attributes:
        epoch: its number, from 1 on. steps: those of the training up to its end.
        loss: the mean over its steps; ``None`` if it is not finite.
        learning_rate: that of the first parameter group, at its end.
        samples: the number trained on. counted_samples, counted_s: what its rate is based on: the samples and seconds
            of the steps and of their waits for batches, without each process's first step, evaluations and checkpoints.
        energy_j: what the device used in these seconds; ``None`` without a counter.
        evaluation_s: seconds of the evaluation.
        metrics: what `evaluate` and `metric` returned, by name; ``None`` for values that are not finite.
    """

    epoch: int
    steps: int
    loss: float | None
    learning_rate: float
    samples: int
    counted_samples: int
    counted_s: float
    energy_j: float | None = None
    evaluation_s: float = 0.0
    metrics: dict[str, float | None] = Field(default_factory=dict)

    @property
    def samples_per_s(self) -> float | None:
        """The rate; ``None`` if nothing was counted."""
        return self.counted_samples / self.counted_s if self.counted_samples and self.counted_s > 0 else None


@dataclass
class EpochTally:
    """An epoch as it goes on; see `EpochRow`. It is kept in the checkpoints.

    Attributes:
        steps: those of the epoch so far. loss_sum: the sum of their losses.
        energy_lost: the counter could not be read at some time, so that the epoch's energy is unknown.
    """

    steps: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    counted_samples: int = 0
    counted_s: float = 0.0
    energy_j: float | None = None
    energy_lost: bool = False

    def row(self, epoch: int, steps: int, learning_rate: float) -> EpochRow:
        """Return the row of epoch number ``epoch``, which ends after ``steps`` steps, before its evaluation."""
        return EpochRow(
            epoch=epoch,
            steps=steps,
            loss=finite(self.loss_sum / self.steps) if self.steps else None,
            learning_rate=learning_rate,
            samples=self.samples,
            counted_samples=self.counted_samples,
            counted_s=self.counted_s,
            energy_j=None if self.energy_lost else self.energy_j,
        )


def finite(value: float) -> float | None:
    """Return the value, or ``None`` in place of one that JSON cannot represent."""
    return value if math.isfinite(value) else None


class EpochHistory:
    """The file beside the checkpoints. Each of its versions is complete.

    Args:
        anew: remove the file, so that what another training has left is not taken for this one's.

    Raises:
        MachineError: it cannot be removed.
    """

    def __init__(self, folder: Path, *, anew: bool) -> None:
        self.path = folder / "history.jsonl"
        if anew:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                raise MachineError(f"cannot remove {self.path}: {error.strerror}") from error

    def read(self) -> list[EpochRow]:
        """Return the rows before the first that cannot be read. The checkpoints hold all that matter."""
        rows: list[EpochRow] = []
        try:
            for line in self.path.read_text(encoding="utf-8").splitlines():
                rows.append(EpochRow.model_validate_json(line))
        except (OSError, UnicodeDecodeError, ValidationError):
            pass
        return rows

    def write(self, rows: Sequence[EpochRow]) -> None:
        """Replace the file.

        Raises:
            MachineError: it cannot be written.
        """
        write_atomic(self.path, "".join(f"{row.model_dump_json()}\n" for row in rows))


# At which steps all ranks write a checkpoint, or end. Imports torch.

#: Ranks consult each other about once in so many seconds: this takes a round trip, for which the device waits.
ASK_S = 0.25


class Agreement:
    """Makes all ranks do the same before the same step, although they learn of its reasons at different moments.

    A single rank decides for itself at each step. Several consult each other now and then, at steps that follow from
    the pace of the first one.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._rank = own_rank()
        self._next: int | None = None
        self._stride = 1
        self._asked_s = now()

    def before(self, step: int, signal: int | None, *, due: bool) -> tuple[int | None, bool]:
        """Return the number of the signal that ends the training before a step, if any, and whether to write a
        checkpoint.

        Args:
            step: its number. All ranks call this for each step.
            signal: the signal that this rank has received. due: whether a checkpoint is due; the first rank's counts.
        """
        if self._rank.count < 2:
            return signal, due
        if self._next is not None and step < self._next:
            return None, False
        now = self._now()
        step_s = (now - self._asked_s) / self._stride
        stride = max(1, min(2 * self._stride, int(ASK_S / max(step_s, 1e-6))))
        request = (signal or 0, int(due), stride) if not self._rank.number else (signal or 0, 0, 0)
        number, save, self._stride = largest(*request)
        self._next, self._asked_s = step + self._stride, self._now()
        return number or None, bool(save)
