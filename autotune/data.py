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
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import platformdirs
from pydantic import ValidationError

from autotune.clock import Clock, SystemClock
from autotune.errors import AutotuneError, MachineError, WorkloadError
from autotune.files import exclusive_lock, write_atomic
from autotune.records import SCHEMA_VERSION, DataRef, Record

#: What a folder's images are recognised by, in lower case.
EXTENSIONS = (".jpg", ".jpeg", ".png")
#: Training images of ImageNet-1k (ILSVRC 2012): the epoch that the generated set stands for.
IMAGENET_SAMPLES = 1_281_167

_MANIFEST = "manifest.json"
#: Names the recipe of `photograph`; raise it when that makes other bytes, so that no old set is taken for a new one.
_RECIPE = "photographs-v1"
_LONG_SIDE, _SHORT_SIDE = 500, 375
_CLASSES = 16
#: ImageNet's files hold some 4.7 bits per pixel. Photographs of this contrast reach that at this JPEG quality.
_QUALITY = 93
_LOCK_POLL_S = 0.25
#: Above this many files, not every file of a folder is asked for its size.
_SIZED_FILES = 20_000


class ManifestParameters(Record):
    """What a generated set is a function of."""

    recipe: str
    seed: int
    count: int


class ManifestFile(Record):
    """One image of a generated set; ``path`` is relative to the set's folder."""

    path: str
    size_bytes: int
    sha256: str


class Manifest(Record):
    """``manifest.json`` of a generated set; written last, so a set that has one is whole."""

    schema_version: int = SCHEMA_VERSION
    parameters: ManifestParameters
    files: tuple[ManifestFile, ...]


def photograph(seed: int, index: int) -> bytes:
    """One photographic-looking JPEG, a function of ``(seed, index)`` and the installed numpy and Pillow only.

    500×375 pixels, one in four upright; about 110 KB, 70 to 150. Three fields with an amplitude spectrum near 1/f
    (Field 1987, J. Opt. Soc. Am. A 4:2379), one for luminance and two much weaker ones for opponent colours, which
    is how natural colour decorrelates (Ruderman et al. 1998, J. Opt. Soc. Am. A 15:2036). Objects with sharp edges
    that hide each other, their sizes drawn from a power law (Lee, Mumford & Huang 2001, Int. J. Comput. Vis. 41:35).
    """
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng((seed, index))
    width, height = (_SHORT_SIDE, _LONG_SIDE) if rng.random() < 0.25 else (_LONG_SIDE, _SHORT_SIDE)

    cycles = np.hypot(np.fft.fftfreq(height, 1 / height)[:, None], np.fft.rfftfreq(width, 1 / width)[None, :])
    cycles[0, 0] = np.inf  # the mean is set below
    amplitude = (cycles ** -rng.uniform(0.9, 1.2)).astype(np.float32)
    real, imaginary = rng.standard_normal((2, 3, *amplitude.shape), dtype=np.float32)
    fields = np.fft.irfft2((real + 1j * imaginary) * amplitude, s=(height, width))
    fields /= fields.std(axis=(1, 2), keepdims=True)

    # Rows: luminance, red against blue, green against both. Each holds a deviation and its share of R, G and B.
    opponents = np.array([[1.0, 1.0, 1.0], [0.2, 0.0, -0.2], [-0.06, 0.12, -0.06]])
    objects = _objects(rng, width, height)
    gain = rng.uniform(0.4, 1.6, 256)[objects] * rng.uniform(28, 55)
    colour = (rng.normal(0, 1, (256, 3)) * (40, 90, 60) @ opponents)[objects]
    pixels = gain[..., None] * np.tensordot(fields, opponents, axes=(0, 0)) + colour + rng.uniform(95, 145)

    stream = io.BytesIO()
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    image.save(stream, "JPEG", quality=_QUALITY)
    return stream.getvalue()


