"""Launches on other machines."""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autotune.base.clock import SystemClock, VirtualClock
from autotune.base.errors import MachineError
from autotune.base.files import write_atomic
from autotune.base.layout import LaunchFiles, StudyFiles
from autotune.base.records import ATTEMPTS, Beat, Fingerprint, LaunchKind, TrialResult, TrialSpec, TrialStatus
from autotune.launcher.errands import Errand, ErrandEnd, WorkerFacts
from autotune.launcher.fork_client import LOOK_S
from autotune.launcher.lanes import Lanes, OnBeat, Stop
from autotune.launcher.quiet import Yardstick
from autotune.launcher.watch import make_way, open_folder
from autotune.workload.catalog import source_files

# What a search asks of workers on other machines, and what they report.


@dataclass(frozen=True)
class Arrived:
    """A worker can be given errands."""

    worker: str
    facts: WorkerFacts


@dataclass(frozen=True)
class Gone:
    """A worker is lost, with all that it was doing. ``why``: a clause, such as "its node died"."""

    worker: str
    why: str


@dataclass(frozen=True)
class Reported:
    """The launch of a worker's errand reports progress."""

    worker: str
    errand: str
    beat: Beat


@dataclass(frozen=True)
class Said:
    """A worker has something to tell the user, if only why it cannot arrive."""

    worker: str
    sentence: str


@dataclass(frozen=True)
class Returned:
    """A worker has ended an errand, and can be given the next."""

    worker: str
    end: ErrandEnd


News = Arrived | Gone | Reported | Said | Returned


class Workers(ABC):
    """Workers on other machines. All calls are made in the search's own thread, and none of them raises for a worker
    that is lost: that is news.

    Attributes:
        count: how many are expected at a time; may change with the news.
        what: names them all for people, such as "the Ray cluster at ray://head:10001".
    """

    count: int
    what: str

    @abstractmethod
    def news(self, wait_s: float) -> list[News]:
        """Return what has happened since the last call, in order; wait for something so long at most.

        Raises:
            MachineError: no worker can be reached any more, and none will come.
        """

    @abstractmethod
    def send(self, worker: str, errand: Errand) -> None:
        """Give a worker an errand. It has one at a time."""

    @abstractmethod
    def recall(self, worker: str) -> None:
        """Ask a worker to end its errand, which then ends as interrupted."""

    @abstractmethod
    def dismiss(self, worker: str, *, keep_away: bool) -> None:
        """Use a worker no more, and end what it runs. It sends no more news.

        Args:
            keep_away: its machine is not fit for this search, so no other worker is wanted there.
        """

    def explain(self, worker: str, why: str) -> None:  # noqa: B027
        """Tell a worker why it is going to be dismissed for good, for those who look there. Need not do anything."""

    @abstractmethod
    def close(self) -> None:
        """Dismiss all, and release what is kept. May be called twice."""


# Packs a launch for a worker: with its code, and with the launch that makes what it starts from.


def packed(name: str, spec: TrialSpec, study: Path) -> Errand:
    """Return a launch as an errand.

    Args:
        name: see `Errand`.
        study: the study's folder.
    """
    path = spec.workload.path
    script = None if spec.command is None else path
    return Errand(
        name=name,
        study=str(study),
        spec=spec,
        code=source_files(Path(path)) if spec.command is None and path is not None else {},
        script=script,
        script_sha256="" if script is None else spec.workload.sha256,
        before=_maker(spec, StudyFiles(study)),
    )


def _maker(spec: TrialSpec, files: StudyFiles) -> TrialSpec | None:
    """Return the launch that makes what a check starts from; ``None`` if it starts from nothing."""
    if spec.check is None or (spec.check.reference and spec.check.seed == 0):
        return None
    for path in sorted(files.launches.glob("*/spec.json")):
        with contextlib.suppress(OSError, ValueError):
            made = TrialSpec.model_validate_json(path.read_text())
            check = made.check
            if check is not None and check.reference and check.seed == 0 and check.store == spec.check.store:
                return made
    return None


# Launches on other machines: lanes whose launches are run by workers that come and go.
#
# The search stays where it was asked for. A launch whose worker is lost is sent to another one, under its own name, and
# what the lost one might still report is dropped, so that nothing is lost and nothing counts twice.

#: After this long without any worker, the user is told.
SAY_AFTER_S = 3.0
#: How long launches that are no longer wanted may take to end before their workers are given up.
ABANDON_S = 30.0
#: How long to wait for others when the only worker has been refused.
OTHERS_S = 30.0


@dataclass
class _Worker:
    """Attributes:
    fit: it has been found to be on the same kind of machine as the first. errand: what it does now.
    """

    name: str
    facts: WorkerFacts
    fit: bool = False
    errand: str | None = None


@dataclass
class _Task:
    """Attributes:
    worker: that runs it; ``None`` while it waits for one. lost: how many workers have been lost with it.
    """

    spec: TrialSpec
    on_beat: OnBeat
    stop: Stop
    worker: str | None = None
    lost: int = 0


