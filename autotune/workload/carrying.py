"""The child's side of a workload that was given as Python objects: they lie pickled beside its file, and are loaded
from there.

`autotune.search.tuning.workload_file` writes both. Unpickling runs code, as importing the file does, so only the
processes that train do it, and only with files of this user that are what was written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import pickle
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from autotune.base.errors import WorkloadError
from autotune.base.files import open_regular, read_regular
from autotune.workload.contract import REQUIRED, takes_context, without_context

_ANEW = "start a new search from the script or notebook that has the objects."
#: Names of the pickles: the parts of a workload that are functions, and a workload that is one object. Others are of
#: parts that are objects.
FUNCTIONS, WHOLE = "functions", "workload"
#: The file of their hashes.
HASHES = "hashes.json"


@dataclass(frozen=True)
class Carried:
    """The parts of a workload, pickled.

    Attributes:
        folder: of the files ``NAME.pickle``.
        sha256: of each of them, by its name.
        objects: the parts that are what the function is to return, and not the function.
    """

    folder: Path
    sha256: Mapping[str, str]
    objects: tuple[str, ...]

    @classmethod
    def beside(cls, file: str, objects: tuple[str, ...], *, python: str) -> Carried:
        """Return what lies beside a workload's file.

        Args:
            python: version that has written it; no other one can read its functions.

        Raises:
            WorkloadError: this is another version, or the hashes cannot be read.
        """
        here, folder = platform.python_version().rpartition(".")[0], Path(file).parent
        if here != python:
            raise WorkloadError(f"{file} was written by Python {python}, and this is Python {here}", advice=_ANEW)
        try:
            return cls(folder, json.loads(read_regular(folder / HASHES, 2**16)), objects)
        except (OSError, ValueError) as error:
            raise WorkloadError(f"{folder / HASHES} cannot be read: {error}", advice=_ANEW) from error

    def whole(self, makes: bool) -> Any:
        """Return the workload itself, if it is one object. ``makes``: it is an instance of what was pickled."""
        found = self._load(WHOLE)[WHOLE]
        return found() if makes else found

    def part(self, name: str) -> Any:
        """Return one part: a function, or a constant.

        Raises:
            WorkloadError: its file is missing, somebody else's, or not what was written.
        """
        if name == "model" and name in self.objects:
            # Each call makes another one, so that no training begins where the last one ended.
            return lambda ctx: self._alone(name)
        if name in self.objects:
            loaded = self._alone(name)
            return lambda ctx: for_workers(loaded)
        found = self._functions[name] if FUNCTIONS in self.sha256 else self._load(name)
        if name == "collate":
            return lambda ctx: _ByValue(found(ctx))
        if name not in REQUIRED:
            return found
        function = found if takes_context(found, REQUIRED[name]) else without_context(found)
        return (lambda *arguments: for_workers(function(*arguments))) if name == "dataset" else function

    @cached_property
    def _functions(self) -> Any:
        return self._load(FUNCTIONS)

    def _alone(self, name: str) -> Any:
        loaded = self._load(name)
        return loaded[name] if FUNCTIONS in self.sha256 else loaded

    def _load(self, name: str) -> Any:
        path = self.folder / f"{name}.pickle"
        advice = _ANEW
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


def for_workers(dataset: Any) -> Any:
    """Let loader workers of every start method have a data set whose class no module defines; return it."""
    kind = type(dataset)
    if kind.__module__ != "builtins":
        ForkingPickler.register(kind, _by_value)
    return dataset


class _ByValue:
    """A function that loader workers of every start method can have, although no module defines it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce__(self) -> Any:
        load, content = _by_value(self._function)
        return _revived, (load, *content)


def _revived(load: Callable[..., Any], content: bytes) -> _ByValue:
    return _ByValue(load(content))


def _by_value(value: object) -> tuple[Callable[..., Any], tuple[bytes]]:
    import cloudpickle

    return pickle.loads, (cloudpickle.dumps(value),)
