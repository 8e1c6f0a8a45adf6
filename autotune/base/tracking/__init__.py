"""A catalog: one file per experiment tracker, to which ``--track`` writes trainings and searches where people look.

Each file has ``TRACKER``, a subclass of `Tracker` that uses the tool's own API, which is imported when a run begins.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from autotune.base.errors import UnknownNameError, UsageError


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a run when it begins.

    Attributes:
        project: what the run belongs to: the workload. name: of the run.
        key: the same for each process that goes on with the run, and for no other run.
        parameters: of the run, such as the configuration.
        folder: for trackers that write files and have no place of their own.
        from_step: the step after which it goes on; 0 for a new one.
    """

    project: str
    name: str
    key: str
    parameters: Mapping[str, bool | int | float | str]
    folder: Path
    from_step: int = 0


class Tracker(ABC):
    """One run in an experiment tracker. Made when the run begins, in the process that tells it; any method may raise.

    Attributes:
        package: is imported. pip: installs it.
    """

    package: ClassVar[str]
    pip: ClassVar[str]

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take figures at a step. Steps do not decrease within a process."""

    @abstractmethod
    def tell(self, step: int, name: str, text: str) -> None:
        """Take a text at a step."""

    @abstractmethod
    def end(self, *, failed: bool) -> None:
        """End the run: everything is where the tool keeps it."""


def names() -> list[str]:
    """Return the names of the trackers, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def tracker_named(name: str) -> type[Tracker]:
    """Return a tracker, whether its package is installed or not.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if name not in names():
        raise UnknownNameError("tracker", name, names())
    tracker: type[Tracker] = importlib.import_module(f"{__name__}.{name}").TRACKER
    return tracker


def check(wanted: Sequence[str]) -> list[type[Tracker]]:
    """Return the trackers of these names, before anything is started.

    Raises:
        UnknownNameError: there is none of a name. UsageError: its package is not installed.
    """
    trackers = []
    for name in dict.fromkeys(wanted):
        tracker = tracker_named(name)
        if importlib.util.find_spec(tracker.package) is None:
            raise UsageError(
                f"--track {name} needs the package {tracker.package}, which is not installed here",
                advice=f"pip install {tracker.pip}.",
            )
        trackers.append(tracker)
    return trackers


class Tracking:
    """One run in several trackers, started in all of them when the first thing is logged.

    A tracker that raises receives nothing more, and the user is told in one sentence. What trackers print goes to
    stderr. As a context manager it ends the run, as failed if the block raises.

    Args:
        say: called with that sentence.
    """

    def __init__(
        self, trackers: Sequence[type[Tracker]], run: Callable[[], TrackedRun], say: Callable[[str], None]
    ) -> None:
        self._waiting = list(trackers)
        self._run = run
        self._say = say
        self._open: list[Tracker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(failed=kind is not None)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Tell figures at a step; ``None`` is left out."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        self._each(lambda tracker: tracker.log(step, known))

    def tell(self, step: int, name: str, text: str) -> None:
        """Tell a text at a step."""
        self._each(lambda tracker: tracker.tell(step, name, text))

    def end(self, *, failed: bool = False) -> None:
        """End the run, if it has begun. May be called twice."""
        self._waiting = []
        self._each(lambda tracker: tracker.end(failed=failed))
        self._open = []

    def _each(self, act: Callable[[Tracker], None]) -> None:
        waiting, self._waiting = self._waiting, []
        run = self._run() if waiting else None
        for kind in waiting:
            assert run is not None
            with self._guarded(kind.package):
                self._open.append(kind(run))
        for tracker in list(self._open):
            with self._guarded(tracker.package, tracker):
                act(tracker)

    @contextlib.contextmanager
    def _guarded(self, package: str, tracker: Tracker | None = None) -> Iterator[None]:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except Exception as error:
            if tracker is not None:
                self._open.remove(tracker)
            first = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self._say(f"{package} fails, and is told nothing more ({first})")
