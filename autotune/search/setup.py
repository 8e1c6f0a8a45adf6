"""What a search knows before its first trial: what it runs with, the probe's answers, and the legal space."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from autotune.clock import Clock, SystemClock
from autotune.data import sets as data_sets
from autotune.errors import AutotuneError, InterruptedSearch, MachineError, UsageError, WorkloadError, by_exit_code
from autotune.launcher import Launcher, ProcessLauncher
from autotune.layout import StudyFiles
from autotune.machine import page_cache
from autotune.machine.gpu import Gpu, fingerprint
from autotune.machine.host import read_host
from autotune.observer import Observer, Silent
from autotune.records import DataRef, Fingerprint, Host, Probe, StudySpec, TrialResult, TrialStatus, WorkloadRef
from autotune.search.request import absolute, request_for_space, resolve_device
from autotune.space import Space, build_space
from autotune.study.budget import Budget
from autotune.study.launches import BUSY_FRACTION, LaunchConditions, Launches
from autotune.workload import DEFAULT_BATCH_SIZE

#: Data larger than this part of the free memory is not read beforehand.
CACHE_FRACTION = 0.5
#: Nor is reading beforehand worth more than this.
WARM_S = 60.0
#: A pass without data, by which a workload says which data it wants.
_NO_DATA = DataRef(kind="none")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Environment:
    """What a search touches of the world, as parameters.

    Attributes:
        stop: the number of the signal that asks the search to end, or ``None``. Asked a few times a second.
        launcher: makes the launcher of a study, from the study's mark.
    """

    observer: Observer
    clock: Clock
    stop: Callable[[], int | None]
    launcher: Callable[[str], Launcher]

    @classmethod
    def real(cls, observer: Observer | None = None, stop: Callable[[], int | None] = lambda: None) -> Environment:
        """This machine, now."""
        clock, told = SystemClock(), observer or Silent()
        return cls(told, clock, stop, lambda mark: ProcessLauncher(mark, clock, on_wait=told.says))


@dataclass(frozen=True)
class Run:
    """One run of a study, which may be gone on with by another: what it was given to run with.

    Attributes:
        device: its contract name. gpu: what NVML says of it; ``None`` on a CPU.
    """

    files: StudyFiles
    spec: StudySpec
    ref: WorkloadRef
    env: Environment
    launcher: Launcher
    budget: Budget
    device: str
    gpu: Gpu | None

    def launches(self, conditions: LaunchConditions) -> Launches:
        """Starts launches under these conditions, on the budget's time."""
        return Launches(
            self.files,
            conditions,
            self.budget,
            self.launcher,
            self.env.observer,
            lambda: self.env.stop() is not None,
            busy_cores=None if self.spec.allow_busy else BUSY_FRACTION * read_host().cores,
        )

    def raise_if_stopped(self) -> None:
        """Raise `InterruptedSearch` if a signal has asked the search to end."""
        number = self.env.stop()
        if number is not None:
            raise InterruptedSearch(number)

    def uncounted(self, work: Callable[[], _T]) -> tuple[_T, float]:
        """Do something that the budget does not count; returns what came of it, and the seconds it took."""
        self.budget.pause()
        began = self.env.clock.now()
        try:
            found = work()
            return found, self.env.clock.now() - began
        finally:
            self.budget.resume()


@contextlib.contextmanager
def run_of(files: StudyFiles, spec: StudySpec, ref: WorkloadRef, env: Environment) -> Iterator[Run]:
    """A run that is let go of at the end: its launcher is closed, and its observer told.

    Raises:
        MachineError: there is no such device, or what the study has spent so far cannot be read.
    """
    launcher = env.launcher(spec.mark)
    try:
        budget = Budget(files, spec.budget_s, env.clock)
        device, gpu = resolve_device(spec.device)
        yield Run(files, spec, ref, env, launcher, budget, device, gpu)
    finally:
        launcher.close()
        env.observer.ends()


@dataclass(frozen=True)
class Setup:
    """All that is known before the first trial.

    Attributes:
        conditions: of every launch from here on.
        data_s: seconds that making and reading the data took; the budget does not count them.
    """

    run: Run
    conditions: LaunchConditions
    probe: Probe
    host: Host
    fingerprint: Fingerprint
    space: Space
    data_s: float

    @property
    def capacity_bytes(self) -> int | None:
        """Device memory that a training may use; ``None``: unknown."""
        own = self.probe.device_memory_bytes if self.probe.device != "cpu" else self.host.available_bytes
        known = [limit for limit in (self.run.spec.memory_limit_bytes, own) if limit is not None]
        return min(known, default=None)

    def launches(self) -> Launches:
        """Starts launches, on the budget's time."""
        return self.run.launches(self.conditions)


