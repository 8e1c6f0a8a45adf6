"""The machine's devices, and how long each has been idle. A device in an unknown state never counts as idle."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from autotune.base.clock import Clock, SystemClock
from autotune.daemon.claims import Claims
from autotune.daemon.settings import Settings
from autotune.machine.cpu_load import CpuWatch
from autotune.machine.gpu import Gpu, NvmlUnavailable, visible
from autotune.base.records import Job

#: Name of the CPU as a device.
CPU = "cpu"
#: Placeholder name for GPUs that the driver has not listed yet.
UNCOUNTED = "gpu"
#: A device that is busy so soon after a job of ours was on it is so because of that job, unless others are seen there.
#: The devices are read at least this often.
SETTLE_S = 20.0
_MIB = 2**20
#: Inode of the initial pid namespace (PROC_PID_INIT_INO in the kernel). The driver reports pids of this namespace.
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC


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
    """Reads the state of the devices. Not thread-safe."""

    def read(self) -> list[Reading]:
        """Read every known device. The CPU comes last."""
        ...

    def foreign(self, reading: Reading, ours: frozenset[int]) -> frozenset[int]:
        """Return the GPU processes that are not in ``ours``, as far as they can be told apart."""
        ...


class RealDevices:
    """The GPUs as reported by the driver, and the CPU.

    Args:
        cards: queries the driver.
        host_pids: whether this process sees the same pids as the driver, which is not the case in a container; ``None``
            detects it.
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
        self._host_pids = _in_host_pid_namespace() if host_pids is None else host_pids
        self._known: dict[str, str] = {}

    def read(self) -> list[Reading]:
        return [*self._read_cards(), self._read_cpu()]

    def foreign(self, reading: Reading, ours: frozenset[int]) -> frozenset[int]:
        present = reading.processes or frozenset()
        if self._host_pids:
            return present - ours
        # The pids cannot be matched, but a launch has exactly one process on a GPU, and launches never overlap.
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
        # A process can use one instance of a card that is split, so each instance is a device of its own.
        found = [self._read_card(device) for card in cards for device in (card.instances or (card,))]
        if found:
            # A card that has been split is its instances now, and instances come and go.
            self._known = {u: m for u, m in self._known.items() if not u.startswith("MIG-") and u not in split}
        gone = self._known.keys() - {reading.name for reading in found}
        self._known |= {reading.name: reading.model for reading in found}
        missing = "the driver does not list it any more"
        return found + [Reading(uuid, self._known[uuid], missing, known=False) for uuid in sorted(gone)]

    def _read_card(self, card: Gpu) -> Reading:
        """Describe a card, or a MIG instance, of which the driver never tells how busy it is."""
        processes = None if card.processes is None else frozenset(card.processes)
        used, busy = card.memory_used_bytes, card.utilization_percent
        trouble = None
        known = True
        held = False
        if card.mig:
            trouble = "it is split by MIG, and has no instance that may be used here"
        elif processes is None or used is None or (busy is None and card.profile is None):
            what = (
                "who is on it" if processes is None else "how much memory is used" if used is None else "how busy it is"
            )
            trouble, known = f"the driver does not tell {what}", False
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
        taken: a job of ours ran on it when it was read.
        ours: processes of the last job of ours there.
        ours_until: until when a job of ours was there, in seconds of the clock, to the accuracy of the readings.
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
        before_it = ours()
        readings = self.devices.read()
        after_it = ours()
        now = self.clock.now()
        for reading in readings:
            known = before_it.get(reading.name, frozenset()), after_it.get(reading.name, frozenset())
            taken = reading.name in before_it or reading.name in after_it
            both = frozenset[int]() if None in known else frozenset().union(*(k for k in known if k is not None))
            foreign = self.devices.foreign(reading, both) if taken and None not in known else frozenset()
            idle = not foreign and reading.known if taken else reading.trouble is None
            before = self.states.get(reading.name)
            last, until = (before.ours, before.ours_until) if before is not None else (both, None)
            # What is read for the first time after a job is of a span in which the job still ran.
            if taken or (before is not None and before.taken):
                until = now
            if before is None or not (before.idle == idle or self._settles(until, last, reading, taken=taken)):
                since = now
            else:
                since = before.since
            self.states[reading.name] = DeviceState(reading, idle, since, foreign, taken, both or last, until)
        # The placeholder is dropped once the driver answers, and so is a card that has been split since.
        there = {reading.name for reading in readings} | before_it.keys() | after_it.keys()
        self.states = {name: state for name, state in self.states.items() if name in there}

    def _settles(self, until: float | None, ours: frozenset[int], reading: Reading, *, taken: bool) -> bool:
        """Return whether a device is busy, or idle again, only because a job of ours has just left it.

        The driver reports the memory and the use of a process for some time after its end, and the kernel the seconds
        of the whole span since the last reading.

        Args:
            until: until when a job of ours was on the device. ours: its processes.
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
            taken: the running jobs, by device.
            allow_busy: the job starts although others use the device, and although it was not idle for long enough.
        """
        state = self.states[name]
        if name in taken:
            return f"job {taken[name].id} runs on it"
        # Jobs on GPUs need CPU cores too, so a search on the CPU runs alone.
        if taken and (name == CPU or CPU in taken):
            return "a search on the processor shares it with nobody"
        trouble = self.trouble(name, allow_busy=allow_busy)
        if trouble is not None:
            # What makes it busy may be a job of another daemon, and that says more.
            return self.claims.obstacle(name) or trouble
        idle_s = self.clock.now() - state.since
        if idle_s < self.quiet_s and not allow_busy:
            return f"it has been idle for {idle_s:.0f} s, and {self.quiet_s:.0f} s are asked for"
        return self.claims.obstacle(name)

    def fits(self, name: str, job: Job) -> bool:
        """Return whether a job can run on a device, whatever the device's state."""
        spec, asked, reading = job.request.spec, job.request.gpu, self.states[name].reading
        if job.placed is not None:
            return name == job.placed
        wants_cpu = spec.device == CPU or job.request.replay is not None
        if name == CPU:
            return wants_cpu or (spec.device == "auto" and asked == "any" and not self._has_cards())
        if wants_cpu:
            return False
        _, _, named = spec.device.partition(":")
        if named and named.lower() != name.lower():
            return False
        return asked == "any" or asked.lower() == name.lower() or asked.lower() in reading.model.lower()

    def _has_cards(self) -> bool:
        # Of a driver that does not answer, the states hold the placeholder or the cards it has listed.
        return any(name != CPU for name in self.states)


def _in_host_pid_namespace() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False
