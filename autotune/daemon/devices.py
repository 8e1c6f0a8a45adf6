"""Devices: which are quiet, and which job gets one."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol

from autotune.base.clock import Clock, SystemClock, timestamp
from autotune.base.errors import MachineError, UsageError
from autotune.base.records import Failed, Job, JobState, Queued, Running, Status
from autotune.daemon.claims import Claims, Unclaimed
from autotune.daemon.queue import Queue
from autotune.daemon.runner import Runner, changed_source
from autotune.machine.cpu_load import CpuWatch
from autotune.machine.gpu import Gpu, NvmlUnavailable, visible

# The machine's devices, and how long each has been idle. A device in an unknown state never counts as idle.

#: Name of the CPU as a device.
CPU = "cpu"
#: Placeholder name for GPUs that the driver has not listed yet.
UNCOUNTED = "gpu"
#: A device that is busy within this time after one of our jobs used it is busy because of that job, unless other
#: processes are seen there. The devices are read at least this often.
SETTLE_S = 20.0
_MIB = 2**20
#: Inode of the initial pid namespace (PROC_PID_INIT_INO in the kernel). The driver reports pids of this namespace.
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC


@dataclass(frozen=True)
class Settings:
    """The daemon's settings, fixed when it starts: thresholds, timeouts and output locations.

    Attributes:
        quiet_s: seconds a device must have been idle before a job is started on it.
        utilization_percent, memory_bytes: a GPU above either limit is not idle. Memory the driver reserves on an idle
            GPU counts too.
        busy_cores: cores that other processes may use while the CPU still counts as idle; ``None`` means a tenth of the
            cores allowed.
        grace_s: seconds between SIGTERM and SIGKILL when a job is stopped.
        metrics: file for metrics in the Prometheus text format, read by node_exporter's textfile collector.
        web: ``HOST:PORT`` of the web page; ``None`` disables it.
    """

    quiet_s: float = 60.0
    utilization_percent: int = 5
    memory_bytes: int = 2**30
    busy_cores: float | None = None
    grace_s: float = 5.0
    metrics: Path | None = None
    web: str | None = None


@dataclass(frozen=True)
class Reading:
    """The state of a device when it was read.

    Attributes:
        trouble: why the device is not idle, as a clause; ``None`` if it is idle.
        known: False if the driver or kernel did not report whether the device is idle.
        processes: pids on a GPU, including those of jobs; ``None`` if unknown, and for the CPU.
        held: memory is in use although no process is on the GPU.
        usable: False if no job can ever run on it as it is.
    """

    name: str
    model: str
    trouble: str | None = None
    known: bool = True
    processes: frozenset[int] | None = None
    held: bool = False
    usable: bool = True


class Devices(Protocol):
    """Reads the state of the devices. Not thread-safe.

    Attributes:
        tells_apart: whether the driver's pids are those of this process, so that a job's processes can be told from
            others.
    """

    tells_apart: bool

    def read(self) -> list[Reading]:
        """Read every known device. The CPU comes last."""
        ...

    def foreign(self, reading: Reading, ours: frozenset[int]) -> frozenset[int]:
        """Return the GPU processes that are not in ``ours``, as far as they can be distinguished."""
        ...


class RealDevices:
    """The GPUs as reported by the driver, and the CPU.

    Args:
        cards: queries the driver.
        host_pids: whether this process sees the same pids as the driver, which it does not in a container; ``None`` to
            detect it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        cards: Callable[[], list[Gpu] | NvmlUnavailable],
        clock: Clock | None = None,
        host_pids: bool | None = None,
    ) -> None:
        self._settings = settings
        self._cards = cards
        self._watch = CpuWatch(os.getpid(), clock or SystemClock())
        self.tells_apart = _in_host_pid_namespace() if host_pids is None else host_pids
        self._known: dict[str, str] = {}

    def read(self) -> list[Reading]:
        return [*self._read_cards(), self._read_cpu()]

    def foreign(self, reading: Reading, ours: frozenset[int]) -> frozenset[int]:
        present = reading.processes or frozenset()
        if self.tells_apart:
            return present - ours
        # The pids cannot be matched, but a workload's launch has one process on a GPU, and launches never overlap.
        return present if len(present) > 1 else frozenset()

    def _read_cards(self) -> list[Reading]:
        cards = self._cards()
        if isinstance(cards, list):
            # A cluster scheduler may have assigned only some of the GPUs to this daemon.
            cards = visible(cards, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if isinstance(cards, NvmlUnavailable):
            if not cards.driver_present:
                return []
            reason = cards.reason.rstrip(".")
            return [Reading(uuid, model, reason, known=False) for uuid, model in self._known.items()] or [
                Reading(UNCOUNTED, "GPU", reason, known=False)
            ]
        split = {card.uuid for card in cards if card.instances}
        # A process can use only one instance of a card that is split, so each instance is a device of its own.
        readings = [self._read_card(device) for card in cards for device in (card.instances or (card,))]
        if readings:
            # A card that has been split is replaced by its instances, and instances come and go.
            self._known = {u: m for u, m in self._known.items() if not u.startswith("MIG-") and u not in split}
        gone = self._known.keys() - {reading.name for reading in readings}
        self._known |= {reading.name: reading.model for reading in readings}
        missing = "the driver does not list it any more"
        return readings + [Reading(uuid, self._known[uuid], missing, known=False) for uuid in sorted(gone)]

    def _read_card(self, card: Gpu) -> Reading:
        """Describe a card, or a MIG instance, whose utilization the driver never reports."""
        processes = None if card.processes is None else frozenset(card.processes)
        used, busy = card.memory_used_bytes, card.utilization_percent
        trouble = None
        known = True
        held = False
        if card.mig:
            trouble = "it is split by MIG, and has no instance that may be used here"
        elif processes is None or used is None or (busy is None and card.profile is None):
            unknown = (
                "who is on it" if processes is None else "how much memory is used" if used is None else "how busy it is"
            )
            trouble, known = f"the driver does not tell {unknown}", False
        elif processes:
            trouble = f"process {', '.join(map(str, sorted(processes)))} is on it"
        elif used > self._settings.memory_bytes:
            trouble = f"{used / _MIB:.0f} MiB of its memory are in use, and no process is there that uses them"
            held = True
        elif busy is not None and busy > self._settings.utilization_percent:
            trouble = f"it is {busy} % busy"
        return Reading(card.uuid, card.name, trouble, known, processes, held, usable=not card.mig)

    def _read_cpu(self) -> Reading:
        use = self._watch.read()
        if use is None:
            return Reading(CPU, "CPU", "the kernel does not tell how busy the cores are", known=False)
        limit = self._settings.busy_cores
        limit = max(0.2, 0.1 * self._watch.cores) if limit is None else limit
        busy = f"others use {use.foreign_cores:.1f} of {self._watch.cores} cores"
        return Reading(CPU, "CPU", busy if use.foreign_cores > limit else None)


@dataclass(frozen=True)
class DeviceState:
    """The state of a device, and since when it has been idle or busy.

    Attributes:
        idle: no process other than the daemon's own jobs uses the device.
        since: when ``idle`` last changed, in seconds of the clock.
        foreign: processes on the device that do not belong to the job running there.
        taken: one of our jobs ran on it when it was read.
        ours: processes of our last job there.
        ours_until: when one of our jobs was last there, in seconds of the clock, to the accuracy of the readings.
    """

    reading: Reading
    idle: bool
    since: float
    foreign: frozenset[int] = frozenset()
    taken: bool = False
    ours: frozenset[int] = frozenset()
    ours_until: float | None = None

    @property
    def label(self) -> str:
        """``idle``, ``busy``, ``unknown``, or ``quarantined`` (memory is in use, but no process is on the GPU)."""
        if not self.reading.known:
            return "unknown"
        return "idle" if self.idle else "quarantined" if self.reading.held else "busy"


@dataclass
class Board:
    """Tracks the state of all devices over time, and decides which of them can take a job.

    Args:
        quiet_s: seconds a device must be idle before it can take a job.
        claims: claims on devices, which other daemons of the machine see.

    Attributes:
        reads: number of times all devices were read.
    """

    devices: Devices
    clock: Clock
    quiet_s: float
    claims: Claims = field(default_factory=Claims)
    states: dict[str, DeviceState] = field(default_factory=dict)
    reads: int = 0

    def update(self, ours: Callable[[], Mapping[str, frozenset[int] | None]]) -> None:
        """Read every device.

        Args:
            ours: returns the job's processes for each device that runs one, or ``None`` for a job that is ending. These
                processes do not make the device busy. Called before and after the read, since a read takes time and
                processes may start or end meanwhile.
        """
        self.reads += 1
        pids_before = ours()
        readings = self.devices.read()
        pids_after = ours()
        now = self.clock.now()
        for reading in readings:
            own_pids = pids_before.get(reading.name, frozenset()), pids_after.get(reading.name, frozenset())
            taken = reading.name in pids_before or reading.name in pids_after
            both = frozenset[int]() if None in own_pids else frozenset().union(*(k for k in own_pids if k is not None))
            foreign = self.devices.foreign(reading, both) if taken and None not in own_pids else frozenset()
            idle = not foreign and reading.known if taken else reading.trouble is None
            before = self.states.get(reading.name)
            last, until = (before.ours, before.ours_until) if before is not None else (both, None)
            # The first reading after a job covers a span in which the job still ran.
            if taken or (before is not None and before.taken):
                until = now
            if before is None or not (before.idle == idle or self._settles(until, last, reading, taken=taken)):
                since = now
            else:
                since = before.since
            self.states[reading.name] = DeviceState(reading, idle, since, foreign, taken, both or last, until)
        # The placeholder is dropped once the driver answers, and so is a card that has been split since.
        names = {reading.name for reading in readings} | pids_before.keys() | pids_after.keys()
        self.states = {name: state for name, state in self.states.items() if name in names}

    def _settles(self, until: float | None, ours: frozenset[int], reading: Reading, *, taken: bool) -> bool:
        """Return whether a device is busy, or idle again, only because one of our jobs has just left it.

        The driver reports the memory and utilization of a process for some time after its end, and the kernel reports
        CPU time for the whole span since the last reading.

        Args:
            until: when one of our jobs was last on the device. ours: processes of that job.
        """
        if taken or until is None or self.clock.now() - until > SETTLE_S:
            return False
        return not self.devices.foreign(reading, ours)

    def trouble(self, name: str, *, allow_busy: bool = False) -> str | None:
        """Return why a device is not idle, as a clause; ``None`` if it is, or if that does not matter.

        Args:
            allow_busy: others may use the device, but its state must be known.
        """
        if name not in self.states:
            return "the driver does not list it any more"
        reading = self.states[name].reading
        return None if allow_busy and reading.known and reading.usable else reading.trouble

    def obstacle(self, name: str, taken: Mapping[str, Job], *, allow_busy: bool = False) -> str | None:
        """Return why no job can start on a device now, as a clause; ``None`` if one can.

        Args:
            allow_busy: the job may start even if others use the device or it has not been idle for long enough.
        """
        state = self.states[name]
        if name in taken:
            return f"job {taken[name].id} runs on it"
        # Jobs on GPUs need CPU cores too, so a search on the CPU runs alone.
        if taken and (name == CPU or CPU in taken):
            return "a search on the processor shares it with nobody"
        trouble = self.trouble(name, allow_busy=allow_busy)
        if trouble is not None:
            # The device may be busy with a job of another daemon, which is the more helpful reason.
            return self.claims.obstacle(name) or trouble
        idle_s = self.clock.now() - state.since
        if idle_s < self.quiet_s and not allow_busy:
            return f"it has been idle for {idle_s:.0f} s, and {self.quiet_s:.0f} s are asked for"
        return self.claims.obstacle(name)

    def fits(self, name: str, job: Job) -> bool:
        """Return whether a job can run on a device, whatever the device's state."""
        spec, wanted_gpu, reading = job.request.spec, job.request.gpu, self.states[name].reading
        if job.placed is not None:
            return name == job.placed
        wants_cpu = spec.device == CPU or job.request.replay is not None
        # If the driver does not answer, the states hold the placeholder or the cards that it listed before.
        has_cards = any(other != CPU for other in self.states)
        if name == CPU:
            return wants_cpu or (spec.device == "auto" and wanted_gpu == "any" and not has_cards)
        if wants_cpu:
            return False
        _, _, uuid = spec.device.partition(":")
        if uuid and uuid.lower() != name.lower():
            return False
        return wanted_gpu == "any" or wanted_gpu.lower() == name.lower() or wanted_gpu.lower() in reading.model.lower()


def _in_host_pid_namespace() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


log = logging.getLogger(__name__)

#: Delay before a failed job is retried. It doubles with each further failure, up to the maximum.
BACKOFF_S = 60.0
MAX_BACKOFF_S = 3600.0
#: Attempts to start a job before it fails. With the backoff they span some hours, since a disk may be mounted late.
MAX_FAULTS = 10
#: Errors of exec(2) that concern the job's own interpreter or folder. Any other error is blamed on the machine.
_JOB_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC})


