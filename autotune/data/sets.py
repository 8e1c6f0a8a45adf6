"""The data a workload is given: generated photographs, the user's own folder, or none at all.

The generated set makes decoding, loader workers and prefetch do real work on a machine that has no data yet.
Its files are made by worker processes, because a thousand photographs take some twenty seconds of computing.
The workers are plain commands that report over one pipe, and not a pool of multiprocessing: nothing is forked
from a parent with threads, the caller's main module is not run again, and a worker whose parent was killed ends
at its next report instead of waiting for work for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
from pydantic import ValidationError

from autotune.clock import Clock, SystemClock
from autotune.errors import MachineError, WorkloadError
from autotune.files import exclusive_lock, write_atomic
from autotune.records import SCHEMA_VERSION, DataRef, Record

#: What a folder's images are recognised by, in lower case.
EXTENSIONS = (".jpg", ".jpeg", ".png")
#: Training images of ImageNet-1k (ILSVRC 2012): the epoch that the generated set stands for.
IMAGENET_SAMPLES = 1_281_167

_MANIFEST = "manifest.json"
#: Names the recipe in `autotune.data.photographs`; raise it when that makes other bytes, or an old set passes for a new
#: one.
_RECIPE = "photographs-v1"
_LOCK_POLL_S = 0.25
#: Above this many files, not every file of a folder is asked for its size.
_SIZED_FILES = 20_000


class ManifestFile(Record):
    """One image of a generated set; ``path`` is relative to the set's folder."""

    path: str
    size_bytes: int
    sha256: str


class Manifest(Record):
    """``manifest.json`` of a generated set: the parameters it is a function of, and what came of them."""

    schema_version: int = SCHEMA_VERSION
    recipe: str
    seed: int
    count: int
    files: tuple[ManifestFile, ...]


