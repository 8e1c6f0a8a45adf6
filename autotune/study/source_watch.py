"""Notices that a workload's files are edited while a search runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from autotune.base.errors import UsageError, WorkloadError
from autotune.workload.catalog import source_files, source_hash

_Stamp = tuple[int, int, int, int]


class SourceWatch:
    """A workload's file and the modules beside it that it imports, as they were when the search began.

    Args:
        path: the workload's file.
        sha256: `autotune.workload.catalog.source_hash` of it when the search began.
    """

    def __init__(self, path: Path, sha256: str) -> None:
        self._path = path
        self._sha256 = sha256
        self._contents: dict[str, bytes] = {}
        #: Of the files, and of their folders: a new file may hide a module that was imported from elsewhere.
        self._stamps: dict[Path, _Stamp | None] = {}

    def edited(self) -> str | None:
        """Return the name of a file that is not as it was; ``None`` if all are.

        The files are read only if one has been touched since the last call.
        """
        if self._stamps and all(_stamp(path) == stamp for path, stamp in self._stamps.items()):
            return None
        try:
            contents = source_files(self._path)
            folder = self._path.parent
            files = [folder / name for name in contents]
            stamps = {path: _stamp(path) for path in (*files, *(file.parent for file in files))}
            # Read again: the stamps are of this content only if it is the same before and after them.
            if source_hash(self._path) == self._sha256:
                self._contents, self._stamps = contents, stamps
                return None
        except UsageError:
            contents = {}
        return self._first_difference(contents)

    def check(self) -> None:
        """Raise if a file is not as it was.

        Raises:
            WorkloadError: a file was edited.
        """
        name = self.edited()
        if name is not None:
            raise edited_meanwhile(name)

    def _first_difference(self, contents: dict[str, bytes]) -> str:
        names = sorted(contents.keys() | self._contents.keys())
        differing = [name for name in names if contents.get(name) != self._contents.get(name)]
        # Without an earlier look, only the hash of all is known.
        return differing[0] if self._contents and differing else self._path.name


def edited_meanwhile(name: str) -> WorkloadError:
    """Return the error for a search whose workload was edited."""
    return WorkloadError(
        f"{name} was edited meanwhile, and figures of two versions do not compare",
        advice="everything measured before is kept: undo the edit and `autotune resume`, or start a new search.",
    )


def _stamp(path: Path) -> _Stamp | None:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return None
