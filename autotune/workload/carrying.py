"""The child's side of a workload given as Python objects: they are pickled beside its file, and loaded from there.

`autotune.search.tuning.workload_file` writes both. Unpickling runs code, as importing the file does, so only the
processes that train do it, and only with files that belong to this user and are unchanged.
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
#: Names of the pickles: the parts of a workload that are functions, and a workload that is one object. The others are
#: named after parts that are objects.
FUNCTIONS, WHOLE = "functions", "workload"
#: The file of their hashes.
HASHES = "hashes.json"


@dataclass(frozen=True)
class Carried:
    """The parts of a workload, pickled.

    Attributes:
        folder: the folder of the files ``NAME.pickle``.
        sha256: the hash of each of them, by name.
        objects: the parts that are not functions, but what the function should return.
    """

    folder: Path
    sha256: Mapping[str, str]
    objects: tuple[str, ...]

    @classmethod
    def beside(cls, file: str, objects: tuple[str, ...], *, python: str) -> Carried:
        """Return the pickles beside a workload's file.

        Args:
            python: the Python version that wrote them; no other one can read their functions.

        Raises:
            WorkloadError: this is another version, or the hashes cannot be read.
        """
        version, folder = platform.python_version().rpartition(".")[0], Path(file).parent
        if version != python:
            raise WorkloadError(f"{file} was written by Python {python}, and this is Python {version}", advice=_ANEW)
        try:
            return cls(folder, json.loads(read_regular(folder / HASHES, 2**16)), objects)
        except (OSError, ValueError) as error:
            raise WorkloadError(f"{folder / HASHES} cannot be read: {error}", advice=_ANEW) from error

    def whole(self, makes: bool) -> Any:
        """Return the workload itself, if it is one object. ``makes``: it is an instance of the pickled class."""
        value = self._load(WHOLE)[WHOLE]
        return value() if makes else value

    def part(self, name: str) -> Any:
        """Return one part: a function, or a constant.

        Raises:
            WorkloadError: its file is missing, belongs to somebody else, or was changed.
        """
        if name == "model" and name in self.objects:
            # Each call makes a new model, so that no training begins where the last one ended.
            return lambda ctx: self._alone(name)
        if name in self.objects:
            loaded = self._alone(name)
            return lambda ctx: for_workers(loaded)
        part = self._functions[name] if FUNCTIONS in self.sha256 else self._load(name)
        if name == "collate":
            return lambda ctx: _ByValue(part(ctx))
        if name not in REQUIRED:
            return part
        function = part if takes_context(part, REQUIRED[name]) else without_context(part)
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
    """Return a data set, made picklable for loader workers of every start method though no module defines its class."""
    kind = type(dataset)
    if kind.__module__ != "builtins":
        ForkingPickler.register(kind, _by_value)
    return dataset


class _ByValue:
    """A function that can be sent to loader workers of every start method, although no module defines it."""

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
