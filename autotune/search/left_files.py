"""What the launches of a script may leave in the folder where it runs, if they have no copy-on-write view of it
(`autotune.child.view`)."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from autotune.space.formatting import listed, memory_text
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.base.records import CommandRef, LeftFiles, Probe, StudySpec
from autotune.report.sentences import left_text
from autotune.study.launch_files import read_launch

#: Nothing beyond this many entries of the folder is looked at.
MOST = 5000
#: How many files are named.
_NAMED = 3
#: If a launch writes this much before it trains, it is said that each of them does.
_MUCH_BYTES = 10 * 2**20
#: Names of files from which later runs of a script may go on: of any that is new, and of those that were there.
_WEIGHTS = re.compile(r".*\.(pt|pth|ckpt|bin|safetensors|npz)|.*checkpoint.*", re.IGNORECASE)
_TO_GO_ON = re.compile(r"(.*[-_.])?(last|latest|checkpoint|ckpt|resume)([-_.].*)?", re.IGNORECASE)
#: Folders that Python or a user's environments write to.
_OTHERS = (str(DEFAULT_STUDIES), "__pycache__", "node_modules")


def own_folders(spec: StudySpec) -> tuple[str, ...]:
    """Return the options by which launches of a script have folders of their own."""
    given = {"--output-flag": spec.output_flag is not None, "--scratch": spec.scratch}
    return tuple(flag for flag, on in given.items() if on)


def before_measuring(command: CommandRef, files: StudyFiles, probe: Probe) -> Iterator[str]:
    """Yield what its user is to know of where a script writes, before it is launched to be measured."""
    wrote = probe.wrote
    if wrote is not None and wrote.size_bytes >= _MUCH_BYTES:
        yield (
            f"the script writes {memory_text(wrote.size_bytes)} in its folder before it trains, anew at each launch "
            f"({listed(wrote.names)}); if that is data that it prepares, run it once by itself, so that it is there"
        )
    if probe.view_refused is None or command.scratch:
        return
    folder = Path(command.folder)
    yield (
        f"launches write in {folder} itself, since a copy-on-write view of it cannot be had: {probe.view_refused}; "
        "--scratch runs each in a folder of its own, --output-flag FLAG gives each one to write to"
    )
    names = _checkpoints(folder, files)
    if names:
        some = listed(names[:_NAMED]) if len(names) <= _NAMED else f"{', '.join(names[:_NAMED])} and others"
        yield (
            f"{some} may hold weights of a launch from now on, and a later run of the script may go on from there: "
            "use --scratch or --output-flag, or keep a copy"
        )


def _checkpoints(folder: Path, files: StudyFiles) -> list[str]:
    """Return the names of files that launches may have written, or may write over, and that a later run may read."""
    since_ns = _begun_ns(files)
    found = []
    for entry, seen in _files(folder, files.folder.parent):
        fresh = since_ns is not None and seen.st_mtime_ns > since_ns
        if _WEIGHTS.fullmatch(entry.name) and (fresh or _TO_GO_ON.fullmatch(entry.name)):
            found.append(os.fsencode(os.path.relpath(entry.path, folder)).decode(errors="replace"))
    return found


def left_behind(files: StudyFiles, spec: StudySpec) -> LeftFiles | None:
    """Return what the launches of a study may have left in the folder of its script; ``None`` if that is nothing, or
    they had a view of it."""
    if spec.command is None:
        return None
    _, looked = read_launch(files.launch("probe-1"))
    if looked is not None and looked.probe is not None and looked.probe.view_refused is None:
        return None
    return left_files(Path(spec.command.folder), files)


def left_sentence(files: StudyFiles, spec: StudySpec) -> str | None:
    """Say what the launches of a search may have left that ends without an outcome; ``None`` if that is nothing."""
    left = left_behind(files, spec)
    return None if left is None else left_text(left, own_folders(spec)).rstrip(".")


def left_files(folder: Path, files: StudyFiles) -> LeftFiles | None:
    """Return the files below a folder that are new or changed since a study was begun; ``None`` if there are none.

    They may be anybody's who works in it. Names, sizes and times are looked at, outside of hidden folders, studies and
    virtual environments.
    """
    since_ns = _begun_ns(files)
    if since_ns is None:
        return None
    entries = _files(folder, files.folder.parent)
    found = {
        os.path.relpath(entry.path, folder): seen.st_size for entry, seen in entries if seen.st_mtime_ns > since_ns
    }
    if not found:
        return None
    largest = sorted(found, key=lambda name: (-found[name], name))
    # Records are text that can be written.
    names = tuple(os.fsencode(name).decode(errors="replace") for name in largest[:_NAMED])
    return LeftFiles(folder=str(folder), names=names, number=len(found), size_bytes=sum(found.values()))


def _begun_ns(files: StudyFiles) -> int | None:
    try:
        return files.request.stat().st_mtime_ns
    except OSError:
        return None


def _files(folder: Path, studies: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield the files in a folder and below it, as far as it is looked through."""
    for entry in itertools.islice(_entries(folder, studies), MOST):
        # Some may just have been removed.
        with contextlib.suppress(OSError):
            seen = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(seen.st_mode):
                yield entry, seen


def _entries(folder: Path, studies: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder and below it, the upper ones first."""
    waiting = [str(folder)]
    for place in waiting:
        try:
            with os.scandir(place) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _OTHERS or entry.path == str(studies):
                continue
            yield entry
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
