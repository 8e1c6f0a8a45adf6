"""The outside world of a search, and a run of a study in it: its launcher, devices, budget and database."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from autotune.base.clock import Clock, SystemClock, VirtualClock
from autotune.base.errors import InterruptedSearch, UsageError
from autotune.launcher import Launcher, ProcessLauncher
from autotune.launcher.elsewhere import RemoteLanes
from autotune.launcher.errands import WorkerFacts
from autotune.launcher.lanes import ThreadLanes
from autotune.launcher.workers import Workers
from autotune.base.layout import StudyFiles
from autotune.machine.host import read_host
from autotune.machine.nvml import kept_open
from autotune.base.observer import Observer, Silent
from autotune.base.records import Host, StudySpec, WorkloadRef
from autotune.space.requirements import Requirements
from autotune.search.devices import resolve_devices
from autotune.search.request import Device
from autotune.study.budget import Budget
from autotune.study.conditions import read_conditions
from autotune.study.launches import LaunchConditions, Launches
from autotune.study.patience import Patience
from autotune.study.plans import BUSY_FRACTION
from autotune.study.request import process_mark
from autotune.study.shared import SharedDatabase, SharedStudy
from autotune.study.storage_url import with_credentials

_GOES_ON = "nothing is lost; `autotune resume` goes on once it answers."

_T = TypeVar("_T")


@dataclass(frozen=True)
class Environment:
    """The outside world of a search, as parameters.

    Attributes:
        observer: receives the progress.
        stop: returns the number of the signal that asks the search to end, or ``None``. Called a few times a second.
        launcher: makes the launcher of a study from the mark of its processes and the number of its devices; of several
            devices, `Lanes`.
        workers: makes the workers of a study that launches elsewhere, from its request and the mark of its processes.
        sharing: makes those of a study on which other machines work, too, from the study, its device here, and the mark
            of its processes. ``None``: here no search can have any.
    """

    observer: Observer
    clock: Clock
    stop: Callable[[], int | None]
    launcher: Callable[[str, int], Launcher]
    workers: Callable[[StudySpec, str], Workers] | None = None
    sharing: Callable[[SharedStudy, StudyFiles, StudySpec, Device, str], Workers] | None = None

    @classmethod
    def real(cls, observer: Observer | None = None, stop: Callable[[], int | None] = lambda: None) -> Environment:
        """Return the environment of this machine, with real time and processes."""
        clock, observer = SystemClock(), observer or Silent()

        def launcher(mark: str, devices: int) -> Launcher:
            def make(on_wait: Callable[[str], None]) -> Launcher:
                return ProcessLauncher(mark, clock, on_wait=on_wait)

            return make(observer.says) if devices == 1 else ThreadLanes(make, devices, clock, observer.says)

        return cls(observer, clock, stop, launcher)


@dataclass(frozen=True)
class Run:
    """One run of a study, which a later run may continue.

    Attributes:
        devices: of its launches.
        away: what the first worker has, if launches run elsewhere.
        shared: the study in a database that several machines share; ``None`` for its own file.
    """

    files: StudyFiles
    spec: StudySpec
    ref: WorkloadRef
    env: Environment
    launcher: Launcher
    budget: Budget
    devices: tuple[Device, ...]
    away: WorkerFacts | None = None
    shared: SharedStudy | None = None

    @property
    def target(self) -> Device:
        """The device on which launches run alone."""
        return self.devices[0]

    @property
    def is_elsewhere(self) -> bool:
        """Whether launches may run on other machines."""
        return self.away is not None or self.spec.workers is not None

    @property
    def host(self) -> Host:
        """What one device may use of the machine. Sizes of all memory stay those of the machine, which is what a later
        training is compared with."""
        if self.away is not None:
            return self.away.host
        host, cores = read_host(), sum(len(device.cores) for device in self.devices)
        host = host.model_copy(update={"cores": min(cores, host.cores)}) if cores else host
        return host.part(len(self.devices))

    def launches(self, conditions: LaunchConditions) -> Launches:
        """Return the launches under these conditions, whose time the budget counts."""
        return Launches(
            self.files,
            conditions,
            self.budget,
            self.launcher,
            self.env.observer,
            lambda: self.env.stop() is not None,
            busy_cores=None if self.spec.allow_busy else BUSY_FRACTION * self.host.cores,
            shared=self.shared,
        )

    @property
    def required(self) -> Requirements:
        """What the winner must meet."""
        return Requirements.parsed(self.spec.require, self.spec.goal)

    def raise_if_stopped(self) -> None:
        """Raise `InterruptedSearch` if a signal was received."""
        number = self.env.stop()
        if number is not None:
            raise InterruptedSearch(number)

    def uncounted(self, work: Callable[[], _T]) -> tuple[_T, float]:
        """Call ``work`` without counting its time in the budget; return its result and its duration in seconds."""
        self.budget.pause()
        began = self.env.clock.now()
        try:
            found = work()
            return found, self.env.clock.now() - began
        finally:
            self.budget.resume()


@contextlib.contextmanager
def run_of(files: StudyFiles, spec: StudySpec, ref: WorkloadRef, env: Environment) -> Iterator[Run]:
    """Yield a run. At the end its launcher is closed and its observer notified.

    Raises:
        MachineError: the device does not exist, the study's used budget cannot be read, or the database that it is
            to be stored in cannot be used.
    """
    with contextlib.ExitStack() as ends, kept_open():
        ends.callback(env.observer.ends)
        mark, budget, shared = process_mark(files, spec), Budget(files, spec.budget_s, env.clock), None
        if spec.storage is not None:
            patience = Patience(spec.storage, env.clock, budget, env.observer.says, env.stop, advice=_GOES_ON)
            database = SharedDatabase(with_credentials(spec.storage), make=True, keep=True)
            ends.callback(database.close)
            shared = SharedStudy(database, spec.mark, patience)
        if spec.on is None:
            devices = resolve_devices(spec)
            if shared is not None and spec.workers is not None:
                launcher = _with_others(files, spec, env, devices[0], mark, shared)
            else:
                launcher = env.launcher(mark, len(devices))
            ends.callback(launcher.close)
            yield Run(files, spec, ref, env, launcher, budget, devices, shared=shared)
            return
        if env.workers is None:
            raise UsageError(f"--on {spec.on} is for `autotune search` and `autotune resume`", advice="leave it out.")
        lanes = _remote_lanes(files, env, env.workers(spec, mark))
        ends.callback(lanes.close)
        run = Run(files, spec, ref, env, lanes, budget, (), shared=shared)
        # What the first worker waits for is not the search's time.
        facts, _ = run.uncounted(lambda: lanes.first(run.raise_if_stopped))
        devices = (Device(facts.device, facts.gpu, cores=facts.cores),) * lanes.count
        yield replace(run, devices=devices, away=facts)


def _with_others(
    files: StudyFiles, spec: StudySpec, env: Environment, device: Device, mark: str, shared: SharedStudy
) -> Launcher:
    """Return a launcher whose lanes are this machine's device and those of the workers that come."""
    if env.sharing is None:
        raise UsageError("--workers is for `autotune search` and `autotune resume`", advice="leave it out.")
    return _remote_lanes(files, env, env.sharing(shared, files, spec, device, mark))


def _remote_lanes(files: StudyFiles, env: Environment, workers: Workers) -> RemoteLanes:
    then = read_conditions(files)
    assert isinstance(env.clock, SystemClock | VirtualClock)
    return RemoteLanes(workers, files.folder, env.clock, env.observer.says, None if then is None else then.fingerprint)