@dataclass
class RemoteLanes(Lanes):
    """Lanes whose launches are run by workers on other machines.

    A lane stays with its worker as long as there is one, so that what runs alone, in the first lane, runs on one
    machine. The first worker tells by its probes what machine the study is for. Before the first launch of any other,
    it is probed, and not used if it differs.

    Args:
        study: the folder of the study, in which launches have theirs.
        clock: does not count time in which there is no worker.
        says: receives sentences for the user.
        known: the machine that the study is tied to; ``None`` for a new study.
    """

    workers: Workers
    study: Path
    clock: SystemClock | VirtualClock
    says: Callable[[str], None]
    known: Fingerprint | None = None
    count: int = field(init=False)
    _staff: dict[str, _Worker] = field(default_factory=dict)
    _tasks: dict[int, _Task] = field(default_factory=dict)
    _ended: deque[tuple[int, TrialResult]] = field(default_factory=deque)
    #: By lane, the worker that ran its last launch.
    _homes: dict[int, str] = field(default_factory=dict)
    _yardstick: Yardstick = field(init=False)
    #: Until when launches that are no longer wanted may end by themselves; ``None``: all are wanted.
    _ending_until_s: float | None = None
    #: Why a worker was refused when no other one was fit, and what to change.
    _refusal: tuple[str, str | None] | None = None
    _alone_s: float = 0.0
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.count = self.workers.count
        self._yardstick = Yardstick(self.known)

    def first(self, raise_if_stopped: Callable[[], None]) -> WorkerFacts:
        """Wait for a worker; return what the first one has."""
        while not self._staff:
            raise_if_stopped()
            self._look()
        return next(iter(self._staff.values())).facts

    def begin(self, lane: int, spec: TrialSpec, *, on_beat: OnBeat, stop: Stop) -> None:
        open_folder(spec)
        self._tasks[lane] = _Task(spec, on_beat, stop)
        self._assign()

    def end(self) -> tuple[int, TrialResult]:
        while not self._ended:
            self._look()
            self._assign()
            # Each of them wants to be asked.
            asked = [task.stop() for task in self._tasks.values()]
            if any(asked):
                self._end_all()
            if self._ending_until_s is not None and self.clock.now() > self._ending_until_s:
                self._give_up()
        lane, result = self._ended.popleft()
        if not self._tasks:
            self._ending_until_s = None
        return lane, result

    def abandon(self) -> None:
        deadline_s = self._end_all()
        while any(worker.errand for worker in self._staff.values()) and self.clock.now() < deadline_s:
            try:
                self._look()
            except MachineError:
                break
        self._give_up()
        self._ended.clear()
        self._ending_until_s = None

    def close(self) -> None:
        self.workers.close()
        self._staff.clear()

    def _look(self) -> None:
        """Take what workers report; do not count the time if there is none."""
        began_s = self.clock.now()
        for news in self.workers.news(LOOK_S):
            self._take(news)
        self.count = self.workers.count
        if self._staff:
            self._alone_s = 0.0
            return
        before_s, self._alone_s = self._alone_s, self._alone_s + self.clock.now() - began_s
        if before_s < SAY_AFTER_S <= self._alone_s:
            self.says(f"there is no worker; waiting for one of {self.workers.what}")
        if self._refusal is not None and self._alone_s > OTHERS_S:
            raise MachineError(f"no worker can be used: {self._refusal[0]}", advice=self._refusal[1])
        self.clock.skip_stop(began_s, 0.0)

    def _take(self, news: News) -> None:
        if isinstance(news, Arrived):
            self._staff[news.worker] = _Worker(news.worker, news.facts)
            return
        worker = self._staff.get(news.worker)
        if isinstance(news, Said):
            self._say_once(news.sentence if worker is None else f"{worker.facts.where}: {news.sentence}")
            return
        if worker is None:
            return  # it was dismissed meanwhile
        if isinstance(news, Gone):
            self._lose(worker, news.why)
        elif isinstance(news, Reported):
            task = self._task_of(worker)
            if task is not None and news.errand == worker.errand:
                task[1].on_beat(news.beat)
        elif news.end.errand == worker.errand:
            self._end(worker, news.end)

    def _task_of(self, worker: _Worker) -> tuple[int, _Task] | None:
        """Return what a worker runs; ``None`` while it is only looked at."""
        return next(((lane, task) for lane, task in self._tasks.items() if task.worker == worker.name), None)

    def _assign(self) -> None:
        """Send launches that wait to workers that are free, and look at new workers where they are needed."""
        for lane, task in sorted(self._tasks.items()):
            if task.worker is not None or self._ending_until_s is not None:
                continue
            worker = self._free_for(lane, task)
            if worker is not None:
                task.worker = self._homes[lane] = worker.name
                self._send(worker, task.spec)
            elif self._yardstick.probe is not None:
                new = next((one for one in self._staff.values() if not one.fit and one.errand is None), None)
                if new is not None:
                    name = f"probe-{new.name}"
                    folder = str(StudyFiles(self.study).launch(name).folder)
                    self._send(new, self._yardstick.probe.model_copy(update={"launch": name, "folder": folder}))

    def _free_for(self, lane: int, task: _Task) -> _Worker | None:
        probes = task.spec.kind is LaunchKind.PROBE
        free = [one for one in self._staff.values() if one.errand is None and (one.fit or probes)]
        home = self._homes.get(lane)
        others = {name for other, name in self._homes.items() if other != lane}
        # Its own worker, or else one that is nobody's, or else any.
        return min(free, key=lambda one: (one.name != home, one.name in others, not one.fit), default=None)

    def _send(self, worker: _Worker, spec: TrialSpec) -> None:
        worker.errand = uuid.uuid4().hex
        self.workers.send(worker.name, packed(worker.errand, spec, self.study))

    def _end(self, worker: _Worker, end: ErrandEnd) -> None:
        """Take the end of a worker's errand."""
        worker.errand = None
        found = self._task_of(worker)
        result = end.result
        if result is None:
            self._refuse(worker, end.error or "it reports nothing", end.advice)
            return
        if result.probe is not None:
            asked = None if found is None else found[1].spec
            why = self._yardstick.why_not(worker.facts, result.probe, asked, is_known=worker.fit)
            if why is not None:
                self._refuse(worker, why, None)
                return
            worker.fit, self._refusal = True, None
        if found is None:
            if result.probe is None and result.status is not TrialStatus.INTERRUPTED:
                self._refuse(worker, result.cause or f"its probe ended as {result.status}", result.advice)
            return
        self._finish(*found, result, end)

    def _finish(self, lane: int, task: _Task, result: TrialResult, end: ErrandEnd | None) -> None:
        """Write a launch into its folder, as if it had been run here, and hand it to the search."""
        files = LaunchFiles(Path(task.spec.folder))
        if result.wall_s and result.began_s is not None:
            # The worker's clock is another one.
            result = result.model_copy(update={"began_s": self.clock.now() - result.wall_s})
        for path, text in ((files.stdout, end and end.stdout), (files.stderr, end and end.stderr)):
            make_way(path)
            write_atomic(path, text or "")
        make_way(files.result)
        write_atomic(files.result, result.model_dump_json())
        del self._tasks[lane]
        self._ended.append((lane, result))

    def _lose(self, worker: _Worker, why: str) -> None:
        """Forget a worker; its launch waits for another one."""
        del self._staff[worker.name]
        found = self._task_of(worker)
        if found is None:
            return
        lane, task = found
        task.worker = None
        task.lost += 1
        if self._ending_until_s is not None:
            self._finish(lane, task, _interrupted(task.spec), None)
        elif task.lost >= ATTEMPTS:
            cause = f"each of the {task.lost} workers that ran it was lost: {why}"
            killed = TrialResult(
                launch=task.spec.launch, status=TrialStatus.KILLED, cause=cause, transient=True, phase=None
            )
            self._finish(lane, task, killed, None)
        else:
            self.says(f"{worker.facts.where} is lost ({why}); {task.spec.launch} runs again elsewhere")

    def _refuse(self, worker: _Worker, why: str, advice: str | None) -> None:
        """Use a worker no more, because its machine is not fit for the search."""
        if not any(one.fit for one in self._staff.values() if one is not worker):
            self._refusal = f"{worker.facts.where}: {why}", advice
        self._say_once(f"{worker.facts.where} is not used: {why}")
        found = self._task_of(worker)
        if found is not None:
            found[1].worker = None
            if self._ending_until_s is not None:
                self._finish(*found, _interrupted(found[1].spec), None)
        self.workers.explain(worker.name, why)
        self._dismiss(worker, keep_away=True)

    def _dismiss(self, worker: _Worker, *, keep_away: bool) -> None:
        del self._staff[worker.name]
        self.workers.dismiss(worker.name, keep_away=keep_away)

    def _end_all(self) -> float:
        """Have everything end that runs; what waits for a worker ends at once. Return until when it may take."""
        if self._ending_until_s is not None:
            return self._ending_until_s
        self._ending_until_s = self.clock.now() + ABANDON_S
        for lane, task in sorted(self._tasks.items()):
            if task.worker is None:
                self._finish(lane, task, _interrupted(task.spec), None)
        for worker in self._staff.values():
            if worker.errand is not None:
                self.workers.recall(worker.name)
        return self._ending_until_s

    def _give_up(self) -> None:
        """Give up the workers that have not ended what they were asked to end."""
        for worker in [worker for worker in self._staff.values() if worker.errand is not None]:
            self._dismiss(worker, keep_away=False)
        for lane, task in sorted(self._tasks.items()):
            self._finish(lane, task, _interrupted(task.spec), None)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.says(sentence)


def _interrupted(spec: TrialSpec) -> TrialResult:
    return TrialResult(
        launch=spec.launch, status=TrialStatus.INTERRUPTED, cause="the search was ended while it waited for a worker"
    )
