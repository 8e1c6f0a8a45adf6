"""What the launches of a script may have left in the folder where it runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from autotune.layout import DEFAULT_STUDIES, StudyFiles
from autotune.records import LeftFiles

#: Nothing beyond this many entries of the folder is looked at.
MOST = 5000
#: How many files are named.
_NAMED = 3
#: Folders that Python or a user's environments write to.
_OTHERS = (str(DEFAULT_STUDIES), "__pycache__", "node_modules")


def left_files(folder: Path, files: StudyFiles) -> LeftFiles | None:
    """Return the files below a folder that are new or changed since a study was begun; ``None`` if there are none.

    They may be anybody's who works in it. Names, sizes and times are looked at, outside of hidden folders, studies and
    virtual environments.
    """
    try:
        since_ns = files.request.stat().st_mtime_ns
    except OSError:
        return None
    found = {}
    for number, entry in enumerate(_entries(folder, files.folder.parent)):
        if number == MOST:
            break
        try:
            seen = entry.stat(follow_symlinks=False)
        except OSError:
            # It has just been removed.
            continue
        if stat.S_ISREG(seen.st_mode) and seen.st_mtime_ns > since_ns:
            found[os.path.relpath(entry.path, folder)] = seen.st_size
    if not found:
        return None
    largest = sorted(found, key=lambda name: (-found[name], name))
    # Records are text that can be written.
    names = tuple(os.fsencode(name).decode(errors="replace") for name in largest[:_NAMED])
    return LeftFiles(folder=str(folder), names=names, number=len(found), size_bytes=sum(found.values()))


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
