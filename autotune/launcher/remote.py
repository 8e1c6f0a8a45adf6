"""Launches on other machines: what is sent there and back, what runs them there, and what sends them from here."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

import autotune
from autotune.base.clock import Clock, SystemClock, VirtualClock
from autotune.base.errors import AutotuneError, MachineError, WorkloadError
from autotune.base.files import exclusive_lock, write_atomic
from autotune.base.layout import LaunchFiles, StudyFiles
from autotune.base.records import (
    ATTEMPTS,
    Beat,
    DataRef,
    Fingerprint,
    Host,
    LaunchKind,
    Probe,
    Record,
    TrialResult,
    TrialSpec,
    TrialStatus,
)
from autotune.base.version import __version__
from autotune.launcher import Launcher
from autotune.launcher.fork_client import LOOK_S
from autotune.launcher.lanes import Lanes, OnBeat, Stop
from autotune.launcher.quiet import stopped_waiting
from autotune.launcher.result import end_of
from autotune.launcher.watch import make_way, open_folder
from autotune.machine import page_cache
from autotune.machine.gpu import Gpu
from autotune.machine.host import fingerprint
from autotune.workload.catalog import source_files, source_hash
from autotune.workload.data import sets

# What a search and the workers that run its launches elsewhere exchange: errands, and how they ended.


class WorkerFacts(Record):
    """The part of its machine that a worker has.

    Attributes:
        where: the machine's name, for people.
        device: contract name of its only device. gpu: NVML's description of it.
        cores: the cores to which its launches are pinned; empty: not pinned.
    """

    where: str
    host: Host
    device: str = "cpu"
    gpu: Gpu | None = None
    cores: tuple[int, ...] = ()

    @property
    def place(self) -> dict[str, Any]:
        """Its device, as fields of a launch's spec."""
        env = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu.uuid}
        return {"devices": (self.device,), "env": env, "cores": self.cores}


class Errand(Record):
    """A launch that a worker is to run for a search elsewhere. Can be sent as JSON.

    Attributes:
        name: unique among all errands of the search: a launch that is sent again gets a new one.
        study: the study's folder on the search's machine. Its contents are below the worker's own folder here.
        spec: has the paths and the device of the search's machine.
        code: the workload's file and the modules beside it, by path relative to its folder; empty if they are not
            files, or if the training is a command, whose script has the same path and the same hash here.
        before: the launch that makes what this one starts from; run first if it has not been run here yet.
    """

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    name: str
    study: str
    spec: TrialSpec
    code: dict[str, bytes] = Field(default_factory=dict)
    before: TrialSpec | None = None


class ErrandEnd(Record):
    """How an errand ended: with a result, or with the error that keeps this worker from running it.

    Attributes:
        stdout, stderr: the tails of the launch's logs.
        error: one sentence. advice: what to change.
    """

    errand: str
    result: TrialResult | None = None
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    advice: str | None = None


# The worker's side of a search that launches elsewhere: runs its launches here, in a folder of its own.

#: How many bytes at the end of each log of a launch are sent back.
LOG_BYTES = 2**20