class Transition(Protocol):
    """Moves a job to a state that ends it, or ends its current run."""

    def __call__(self, job: Job, to: Status, states: tuple[JobState, ...] | None = None, **changes: object) -> Job: ...


@dataclass
class Dispatcher:
    """Selects queued jobs and starts them."""

    queue: Queue
    runner: Runner
    board: Board
    clock: Clock
    wall_s: Callable[[], float]
    boot_id: str
    jitter: Callable[[], float]
    update_devices: Callable[[], None]
    end: Transition
    #: Time before which a job is not started again, by job id.
    _backoff_until: dict[int, float] = field(default_factory=dict)
    #: How often in a row a job's process could not be started, which says nothing about its runs.
    _deferred: Counter[int] = field(default_factory=Counter)
    #: Jobs that fit no device: id, quiet devices, and devices free for ``--allow-busy``.
    _unfit: set[tuple[int, tuple[str, ...], tuple[str, ...]]] = field(default_factory=set)
    #: The devices that existed when ``_unfit`` was filled.
    _unfit_among: set[str] = field(default_factory=set)

    def next(self, taken: Mapping[str, Job], tried: Collection[str] = ()) -> tuple[Job, str] | None:
        """Return the next job that can run now, and its device.

        Args:
            tried: devices that are left out.
        """
        now = self.clock.now()
        if self._unfit_among != set(self.board.states):
            self._unfit, self._unfit_among = set(), set(self.board.states)
        quiet, free = (
            tuple(n for n in self.board.states if n not in tried and not self.board.obstacle(n, taken, allow_busy=busy))
            for busy in (False, True)
        )
        if not free:
            return None
        for number in self.queue.startable(self.wall_s(), self.minute(), only_allow_busy=not quiet):
            if self._backoff_until.get(number, 0.0) > now or (number, quiet, free) in self._unfit:
                continue
            job = self.queue.job(number)
            names = free if job.request.spec.allow_busy else quiet
            device = next((name for name in names if self.board.fits(name, job)), None)
            if device is not None:
                return job, device
            # Remembered, so that a queue of ten thousand jobs is not reread every second.
            self._unfit.add((number, quiet, free))
        return None

    def start(self, job: Job, device: str) -> bool:
        """Claim a job for a device and start its process; return whether it runs.

        Raises:
            MachineError: the machine cannot start a process now. The claim is released.
        """
        try:
            changed = changed_source(job.request)
        except MachineError as error:
            self._defer(job, str(error))
            return False
        if changed is not None:
            why = f"{changed} is not as it was when the job was submitted"
            self.end(job, Failed(ended=timestamp(), exit_code=UsageError.exit_code, why=why))
            return False
        try:
            self.board.claims.take(device)
        except Unclaimed:
            # Another daemon was faster; the next tick says so.
            return False
        started = False
        try:
            started = self._start(job, device)
        finally:
            if not started:
                self.board.claims.release(device)
        return started

    def _start(self, job: Job, device: str) -> bool:
        """Record that a job runs on a device, and start its process; return whether it runs."""
        mark = uuid.uuid4().hex
        status = Running(since=timestamp(), device=device, boot_id=self.boot_id, mark=mark)
        claimed = self.queue.move(job.id, JobState.QUEUED, status, placed=job.placed or device, runs=job.runs + 1)
        # Another process may have appeared on the device while the claim was written.
        self.update_devices()
        trouble = self.board.trouble(device, allow_busy=job.request.spec.allow_busy)
        if trouble is not None:
            self.queue.move(job.id, JobState.RUNNING, Queued(why=trouble), placed=job.placed, runs=job.runs)
            return False
        try:
            child = self.runner.start(claimed, device, mark)
        except (OSError, ValueError) as error:
            self._release(claimed, job, error)
            return False
        self._deferred.pop(job.id, None)
        log.info("job %d (%s) runs on %s, process %d", job.id, job.request.spec.name, device, child.pid)
        # If this cannot be written, the job still runs and is found by its mark.
        with contextlib.suppress(MachineError):
            self.queue.move(job.id, JobState.RUNNING, status.model_copy(update={"child": child}))
        return True

    def _release(self, claimed: Job, before: Job, error: OSError | ValueError) -> None:
        """Release a claim whose process could not be started. A lack of machine resources is not the job's fault."""
        why = f"its process cannot be started: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, ValueError):
            self.end(claimed, Failed(ended=timestamp(), exit_code=UsageError.exit_code, why=why))
            return
        released = self.queue.move(
            claimed.id, JobState.RUNNING, Queued(why=why), placed=before.placed, runs=before.runs
        )
        if error.errno not in _JOB_ERRORS:
            raise MachineError(why)
        self._defer(released, why)

    def _defer(self, job: Job, why: str) -> None:
        """Requeue a job with a backoff, because a disk or interpreter that it needs is missing for now."""
        self._deferred[job.id] += 1
        if self._deferred[job.id] >= MAX_FAULTS:
            del self._deferred[job.id]
            self.end(job, Failed(ended=timestamp(), exit_code=MachineError.exit_code, why=why))
            return
        self.back_off(job.id, self._deferred[job.id])
        self.end(job, Queued(why=why))

    def back_off(self, number: int, faults: int) -> None:
        """Delay the next start of a failed job, exponentially in the number of faults.

        A random delay of up to the same length is added: jobs of two daemons that have disturbed each other would
        otherwise meet again.
        """
        wait_s = min(BACKOFF_S * 2 ** (faults - 1), MAX_BACKOFF_S)
        self.delay(number, wait_s * (1 + self.jitter()))

    def delay(self, number: int, seconds: float) -> None:
        """Keep a job from starting for some seconds, even if a device is free."""
        self._backoff_until[number] = self.clock.now() + seconds

    def clear_backoff(self, number: int) -> None:
        """Let a job start at once, because a user resumed or retried it."""
        self._backoff_until.pop(number, None)
        self._deferred.pop(number, None)

    def obstacle(self, job: Job, taken: Mapping[str, Job]) -> str:
        """Return why a queued job does not run, as a clause."""
        request = job.request
        if request.not_before is not None and request.not_before > self.wall_s():
            return "the time before which it is not to run has not come"
        if request.window is not None and not within(request.window, self.minute()):
            return "the time of day in which it may run has not come"
        if request.after is not None and self.queue.job(request.after).state is not JobState.DONE:
            return f"job {request.after} is not done"
        left_s = self._backoff_until.get(job.id, 0.0) - self.clock.now()
        if left_s > 0:
            return f"it is tried again in {left_s:.0f} s"
        if not self.board.states:
            return "the devices have not been looked at yet"
        fitting = [name for name in self.board.states if self.board.fits(name, job)]
        if not fitting:
            _, _, uuid = request.spec.device.partition(":")
            wanted = job.placed or (request.gpu if request.gpu != "any" else uuid or "card")
            return f"there is no {wanted} here that it could run on"
        busy = request.spec.allow_busy
        obstacles = [self.board.obstacle(name, taken, allow_busy=busy) for name in fitting]
        if None in obstacles:
            return "its turn has not come yet"
        return "; ".join(f"{name}: {why}" for name, why in zip(fitting, obstacles, strict=True))

    def minute(self) -> int:
        """Return the current minute of the day, local time."""
        local = datetime.fromtimestamp(self.wall_s())
        return 60 * local.hour + local.minute