def _objects(rng, width: int, height: int):  # type: ignore[no-untyped-def]
    """A mask (height, width) uint8 of the object each pixel shows: 0 is the background, later objects are nearer."""
    import numpy as np
    from PIL import Image, ImageDraw

    mask = Image.new("L", (width, height))
    draw = ImageDraw.Draw(mask)
    for number in range(1, int(rng.integers(10, 40))):
        radius = min(8 * (1 + rng.pareto(1.2)), _SHORT_SIDE / 2)
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        if rng.random() < 0.5:
            a, b = radius * rng.uniform(0.4, 1, 2)
            draw.ellipse((x - a, y - b, x + a, y + b), fill=number)
        else:
            turns = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 8)))
            draw.polygon([(x + radius * np.cos(t), y + radius * np.sin(t)) for t in turns], fill=number)
    return np.asarray(mask)


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
            another process makes them. Not called when the set is there. What it raises ends the generation,
            leaves nothing behind, and reaches the caller.

    Raises:
        MachineError: the folder cannot be written, the disk is full, or a worker process failed.
    """
    if count < 1 or processes < 1:
        raise ValueError(f"count and processes are at least 1, not {count} and {processes}")
    clock = clock or SystemClock()
    root = Path(platformdirs.user_cache_dir("autotune")) / "data" if root is None else root.absolute()
    parameters = ManifestParameters(recipe=_RECIPE, seed=seed, count=count)
    folder = root / f"{_RECIPE}-{hashlib.sha256(parameters.model_dump_json().encode()).hexdigest()[:12]}"
    # Without the lock first: the usual case needs no writable cache.
    damage = _damage(folder, parameters)
    if damage is None:
        return _generated(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _waiting_for(root / f".{folder.name}.lock", clock, lambda: on_progress(_made(root, folder), count)):
            damage = _damage(folder, parameters)
            if damage is not None:
                if folder.exists() and on_warning is not None:
                    on_warning(f"the generated photographs in {folder} are damaged ({damage}); making them again")
                _make(folder, parameters, min(processes, count), on_progress)
    except OSError as error:
        raise MachineError(
            f"cannot make the generated photographs in {root}: {error.strerror or error}",
            advice="free some space, or let XDG_CACHE_HOME name a folder that can be written.",
        ) from error
    return _generated(folder)


def _generated(folder: Path) -> DataRef:
    identity = hashlib.sha256((folder / _MANIFEST).read_bytes()).hexdigest()
    return DataRef(kind="generated", path=str(folder), identity=identity, epoch_samples=IMAGENET_SAMPLES)


def _damage(folder: Path, parameters: ManifestParameters) -> str | None:
    """What is wrong with a set, or ``None``. Sizes only: hashing 110 MB at every start would be felt."""
    try:
        manifest = Manifest.model_validate_json((folder / _MANIFEST).read_bytes())
    except OSError as error:
        return f"{_MANIFEST}: {error.strerror}"
    except ValidationError:
        return f"{_MANIFEST} cannot be read"
    if manifest.parameters != parameters or len(manifest.files) != parameters.count:
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


def _made(root: Path, folder: Path) -> int:
    """How many files another process has made so far."""
    return sum(1 for _ in root.glob(f".making-{folder.name}-*/class_*/*"))


def _make(
    folder: Path, parameters: ManifestParameters, processes: int, on_progress: Callable[[int, int], None]
) -> None:
    """Make a set beside its place and move it there. The caller holds the set's lock."""
    root, name = folder.parent, folder.name
    for leftover in root.glob(f".making-{name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # The name is fresh each time: a worker that outlives a killed parent by a moment must not write into this set.
    making = Path(tempfile.mkdtemp(prefix=f".making-{name}-", dir=root))
    try:
        photographs = making / "set"
        for number in range(_CLASSES):
            (photographs / f"class_{number:02d}").mkdir(parents=True)
        files = _run_workers(photographs, parameters, processes, on_progress)
        manifest = Manifest(parameters=parameters, files=tuple(sorted(files, key=lambda file: file.path)))
        # The images are not synced one by one: what a power cut takes of them, the check of the sizes finds.
        write_atomic(photographs / _MANIFEST, manifest.model_dump_json(indent=1) + "\n")
        if folder.exists():
            folder.rename(making / "damaged")
        photographs.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _run_workers(
    folder: Path, parameters: ManifestParameters, processes: int, on_progress: Callable[[int, int], None]
) -> list[ManifestFile]:
    """Run the workers to the end and gather what they report. None is left running, whatever happens."""
    code = "from autotune.data import make_share; make_share()"
    files: list[ManifestFile] = []
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as errors:
        try:
            # All workers share one pipe, which ends when the last of them does. Lines this short arrive whole.
            reports, reporting = os.pipe()
            with open(reports, encoding="utf-8") as lines:
                try:
                    for first in range(processes):
                        share = [str(folder), str(parameters.seed), f"{first}:{parameters.count}:{processes}"]
                        worker = subprocess.Popen(
                            [sys.executable, "-P", "-c", code, *share],
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
                    on_progress(len(files), parameters.count)
        finally:
            if len(files) < parameters.count:
                for worker in workers:
                    worker.kill()
            codes = [worker.wait() for worker in workers]
        if len(files) < parameters.count or any(codes):
            raise _workers_failed(files, parameters.count, codes, errors)
    return files


def _workers_failed(files: list[ManifestFile], count: int, codes: list[int], errors: IO[bytes]) -> AutotuneError:
    errors.seek(0)
    last_lines = errors.read().decode(errors="replace").strip().splitlines()[-5:]
    return MachineError(
        f"only {len(files)} of {count} generated photographs were made: the workers ended with {codes}",
        advice="see that memory is free, then run the same command again.",
        detail="\n".join(last_lines) or None,
    )


def make_share() -> None:
    """The whole life of one worker: ``FOLDER SEED FIRST:COUNT:STEP`` in ``sys.argv``, one JSON line per file out."""
    folder, seed, share = sys.argv[1:4]
    for index in range(*map(int, share.split(":"))):
        path = f"class_{index % _CLASSES:02d}/{index:04d}.jpg"
        content = photograph(int(seed), index)
        report: dict[str, str | int | None]
        try:
            (Path(folder) / path).write_bytes(content)
            report = {"path": path, "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        except OSError as error:
            report = {"errno": error.errno, "error": error.strerror or str(error)}
        try:
            os.write(sys.stdout.fileno(), json.dumps(report).encode() + b"\n")
        except BrokenPipeError:
            return  # the parent is gone, and with it every use for the rest


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
    if not path.exists():
        raise WorkloadError(f"there is no folder {path}", advice="give --data an existing folder, or `generated`.")
    if not path.is_dir():
        raise WorkloadError(f"{path} is a file, not a folder", advice="give --data the folder that holds the classes.")
    try:
        with os.scandir(path) as found:
            entries = sorted((entry.name, entry.is_dir()) for entry in found)
        classes = [name for name, is_folder in entries if is_folder]
        layout = "lay it out as FOLDER/CLASS/IMAGE.jpg, one folder per class."
        if not classes and any(_is_image(name) for name, _ in entries):
            raise WorkloadError(f"{path} holds images directly and no class folders", advice=layout)
        if not classes:
            raise WorkloadError(f"{path} holds no class folders", advice=layout)
        identity = hashlib.sha256()
        empty = [name for name in classes if not _add_class(identity, path / name, _SIZED_FILES // len(classes))]
    except OSError as error:
        where = error.filename or path
        raise WorkloadError(
            f"cannot read {where}: {error.strerror or error}", advice="make the folder readable for this user."
        ) from error
    if empty:
        # ImageFolder refuses a set with an empty class, and would do so in every child.
        names = ", ".join(empty[:5]) + (" …" if len(empty) > 5 else "")
        raise WorkloadError(
            f"{path} has class folders without a {', '.join(EXTENSIONS)} file: {names}",
            advice="remove them, or put their images there.",
        )
    return DataRef(kind="folder", path=str(path), identity=identity.hexdigest())


def _add_class(identity: hashlib._Hash, folder: Path, sized: int) -> int:
    """Add one class to a hash: every image's path, and the sizes of about ``sized`` of them. Returns how many images."""

    def refuse(error: OSError) -> None:
        raise error

    images = sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder, onerror=refuse, followlinks=True)
        for name in names
        if _is_image(name)
    )
    stride = -(-len(images) // max(1, sized))
    for number, image in enumerate(images):
        identity.update(os.fsencode(os.path.relpath(image, folder.parent)) + b"\0")
        if number % stride == 0:
            # A dangling link is an unreadable image, which the training will name; it is no reason to stop here.
            with contextlib.suppress(FileNotFoundError):
                identity.update(b"%d\0" % os.stat(image).st_size)
    return len(images)


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)
