"""The child's side of a workload whose parts are objects: they lie pickled beside its file, and are loaded from there.

`autotune.search.tuning.workload_file` writes both. Unpickling runs code, as importing the file does, so only the
processes that train do it, and only with files of this user that have the hashes in the workload's own, which is part
of what a search knows its workload by.
"""

from __future__ import annotations

import errno
import hashlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from autotune.base.errors import WorkloadError
from autotune.base.files import open_regular
from autotune.workload.contract import REQUIRED, takes_context, without_context


@dataclass(frozen=True)
class Carried:
    """The four functions of a workload, made of pickled parts.

    Attributes:
        folder: of the files ``NAME.pickle``.
        sha256: of each of them, by the name of the part.
        objects: the parts that are what the function is to return, and not the function.
    """

    folder: Path
    sha256: Mapping[str, str]
    objects: tuple[str, ...]

    def part(self, name: str) -> Callable[..., Any]:
        """Return one of the four functions.

        Raises:
            WorkloadError: its file is missing, somebody else's, or not what was written.
        """
        if name == "model" and name in self.objects:
            # Each call makes another one, so that no training begins where the last one ended.
            return lambda ctx: self._load(name)
        loaded = self._load(name)
        if name in self.objects:
            for_workers(loaded)
            return lambda ctx: loaded
        function: Callable[..., Any] = loaded
        return function if takes_context(function, REQUIRED[name]) else without_context(function)

    def _load(self, name: str) -> Any:
        path = self.folder / f"{name}.pickle"
        advice = "start a new search from the script or notebook that has the objects."
        try:
            with open_regular(path, own=True) as stream:
                content = stream.read()
        except OSError as error:
            if error.errno == errno.EPERM:
                advice = "let the user who began the search run it, and its workers."
            raise WorkloadError(f"{path} cannot be read: {error.strerror}", advice=advice) from error
        if hashlib.sha256(content).hexdigest() != self.sha256[name]:
            raise WorkloadError(f"{path} is not what the search began with", advice=advice)
        return pickle.loads(content)


def for_workers(dataset: object) -> None:
    """Let loader workers of every start method have a data set whose class no module defines."""
    kind = type(dataset)
    if kind.__module__ != "builtins":
        ForkingPickler.register(kind, _by_value)


def _by_value(value: object) -> tuple[Callable[..., Any], tuple[bytes]]:
    import cloudpickle

    return pickle.loads, (cloudpickle.dumps(value),)