def within(window: tuple[int, int], minute: int) -> bool:
    """Return whether a minute of the day lies in a window. The window may span midnight."""
    opens, closes = window
    return opens <= minute < closes if opens < closes else minute >= opens or minute < closes


#: Timeout of a query. The driver usually answers within milliseconds, but takes seconds to wake a sleeping GPU.
LIMIT_S = 3.0


class GpuQuery:
    """Queries the GPUs and reports `NvmlUnavailable` when the driver does not answer in time.

    A GPU that has fallen off the bus can block a call in the kernel forever. The call therefore runs in a background
    thread, and no second query starts until the first one returns.
    """

    def __init__(self, ask: Callable[[], list[Gpu] | NvmlUnavailable], limit_s: float = LIMIT_S) -> None:
        self._ask = ask
        self._limit_s = limit_s
        self._answer: list[list[Gpu] | NvmlUnavailable] = []
        self._thread: threading.Thread | None = None

    def __call__(self) -> list[Gpu] | NvmlUnavailable:
        if self._thread is None:
            self._answer = answer = []
            self._thread = threading.Thread(target=lambda: answer.append(self._ask()), daemon=True)
            self._thread.start()
            self._thread.join(self._limit_s)
        if self._thread.is_alive():
            return NvmlUnavailable("the driver does not answer", driver_present=True)
        self._thread = None
        return self._answer[0] if self._answer else NvmlUnavailable("asking the driver failed", driver_present=True)