@cache
def own_code() -> str:
    """Return what identifies this autotune: its version and a hash of its modules, however they are installed."""
    folder = Path(autotune.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        # In a wheel, the catalogs are part of the package. Workloads are compared separately.
        if name.parts[0] != "_catalog":
            digest.update(f"{name}\0".encode() + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


class Workplace:
    """Runs launches here for one search elsewhere, one at a time.

    As with a `Launcher`, all calls must be made in the same thread: its launches end with that thread.

    Args:
        folder: holds everything that this search leaves here; removed by `close`.
    """

    def __init__(self, folder: Path, facts: WorkerFacts, launcher: Launcher, clock: Clock) -> None:
        self.facts = facts
        self._folder = folder
        self._launcher = launcher
        self._clock = clock
        #: The path of the data here, by what was requested.
        self._data: dict[str, str | None] = {}
        #: Launches already run here because others start from their output.
        self._made: set[str] = set()

    def run(self, errand: Errand, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> ErrandEnd:
        """Run an errand to its end; see `Launcher.run`. An error of this machine is returned as the errand's end."""
        try:
            _check_script(errand.spec)
            code = self._written(errand)
            before = errand.before
            if before is not None and before.launch not in self._made:
                self._launch(errand, before, code, lambda beat: None, stop)
            spec, result = self._launch(errand, errand.spec, code, on_beat, stop)
        except AutotuneError as error:
            return ErrandEnd(errand=errand.name, error=str(error), advice=error.advice)
        except OSError as error:
            return ErrandEnd(errand=errand.name, error=f"{self._folder} cannot be written: {error.strerror}")
        files = LaunchFiles(Path(spec.folder))
        stdout, stderr = end_of(files.stdout, LOG_BYTES), end_of(files.stderr, LOG_BYTES)
        shutil.rmtree(files.folder, ignore_errors=True)
        return ErrandEnd(errand=errand.name, result=result, stdout=stdout, stderr=stderr)

    def close(self) -> None:
        """Close the launcher and remove the folder. May be called twice."""
        self._launcher.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(
        self,
        errand: Errand,
        asked: TrialSpec,
        code: Path | None,
        on_beat: Callable[[Beat], None],
        stop: Callable[[], bool],
    ) -> tuple[TrialSpec, TrialResult]:
        began_s = self._clock.now()
        spec = self._here(asked, Path(errand.study), code)
        ready_s = self._clock.now() - began_s
        result = self._launcher.run(spec, on_beat=on_beat, stop=stop)
        # The time to generate the data or read it in advance does not count towards a budget.
        result = result.model_copy(update={"waited_s": result.waited_s + ready_s})
        if result.check is not None and asked.check is not None and asked.check.reference:
            self._made.add(asked.launch)
        # Paths in the result must refer to the files that are sent back.
        text = result.model_dump_json().replace(str(self._folder), errand.study)
        return spec, TrialResult.model_validate_json(text)

    def _here(self, spec: TrialSpec, study: Path, code: Path | None) -> TrialSpec:
        """Return a spec with the paths and the device of this machine."""

        def moved(path: str | None) -> str | None:
            return None if path is None else str(self._folder / Path(path).relative_to(study))

        changes: dict[str, Any] = {
            **self.facts.place,
            "folder": moved(spec.folder),
            "cache_folder": moved(spec.cache_folder),
            "data": self._data_here(spec.data),
        }
        if code is not None:
            changes["workload"] = spec.workload.model_copy(update={"path": str(code)})
        if spec.check is not None:
            changes["check"] = spec.check.model_copy(update={"store": moved(spec.check.store)})
        return spec.model_copy(update=changes)

    def _written(self, errand: Errand) -> Path | None:
        """Write the errand's code, and return the workload's file; ``None`` if the same code is at the same path here,
        where files that are not modules may be beside it."""
        path = errand.spec.workload.path
        if not errand.code or path is None:
            return None
        with contextlib.suppress(AutotuneError):
            if Path(path).is_file() and source_files(Path(path)) == errand.code:
                return None
        # The module is named after the file, and its siblings are below the file's folder.
        folder = self._folder / "code" / errand.spec.workload.sha256[:12]
        for name, content in errand.code.items():
            file = folder / name
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        return folder / Path(path).name

    def _data_here(self, asked: DataRef) -> DataRef:
        """Return the same data with its path here, after it has been checked and read once.

        Raises:
            WorkloadError, MachineError: it is not here, or it is different data.
        """
        if asked.path is None:
            return asked
        key = asked.model_dump_json(include={"kind", "path", "identity"})
        if key in self._data:
            return asked.model_copy(update={"path": self._data[key]})
        path = Path(asked.path)
        if asked.kind == "generated":
            data = sets.ensure_generated(
                processes=self.facts.host.cores, on_progress=lambda done, total: None, clock=self._clock
            )
            identities = {data.identity}
        elif not path.is_dir():
            raise WorkloadError(f"there is no folder {path}", advice="the data is to be at one path for all workers.")
        else:
            data, identities = asked, set(_identities(path)) if asked.identity else {""}
        if asked.identity not in identities:
            raise WorkloadError(f"{path} has other data", advice="all workers are to read the same data.")
        # So that the first launch does not read more slowly than the last.
        page_cache.warm(Path(data.path or path), clock=self._clock)
        self._data[key] = data.path
        return asked.model_copy(update={"path": data.path})


@contextlib.contextmanager
def folder_of_worker() -> Iterator[Path]:
    """Make a folder for a worker, and remove it at the end. Folders of killed workers are removed first."""
    parent = Path(tempfile.gettempdir())
    prefix = f"autotune-worker-{os.geteuid()}-"
    with contextlib.ExitStack() as locks:
        # Otherwise a new folder whose lock is not held yet could be taken for an abandoned one.
        with exclusive_lock(parent / f".{prefix}lock", wait=True):
            for leftover in parent.glob(f"{prefix}*"):
                with exclusive_lock(leftover / ".lock") as free:
                    if free:
                        shutil.rmtree(leftover, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            locks.enter_context(exclusive_lock(folder / ".lock"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _identities(path: Path) -> list[str]:
    """Return the identities that a folder may have, depending on its layout."""
    identities = [sets.tree(path).identity]
    with contextlib.suppress(WorkloadError):
        identities.append(sets.folder(path).identity)
    return identities


class WorkplaceThread:
    """A workplace in a thread of its own, so that its owner stays responsive while an errand runs.

    Args:
        make: makes the workplace; called in that thread, which lasts until `close`.
        tell: receives an errand's name, with its progress or its end; called in that thread.
    """

    def __init__(self, make: Callable[[], Workplace], tell: Callable[[str, Beat | ErrandEnd], None]) -> None:
        self._tell = tell
        self._ending = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="workplace")
        self._place = self._thread.submit(make).result()
        self.facts = self._place.facts

    def begin(self, errand: Errand) -> None:
        """Begin an errand once the running one has ended."""
        self._ending.clear()
        self._thread.submit(self._run, errand)

    def recall(self) -> None:
        """Make the errand end as interrupted."""
        self._ending.set()

    def close(self) -> None:
        """End whatever runs, and close the workplace."""
        self._ending.set()
        with self._thread:
            self._thread.submit(self._place.close).result()

    def _run(self, errand: Errand) -> None:
        try:
            end = self._place.run(errand, on_beat=partial(self._tell, errand.name), stop=self._ending.is_set)
        except Exception as error:  # would go unnoticed in a thread
            end = ErrandEnd(errand=errand.name, error=f"an error inside autotune: {type(error).__name__}: {error}")
        self._tell(errand.name, end)


def _check_script(spec: TrialSpec) -> None:
    if spec.command is None or spec.workload.path is None:
        return
    script = Path(spec.workload.path)
    if not script.is_file():
        raise MachineError(f"there is no {script}", advice="a script is to be at the same path for all workers.")
    if source_hash(script) != spec.workload.sha256:
        raise MachineError(f"{script} is another one there", advice="all workers are to run the same script.")


# What workers on other machines report to a search, and the requests that it makes of them.


@dataclass(frozen=True)
class Arrived:
    """A worker is ready for errands."""

    worker: str
    facts: WorkerFacts


@dataclass(frozen=True)
class Gone:
    """A worker is lost, along with its errand. ``why``: a clause, such as "its node died"."""

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
    """A worker has a message for the user, perhaps only why it cannot arrive."""

    worker: str
    sentence: str


@dataclass(frozen=True)
class Returned:
    """A worker has ended an errand, and is ready for the next."""

    worker: str
    end: ErrandEnd


News = Arrived | Gone | Reported | Said | Returned


class Workers(ABC):
    """Workers on other machines.

    All calls are made in the search's own thread. None of them raises because a worker is lost: that is reported as
    news.

    Attributes:
        count: how many are expected at a time; may change with the news.
        what: a name for all of them, for people, such as "the Ray cluster at ray://head:10001".
    """

    count: int
    what: str

    @abstractmethod
    def news(self, wait_s: float) -> list[News]:
        """Return what has happened since the last call, in order, waiting at most ``wait_s`` for something to happen.

        Raises:
            MachineError: no worker can be reached any more, and none will come.
        """

    @abstractmethod
    def send(self, worker: str, errand: Errand) -> None:
        """Give a worker an errand. It can have only one at a time."""

    @abstractmethod
    def recall(self, worker: str) -> None:
        """Ask a worker to end its errand, which then ends as interrupted."""

    @abstractmethod
    def dismiss(self, worker: str, *, keep_away: bool) -> None:
        """Stop using a worker, and end what it runs. It sends no more news. If its machine is not fit for this search,
        no other worker is to be started there: keep away."""

    @abstractmethod
    def close(self) -> None:
        """Dismiss all workers and release all resources. May be called twice."""


def packed(name: str, spec: TrialSpec, study: Path) -> Errand:
    """Return a launch as an errand of a study, given its folder: with its code and the launch that makes what it starts
    from."""
    path = spec.workload.path
    code = source_files(Path(path)) if spec.command is None and path is not None else {}
    return Errand(name=name, study=str(study), spec=spec, code=code, before=_maker(spec, StudyFiles(study)))


def _maker(spec: TrialSpec, files: StudyFiles) -> TrialSpec | None:
    """Return the launch that makes what a check starts from; ``None`` if it starts from nothing."""
    if spec.check is None or (spec.check.reference and spec.check.seed == 0):
        return None
    for path in sorted(files.launches.glob("*/spec.json")):
        with contextlib.suppress(OSError, ValueError):
            maker = TrialSpec.model_validate_json(path.read_text())
            check = maker.check
            if check is not None and check.reference and check.seed == 0 and check.store == spec.check.store:
                return maker
    return None


# Launches on other machines: lanes whose launches are run by workers that come and go.
#
# The search stays where it was requested. A launch whose worker is lost is sent to another one under its own name, and
# anything that the lost worker still reports is dropped, so that nothing is lost and nothing counts twice.

#: The user is told after this long without any worker.
SAY_AFTER_S = 3.0
#: How long launches that are no longer wanted may take to end before their workers are abandoned.
ABANDON_S = 30.0
#: How long to wait for other workers when the only one has been refused.
OTHERS_S = 30.0
_DATA = ("data_kind", "data_identity", "data_store")


@dataclass
class _Worker:
    """Attributes:
    fit: its machine was found to be of the same kind as the first worker's. errand: name of its current errand.
    """

    name: str
    facts: WorkerFacts
    fit: bool = False
    errand: str | None = None


@dataclass
class _Task:
    """Attributes:
    worker: name of the one that runs it; ``None`` while it waits for one. lost: how many workers were lost with it.
    """

    spec: TrialSpec
    on_beat: OnBeat
    stop: Stop
    worker: str | None = None
    lost: int = 0


@dataclass
class RemoteLanes(Lanes):
    """Lanes whose launches are run by workers on other machines.

    A lane keeps its worker as long as that exists, so that launches that run alone, in the first lane, run on one
    machine. The first worker's probes determine the machine that the study is for. Any other worker is probed before
    its first launch, and not used if its machine differs.

    Args:
        study: the study's folder, which holds the folders of launches.
        clock: does not count time in which there is no worker.
        says: receives sentences for the user.
        known: the machine that the study is tied to; ``None`` for a new study, before its first probe.
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
    #: The last probe of the study; ``None`` before the first.
    _probe: TrialSpec | None = None
    #: In what machines may differ: a worker has already compared the data, and the search itself checks that a study's
    #: code is unchanged.
    _apart: tuple[str, ...] = (*_DATA, "workload_sha256")
    #: Deadline for launches that are no longer wanted to end by themselves; ``None``: all are wanted.
    _ending_until_s: float | None = None
    #: Why a worker was refused while no other one was fit, and what to change.
    _refusal: tuple[str, str | None] | None = None
    _alone_s: float = 0.0
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.count = self.workers.count

    def first(self, raise_if_stopped: Callable[[], None]) -> WorkerFacts:
        """Wait for a worker, and return the facts of the first one."""
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
            # A list, so that every `stop` is called.
            stops = [task.stop() for task in self._tasks.values()]
            if any(stops):
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
        """Process what workers report. Time without any worker is not counted."""
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
            return  # it has been dismissed meanwhile
        if isinstance(news, Gone):
            self._lose(worker, news.why)
        elif isinstance(news, Reported):
            task = self._task_of(worker)
            if task is not None and news.errand == worker.errand:
                task[1].on_beat(news.beat)
        elif news.end.errand == worker.errand:
            self._end(worker, news.end)

    def _task_of(self, worker: _Worker) -> tuple[int, _Task] | None:
        """Return the task that a worker runs, with its lane; ``None`` while it is only probed."""
        return next(((lane, task) for lane, task in self._tasks.items() if task.worker == worker.name), None)

    def _assign(self) -> None:
        """Send waiting launches to free workers, and probe new workers where they are needed."""
        for lane, task in sorted(self._tasks.items()):
            if task.worker is not None or self._ending_until_s is not None:
                continue
            worker = self._free_for(lane, task)
            if worker is not None:
                task.worker = self._homes[lane] = worker.name
                self._send(worker, task.spec)
                continue
            new_worker = next((other for other in self._staff.values() if not other.fit and other.errand is None), None)
            if self._probe is not None and new_worker is not None:
                name = f"probe-{new_worker.name}"
                folder = str(StudyFiles(self.study).launch(name).folder)
                self._send(new_worker, self._probe.model_copy(update={"launch": name, "folder": folder}))

    def _free_for(self, lane: int, task: _Task) -> _Worker | None:
        probes = task.spec.kind is LaunchKind.PROBE
        free = [worker for worker in self._staff.values() if worker.errand is None and (worker.fit or probes)]
        home = self._homes.get(lane)
        others = {name for other, name in self._homes.items() if other != lane}
        # Preferably the lane's own worker, then one that no other lane has, then any.
        return min(free, key=lambda worker: (worker.name != home, worker.name in others, not worker.fit), default=None)

    def _send(self, worker: _Worker, spec: TrialSpec) -> None:
        worker.errand = uuid.uuid4().hex
        self.workers.send(worker.name, packed(worker.errand, spec, self.study))

    def _end(self, worker: _Worker, end: ErrandEnd) -> None:
        """Process the end of a worker's errand."""
        worker.errand = None
        running = self._task_of(worker)
        result = end.result
        if result is None:
            self._refuse(worker, end.error or "it reports nothing", end.advice)
            return
        if result.probe is not None:
            why = self._unfit(worker, result.probe, None if running is None else running[1].spec)
            if why is not None:
                self._refuse(worker, why, None)
                return
            worker.fit, self._refusal = True, None
        if running is None:
            if result.probe is None and result.status is not TrialStatus.INTERRUPTED:
                self._refuse(worker, result.cause or f"its probe ended as {result.status}", result.advice)
            return
        self._finish(*running, result, end)

    def _unfit(self, worker: _Worker, found: Probe, spec: TrialSpec | None) -> str | None:
        """Return why a worker is not fit for the study, as a clause; ``None`` if it is.

        Args:
            found: result of a probe there.
            spec: spec of that probe, if it is one of the study's; other workers are compared with it from then on.
        """
        probe_spec = self._probe if spec is None else spec
        assert probe_spec is not None
        machine = fingerprint(found, worker.facts.host, worker.facts.gpu, probe_spec.data)
        rows = [] if self.known is None or worker.fit else self.known.differences(machine)
        rows = [row for row in rows if row[0] not in self._apart]
        if rows:
            text = "; ".join(f"{name}: {actual} instead of {expected}" for name, expected, actual in rows)
            return f"its machine is of another kind ({text})"
        if spec is not None:
            self._probe, self.known, self._apart = spec, machine, _DATA
        return None

    def _finish(self, lane: int, task: _Task, result: TrialResult, end: ErrandEnd | None) -> None:
        """Write a launch's files into its folder, as if it had run here, and hand its result to the search."""
        files = LaunchFiles(Path(task.spec.folder))
        if result.wall_s and result.began_s is not None:
            # The worker has another clock.
            result = result.model_copy(update={"began_s": self.clock.now() - result.wall_s})
        for path, text in ((files.stdout, end and end.stdout), (files.stderr, end and end.stderr)):
            make_way(path)
            write_atomic(path, text or "")
        make_way(files.result)
        write_atomic(files.result, result.model_dump_json())
        del self._tasks[lane]
        self._ended.append((lane, result))

    def _interrupt(self, lane: int, task: _Task) -> None:
        self._finish(lane, task, stopped_waiting(task.spec, 0.0, "a worker"), None)

    def _lose(self, worker: _Worker, why: str) -> None:
        """Forget a lost worker; its launch waits for another one."""
        del self._staff[worker.name]
        running = self._task_of(worker)
        if running is None:
            return
        lane, task = running
        task.worker = None
        task.lost += 1
        if self._ending_until_s is not None:
            self._interrupt(lane, task)
        elif task.lost >= ATTEMPTS:
            cause = f"each of the {task.lost} workers that ran it was lost: {why}"
            killed = TrialResult(
                launch=task.spec.launch, status=TrialStatus.KILLED, cause=cause, transient=True, phase=None
            )
            self._finish(lane, task, killed, None)
        else:
            self.says(f"{worker.facts.where} is lost ({why}); {task.spec.launch} runs again elsewhere")

    def _refuse(self, worker: _Worker, why: str, advice: str | None) -> None:
        """Stop using a worker, because its machine is not fit for the search."""
        if not any(other.fit for other in self._staff.values() if other is not worker):
            self._refusal = f"{worker.facts.where}: {why}", advice
        self._say_once(f"{worker.facts.where} is not used: {why}")
        running = self._task_of(worker)
        if running is not None:
            running[1].worker = None
            if self._ending_until_s is not None:
                self._interrupt(*running)
        self._dismiss(worker, keep_away=True)

    def _dismiss(self, worker: _Worker, *, keep_away: bool) -> None:
        del self._staff[worker.name]
        self.workers.dismiss(worker.name, keep_away=keep_away)

    def _end_all(self) -> float:
        """Make all running launches end; those that wait for a worker end at once. Return the deadline."""
        if self._ending_until_s is not None:
            return self._ending_until_s
        self._ending_until_s = self.clock.now() + ABANDON_S
        for lane, task in sorted(self._tasks.items()):
            if task.worker is None:
                self._interrupt(lane, task)
        for worker in self._staff.values():
            if worker.errand is not None:
                self.workers.recall(worker.name)
        return self._ending_until_s

    def _give_up(self) -> None:
        """Dismiss the workers that have not ended their errands as asked."""
        for worker in [worker for worker in self._staff.values() if worker.errand is not None]:
            self._dismiss(worker, keep_away=False)
        for lane, task in sorted(self._tasks.items()):
            self._interrupt(lane, task)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.says(sentence)
