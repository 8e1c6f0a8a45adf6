"""The contract of an experiment tracker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


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