def set_up(run: Run, *, measuring: bool = True) -> Setup:
    """Ask the workload which data it wants, get that, look at the workload with it, and see what is legal here.

    Args:
        measuring: something is going to be measured: say what, and read the data's files once.

    Raises:
        UsageError: what was asked cannot be carried out here.
        WorkloadError: the workload cannot be used.
        MachineError: the machine, or its device, cannot.
        InterruptedSearch: a signal came.
    """
    conditions, probe, data_s = _probed(run)
    if measuring:
        run.env.observer.begins(run.spec, _headline(run, conditions, probe))
        conditions, warm_s = _warmed(run, conditions)
        data_s += warm_s
    host = read_host()
    space = build_space(probe, host, request_for_space(run.spec, probe.workload_knobs))
    print_ = fingerprint(probe, host, run.gpu, conditions.data)
    return Setup(run, conditions, probe, host, print_, space, data_s)


def first_headline(run: Run) -> str:
    """What can be said before the workload was asked."""
    return f"{run.ref.name}, on {run.device}"


def _headline(run: Run, conditions: LaunchConditions, probe: Probe) -> str:
    parts = [first_headline(run), f"batch {conditions.batch_size}"]
    if conditions.image_size is not None:
        chosen = "" if run.spec.image_size else f" (the default on {'a CPU' if probe.device == 'cpu' else 'a GPU'})"
        parts.append(f"images of {conditions.image_size} px{chosen}")
    parts.append(f"data {conditions.data.kind if conditions.data.kind != 'none' else 'of its own'}")
    return ", ".join(parts)


def _first_conditions(run: Run) -> LaunchConditions:
    """The conditions of a pass in which the workload says what it wants."""
    spec = run.spec
    data = _NO_DATA
    if spec.data == "synthetic":
        data = data_sets.synthetic()
    elif spec.data != "generated":
        data = DataRef(kind="folder", path=str(absolute(spec.data)))
    return LaunchConditions(
        workload=run.ref,
        data=data,
        device=run.device,
        batch_size=spec.batch_size or DEFAULT_BATCH_SIZE,
        image_size=spec.image_size,
        seed=spec.seed,
        worker_start_method="fork",
        memory_limit_bytes=spec.memory_limit_bytes,
        # By UUID: PyTorch's own order of cards is not the driver's.
        env={} if run.gpu is None else {"CUDA_VISIBLE_DEVICES": run.gpu.uuid},
    )


def _probed(run: Run) -> tuple[LaunchConditions, Probe, float]:
    """The conditions of the launches to come, the workload's answers, and the seconds that making data took."""
    spec, made_s = run.spec, 0.0
    conditions = _first_conditions(run)
    probe = _probe(run, "probe-1", conditions)
    if probe.wants_data not in (None, "images"):
        raise WorkloadError(
            f"{run.ref.name} asks for DATA = {probe.wants_data!r}", advice='the one set made here is "images".'
        )
    if probe.wants_data is not None and not conditions.data.identity:
        if spec.data == "generated":
            data, made_s = _generated(run)
        else:
            data = data_sets.folder(absolute(spec.data))
        conditions = replace(conditions, data=data)
        probe = _probe(run, "probe-2", conditions)
    default_size = probe.cpu_image_size if probe.device == "cpu" else probe.default_image_size
    conditions = replace(
        conditions,
        image_size=conditions.image_size or default_size,
        batch_size=spec.batch_size or probe.default_batch_size,
        worker_start_method=probe.worker_start_method,
        workload=run.ref.model_copy(update={"sha256": probe.workload_sha256}),
    )
    return conditions, probe, made_s


def _probe(run: Run, name: str, conditions: LaunchConditions) -> Probe:
    result = run.launches(conditions).probe(name)
    run.raise_if_stopped()
    if result.probe is None or result.status is not TrialStatus.COMPLETE:
        raise _probe_error(run.ref, result)
    return result.probe


def _probe_error(ref: WorkloadRef, result: TrialResult) -> AutotuneError:
    cause = result.cause or f"ended as {result.status}"
    kind = by_exit_code(result.error_code)
    if kind not in (UsageError, MachineError):
        kind = WorkloadError
    message = cause if result.error_code else f"{ref.name} cannot be used: {cause}"
    return kind(message, advice=result.advice, detail=None if result.error_code else result.evidence)


def _generated(run: Run) -> tuple[DataRef, float]:
    """The generated data, and the seconds it took. They are not this search's: it is made once for all studies."""
    observer = run.env.observer

    def progress(done: int, total: int) -> None:
        observer.data_progress(done, total)
        run.raise_if_stopped()

    return run.uncounted(
        lambda: data_sets.ensure_generated(
            processes=read_host().cores, on_progress=progress, on_warning=observer.says, clock=run.env.clock
        )
    )


def _warmed(run: Run, conditions: LaunchConditions) -> tuple[LaunchConditions, float]:
    """The same with the data's files read once, so that the first launch does not read slower than the last; and the
    seconds it took."""
    data = conditions.data
    if data.path is None:
        return conditions, 0.0
    folder = Path(data.path)
    # A cache that fills all of memory would be thrown out again by the training itself.
    limit = int(CACHE_FRACTION * read_host().available_bytes)
    state, warm_s = run.uncounted(
        lambda: page_cache.warm(folder, limit_bytes=limit, limit_s=WARM_S, clock=run.env.clock)
    )
    if state == "cold":
        run.env.observer.says(
            "the data does not fit into the page cache: its files may be read faster by one launch than by another"
        )
    return replace(conditions, data=data.model_copy(update={"page_cache": state})), warm_s
