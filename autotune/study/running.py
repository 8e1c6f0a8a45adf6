"""Runs a study's launches on its devices, within its budget, and enters each in the study's tables."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from autotune.launcher import Launcher
from autotune.launcher.lanes import Lanes, OneLane
from autotune.base.layout import LaunchFiles, StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import Beat, TrialResult, TrialSpec, TrialStatus
from autotune.study.budget import Budget
from autotune.study.launch_files import write_result
from autotune.study.samples_read import SamplesRead
from autotune.study.source_watch import SourceWatch, edited_meanwhile
from autotune.study.tables import LaunchTables

_T = TypeVar("_T")
#: Launches, one after another: yields the spec of each, is sent its result, and returns what all of them show.
Launching = Generator[TrialSpec, TrialResult, _T]


@dataclass(frozen=True)
class Place:
    """A device of a study, as fields of the specs of its launches."""

    devices: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@dataclass
class _Task:
    """Launches on one device, one after another.

    Attributes:
        spec: of the launch that runs now. waits: it has not begun to train, and may be waiting for its device.
    """

    title: str
    launching: Launching[Any]
    then: Callable[[Any], None]
    spec: TrialSpec
    waits: bool = True


class RunningLaunches:
    """The launches that run now, at most one on each device.

    Of launches that run side by side, the observer receives the beats of the one that has begun last.

    Args:
        places: the devices; what is run alone is run on the first.
        source: the workload's files, if they can be watched.
        launcher: `Lanes`, as many as there are devices, or the launcher of the only one.
        stop: called a few times a second; if it returns True, the running launches end as interrupted.
    """

    def __init__(
        self,
        files: StudyFiles,
        places: Sequence[Place],
        source: SourceWatch | None,
        budget: Budget,
        launcher: Launcher,
        observer: Observer,
        stop: Callable[[], bool],
        tables: LaunchTables | None = None,
    ) -> None:
        self._places = places
        self._source = source
        self._budget = budget
        self._lanes = launcher if isinstance(launcher, Lanes) else OneLane(launcher)
        self._observer = observer
        self._stop = stop
        self.tables = tables or LaunchTables(files)
        self.reading = SamplesRead(files)
        self._tasks: dict[int, _Task] = {}
        self._shown: _Task | None = None
        #: The device whose launch was the first to train after a pause of the budget.
        self._resumed: int | None = None

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self._lanes.count

    @property
    def number(self) -> int:
        """Number of devices on which something runs."""
        return len(self._tasks)

    @property
    def free(self) -> int:
        """Number of devices on which nothing runs."""
        return max(0, self.devices - len(self._tasks))  # some may have gone while something ran on them

    def alone(self, title: str, launching: Launching[_T]) -> _T:
        """Run launches on the first device, while nothing else runs; return what they show.

        Raises:
            WorkloadError: the workload's files have been edited.
            MachineError: see `Launcher`.
        """
        found: list[_T] = []
        try:
            self.begin(title, launching, found.append)
            while not found:
                self.end()
        except BaseException:
            self.abandon()
            raise
        return found[0]

    def begin(self, title: str, launching: Launching[_T], then: Callable[[_T], None]) -> None:
        """Begin launches on a free device.

        Args:
            title: names their purpose.
            then: called by `end` with what they have shown.

        Raises:
            WorkloadError, MachineError: as `alone`.
        """
        lane = next(lane for lane in range(self._lanes.count) if lane not in self._tasks)
        spec, shown = _next(launching, None)
        if spec is None:  # an earlier run of the study has made all of them
            then(shown)
        else:
            self._launch(lane, title, launching, then, spec)

    def end(self) -> None:
        """Wait until the launches on one device have ended, and call what was to be called then.

        Raises:
            WorkloadError, MachineError: as `alone`.
        """
        while True:
            lane, result = self._lanes.end()
            task = self._tasks.pop(lane)
            result = self._entered(lane, task.spec, result)
            spec, shown = _next(task.launching, result)
            if spec is None:
                task.then(shown)
                return
            self._launch(lane, task.title, task.launching, task.then, spec)

    def abandon(self) -> None:
        """End everything that runs. A resumed study finds the results in the launches' folders."""
        self._lanes.abandon()
        self._budget.resume()
        while self._tasks:
            _, task = self._tasks.popitem()
            _clear(task.spec)

    def _launch(
        self, lane: int, title: str, launching: Launching[Any], then: Callable[[Any], None], spec: TrialSpec
    ) -> None:
        if self._source is not None:
            self._source.check()
        first = self.reading.after([task.spec for task in self._tasks.values()])
        spec = spec.model_copy(update={**asdict(self._places[lane]), "first_sample": first})
        if spec.heat is None:
            self._observer.launch_begins(title, spec.config)
        else:
            self._observer.heat_begins(title, spec.heat.entrants)
        task = self._shown = self._tasks[lane] = _Task(title, launching, then, spec)
        self._pause()

        def beat(found: Beat) -> None:
            if task.waits:
                task.waits = False
                self._resume(lane)
            if task is self._shown:
                self._observer.beat(found)

        self._lanes.begin(lane, spec, on_beat=beat, stop=self.should_stop)

    def _entered(self, lane: int, spec: TrialSpec, result: TrialResult) -> TrialResult:
        """Enter a launch that has ended in the budget and in the tables."""
        self._resume(lane)
        if self._resumed == lane:
            self._budget.settle(result.waited_s)
            self._resumed = None
        _clear(spec)
        edited = None if self._source is None else self._source.edited()
        if edited is not None:
            # A part of the launch may have used the new code (workers import it late), so its figures are nobody's.
            result = TrialResult(
                launch=spec.launch, status=TrialStatus.INTERRUPTED, cause=f"{edited} was edited while it ran"
            )
            write_result(LaunchFiles(Path(spec.folder)), result)
        self.reading.add(spec, result)
        if self.tables.exist:
            self.tables.add(spec, result)
        self._budget.save()
        if edited is not None:
            raise edited_meanwhile(edited)
        self._pause()
        return result

    def _pause(self) -> None:
        """Stop counting while every launch may be waiting for its device, for any length of time."""
        if self._tasks and all(task.waits for task in self._tasks.values()):
            self._budget.pause()

    def _resume(self, lane: int) -> None:
        if self._budget.is_paused:
            self._budget.resume()
            self._resumed = lane

    def should_stop(self) -> bool:
        """Note that time passes; return whether nothing more may run."""
        self._budget.tick()
        self._observer.clock(self._budget.spent_s, self._budget.limit_s)
        return self._stop() or self._budget.left_s < -self._budget.grace_s


def once(spec: TrialSpec) -> Launching[TrialResult]:
    """Launch once, and return the result."""
    return (yield spec)


def _next(launching: Launching[Any], result: TrialResult | None) -> tuple[TrialSpec | None, Any]:
    """Return the spec of the next launch; after the last one ``None``, and what all have shown.

    Args:
        result: of the last launch; ``None`` before the first.
    """
    try:
        return (next(launching) if result is None else launching.send(result)), None
    except StopIteration as ended:
        return None, ended.value


def _clear(spec: TrialSpec) -> None:
    """Remove the folders that a script had for itself. Nothing of the launch runs any more."""
    files = LaunchFiles(Path(spec.folder))
    for folder in (files.output, files.scratch):
        shutil.rmtree(folder, ignore_errors=True)