def ensure_generated(
    root: Path | None = None,
    *,
    count: int = 1024,
    seed: int = 0,
    processes: int,
    on_progress: Callable[[int, int], None],
    on_warning: Callable[[str], None] | None = None,
    clock: Clock | None = None,
) -> DataRef:
    """The generated photographs as an ImageFolder, made if they are not there yet.

    A set that is there is checked by its manifest (every file exists and has its size) and used at once. One that
    fails the check is said to ``on_warning`` and made again. A set appears under its name whole or not at all:
    whoever is killed on the way leaves nothing that counts, and the next call sweeps it. Of several callers, in
    any processes, one makes the set and the others wait.

    Args:
        root: the folder that holds generated sets; the user's cache if not given.
        processes: worker processes to make it with.
        on_progress: called as ``(files made, files in all)`` after each file, in the caller's thread, also while
            another process makes them; not called when the set is there. What it raises ends the generation,
            leaves nothing behind and reaches the caller, an OSError as a MachineError.

    Raises:
        MachineError: the folder cannot be written, the disk is full, or a worker process failed.
    """
    if count < 1 or processes < 1:
        raise ValueError(f"count and processes are at least 1, not {count} and {processes}")
    clock = clock or SystemClock()
    root = Path(platformdirs.user_cache_dir("autotune")) / "data" if root is None else root.absolute()
    name = f"{_RECIPE}-{hashlib.sha256(json.dumps([seed, count]).encode()).hexdigest()[:12]}"
    folder = root / name
    wanted = Manifest(recipe=_RECIPE, seed=seed, count=count, files=())

    def others_progress() -> None:
        on_progress(sum(1 for _ in root.glob(f".making-{name}-*/set/class_*/*")), count)

    # Without the lock first: the usual case needs no writable cache.
    if _damage(folder, wanted) is None:
        return _generated(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _waiting_for(root / f".{name}.lock", clock, others_progress):
            damage = _damage(folder, wanted)
            if damage is not None:
                if folder.exists() and on_warning is not None:
                    on_warning(f"the generated photographs in {folder} are damaged ({damage}); making them again")
                _make(folder, wanted, min(processes, count), on_progress)
    except OSError as error:
        raise MachineError(
            f"cannot make the generated photographs in {root}: {error.strerror or error}",
            advice="free some space, or let XDG_CACHE_HOME name a folder that can be written.",
        ) from error
    return _generated(folder)


def _generated(folder: Path) -> DataRef:
    identity = hashlib.sha256((folder / _MANIFEST).read_bytes()).hexdigest()
    return DataRef(kind="generated", path=str(folder), identity=identity, epoch_samples=IMAGENET_SAMPLES)


def _damage(folder: Path, wanted: Manifest) -> str | None:
    """What is wrong with a set, or ``None``. Sizes only: hashing 110 MB at every start would be felt."""
    try:
        manifest = Manifest.model_validate_json((folder / _MANIFEST).read_bytes())
    except OSError as error:
        return f"{_MANIFEST}: {error.strerror}"
    except ValidationError:
        return f"{_MANIFEST} cannot be read"
    if manifest.model_copy(update={"files": ()}) != wanted or len(manifest.files) != wanted.count:
        return f"{_MANIFEST} describes another set"
    for file in manifest.files:
        try:
            size = os.stat(folder / file.path).st_size
        except OSError as error:
            return f"{file.path}: {error.strerror}"
        if size != file.size_bytes:
            return f"{file.path}: {size} bytes instead of {file.size_bytes}"
    return None


@contextlib.contextmanager
def _waiting_for(lock: Path, clock: Clock, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock, asking again and again while another process has it."""
    while True:
        with exclusive_lock(lock) as free:
            if free:
                yield
                return
        on_wait()
        clock.sleep(_LOCK_POLL_S)


def _make(folder: Path, wanted: Manifest, processes: int, on_progress: Callable[[int, int], None]) -> None:
    """Make a set beside its place and move it there. The caller holds the set's lock."""
    root, name = folder.parent, folder.name
    for leftover in root.glob(f".making-{name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # The name is fresh each time: a worker that outlives a killed parent by a moment must not write into this set.
    making = Path(tempfile.mkdtemp(prefix=f".making-{name}-", dir=root))
    try:
        photographs = making / "set"
        photographs.mkdir()
        files = _run_workers(photographs, wanted, processes, on_progress)
        manifest = wanted.model_copy(update={"files": tuple(sorted(files, key=lambda file: file.path))})
        # The images are not synced one by one: what a power cut takes of them, the check of the sizes finds.
        write_atomic(photographs / _MANIFEST, manifest.model_dump_json(indent=1) + "\n")
        if folder.exists():
            folder.rename(making / "damaged")
        photographs.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _run_workers(
    folder: Path, wanted: Manifest, processes: int, on_progress: Callable[[int, int], None]
) -> list[ManifestFile]:
    """Run the workers to the end and gather what they report. None is left running, whatever happens."""
    command = [sys.executable, "-P", "-m", "autotune.data.photographs"]
    files: list[ManifestFile] = []
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as errors:
        # All workers share one pipe, which ends when the last of them does. Lines this short arrive whole.
        reports, reporting = os.pipe()
        try:
            with open(reports, encoding="utf-8") as lines:
                try:
                    for first in range(processes):
                        worker = subprocess.Popen(
                            [*command, str(folder), str(wanted.seed), f"{first}:{wanted.count}:{processes}"],
                            stdin=subprocess.DEVNULL,
                            stdout=reporting,
                            stderr=errors,
                            # Ctrl-C at the terminal is the parent's to handle.
                            start_new_session=True,
                            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                        )
                        workers.append(worker)
                finally:
                    os.close(reporting)
                for line in lines:
                    report = json.loads(line)
                    if "error" in report:
                        raise OSError(report["errno"], report["error"])
                    files.append(ManifestFile.model_validate(report))
                    on_progress(len(files), wanted.count)
        finally:
            if len(files) < wanted.count:
                for worker in workers:
                    worker.kill()
            codes = [worker.wait() for worker in workers]
        if len(files) < wanted.count:
            errors.seek(0)
            raise MachineError(
                f"only {len(files)} of {wanted.count} generated photographs were made: workers ended with {codes}",
                advice="see that memory is free, then run the same command again.",
                detail=errors.read().decode(errors="replace")[-2000:] or None,
            )
    return files


def synthetic() -> DataRef:
    """No data at all: the workload makes up tensors, so that the loader costs next to nothing."""
    return DataRef(kind="synthetic", identity="synthetic")


def folder(path: Path) -> DataRef:
    """An ImageFolder of the user's: one folder per class, with JPEG or PNG files in it at any depth.

    Nothing is decoded. The identity is a hash over the relative paths of all images and over sizes. Listing names
    is a cost that ImageFolder itself has at every start; asking for sizes would multiply it on a network store. So
    each class is asked for the sizes of at most 20,000 / classes of its files, spread evenly: of every file in a set
    of ordinary size, of one in 64 in ImageNet.

    Raises:
        WorkloadError: there is no such folder, it cannot be read, or it is not laid out so.
    """
    path = path.expanduser().absolute()
    layout = "lay it out as FOLDER/CLASS/IMAGE.jpg, one folder per class."
    try:
        if not path.exists():
            raise WorkloadError(f"there is no folder {path}", advice="give --data an existing folder, or `generated`.")
        if not path.is_dir():
            raise WorkloadError(f"{path} is a file, not a folder", advice=layout)
        with os.scandir(path) as found:
            entries = sorted((entry.name, entry.is_dir()) for entry in found)
        classes = [name for name, is_folder in entries if is_folder]
        if not classes and any(_is_image(name) for name, _ in entries):
            raise WorkloadError(f"{path} holds images directly and no class folders", advice=layout)
        if not classes:
            raise WorkloadError(f"{path} holds no class folders", advice=layout)
        identities = {name: _class_identity(path / name, _SIZED_FILES // len(classes)) for name in classes}
    except OSError as error:
        raise WorkloadError(
            f"cannot read {error.filename or path}: {error.strerror or error}",
            advice="make the folder readable for this user.",
        ) from error
    empty = [name for name, identity in identities.items() if identity is None]
    if empty:
        # ImageFolder refuses a set with an empty class, and would do so in every child.
        names = ", ".join(empty[:5]) + (" …" if len(empty) > 5 else "")
        raise WorkloadError(
            f"{path} has class folders without a {', '.join(EXTENSIONS)} file: {names}",
            advice="remove them, or put their images there.",
        )
    identity = hashlib.sha256(json.dumps(identities).encode()).hexdigest()
    return DataRef(kind="folder", path=str(path), identity=identity)


def _class_identity(folder: Path, sized: int) -> str | None:
    """A hash over the paths of a class's images and the sizes of about ``sized`` of them; ``None`` without images."""

    def refuse(error: OSError) -> None:
        raise error

    images = sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder, onerror=refuse, followlinks=True)
        for name in names
        if _is_image(name)
    )
    stride = -(-len(images) // max(1, sized))
    identity = hashlib.sha256()
    for number, image in enumerate(images):
        identity.update(os.fsencode(os.path.relpath(image, folder)) + b"\0")
        if number % stride == 0:
            # A dangling link is an unreadable image, which the training will name; it is no reason to stop here.
            with contextlib.suppress(FileNotFoundError):
                identity.update(b"%d\0" % os.stat(image).st_size)
    return identity.hexdigest() if images else None


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)
