"""Which devices there are, and since when each has been idle. What is unknown is never idle."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from autotune.clock import Clock, SystemClock
from autotune.daemon.settings import Settings
from autotune.machine.cpu_load import CpuWatch
from autotune.machine.gpu import Gpu, NvmlUnavailable, has_nvidia_device, visible
from autotune.records import Job

#: The processor as a device.
CPU = "cpu"
#: Stands for cards of which nothing is known yet.
UNCOUNTED = "gpu"
_MIB = 2**20
#: The inode of the first pid namespace (the kernel's PROC_PID_INIT_INO): the one in which the driver numbers processes.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


@dataclass(frozen=True)
class Reading:
    """What one device does at a moment.

    Attributes:
        trouble: why it is not idle, as a clause; ``None``: it is. known: False where that could not be found out.
        processes: of others or of ours on a card; ``None``: unknown, or the processor.
        held: memory is in use, and no process is there that uses it.
    """

    name: str
    model: str
    trouble: str | None = None
    known: bool = True
    processes: frozenset[int] | None = None
    held: bool = False


class Devices(Protocol):
    """Says what the devices do. For one thread."""

    def read(self) -> list[Reading]:
        """Every device that is known, by name; the processor last."""
        ...

    def foreign(self, reading: Reading, ours: frozenset[int]) -> frozenset[int]:
        """Those of a card's processes that belong to nobody of ours, as far as that can be told."""
        ...


class RealDevices:
    """The cards, as the driver tells of them, and the processor.

    Args:
        cards: what the driver says now.
        pids_are_ours: the driver counts processes as we do; ``None`` finds out. In a container it does not.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        cards: Callable[[], list[Gpu] | NvmlUnavailable],
        clock: Clock | None = None,
        pids_are_ours: bool | None = None,
    ) -> None:
        self._settings = settings
        self._cards = cards
        self._watch = CpuWatch(os.getpid(), clock or SystemClock())
        self._pids_are_ours = _counts_like_the_driver() if pids_are_ours is None else pids_are_ours
        self._known: dict[str, str] = {}

    def read(self) -> list[Reading]:
        return [*self._read_cards(), self._read_cpu()]

    def foreign(self, reading: Reading, ours: frozenset[int]) -> frozenset[int]:
        present = reading.processes or frozenset()
        if self._pids_are_ours:
            return present - ours
        # Nobody here knows who is who, but one launch is one process on a card, and launches never overlap.
        return present if len(present) > 1 else frozenset()

    def _read_cards(self) -> list[Reading]:
        cards = self._cards()
        if isinstance(cards, list):
            # A scheduler may have given this daemon some of them only.
            cards = visible(cards, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if isinstance(cards, NvmlUnavailable):
            if not cards.driver_present:
                return []
            reason = cards.reason.rstrip(".")
            return [Reading(uuid, model, reason, known=False) for uuid, model in self._known.items()] or [
                Reading(UNCOUNTED, "GPU", reason, known=False)
            ]
        found = [self._read_card(card) for card in cards]
        gone = self._known.keys() - {reading.name for reading in found}
        self._known |= {reading.name: reading.model for reading in found}
        missing = "the driver does not list it any more"
        return found + [Reading(uuid, self._known[uuid], missing, known=False) for uuid in sorted(gone)]

    def _read_card(self, card: Gpu) -> Reading:
        processes = None if card.processes is None else frozenset(card.processes)
        used, busy = card.memory_used_bytes, card.utilization_percent
        trouble = None
        known = True
        held = False
        if card.mig:
            trouble = "it is split into MIG instances, which autotune does not share out"
        elif processes is None or used is None or busy is None:
            what = (
                "who is on it" if processes is None else "how much memory is used" if used is None else "how busy it is"
            )
            trouble, known = f"the driver does not tell {what}", False
        elif processes:
            trouble = f"process {', '.join(map(str, sorted(processes)))} is on it"
        elif used > self._settings.memory_bytes:
            trouble = f"{used / _MIB:.0f} MiB of its memory are in use, and no process is there that uses them"
            held = True
        elif busy > self._settings.utilization_percent:
            trouble = f"it is {busy} % busy"
        return Reading(card.uuid, card.name, trouble, known, processes, held)

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
    """What is known of a device over time.

    Attributes:
        idle: nobody but us uses it. since: when it began, or ceased, to be so; seconds of the clock.
        foreign: processes beside those of the job that runs on it.
    """

    reading: Reading
    idle: bool
    since: float
    foreign: frozenset[int] = frozenset()

    @property
    def word(self) -> str:
        """idle, busy, unknown, or quarantined: memory is in use, and no process is there that uses it."""
        if not self.reading.known:
            return "unknown"
        return "idle" if self.idle else "quarantined" if self.reading.held else "busy"


@dataclass
class Board:
    """All devices with their past: which one may get a job, and why another may not.

    Args:
        quiet_s: idle for so long is quiet.

    Attributes:
        looks: how often all devices were read.
    """

    devices: Devices
    clock: Clock
    quiet_s: float
    standings: dict[str, DeviceState] = field(default_factory=dict)
    looks: int = 0

    def look(self, ours: Callable[[], Mapping[str, frozenset[int] | None]]) -> None:
        """Read every device.

        Args:
            ours: the processes of the job on a device, for each that has one; ``None`` where the job is just ending.
                What these do does not make it busy. Asked before and after the reading, which takes its time.
        """
        self.looks += 1
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
            before = self.standings.get(reading.name)
            since = before.since if before is not None and before.idle == idle else now
            self.standings[reading.name] = DeviceState(reading, idle, since, foreign)
        # A stand-in for cards that could not even be counted is gone when they can.
        if any(name.startswith("GPU-") for name in self.standings):
            self.standings.pop(UNCOUNTED, None)

    def obstacle(self, name: str, taken: Mapping[str, Job]) -> str | None:
        """Why no job can start on a device now, as a clause.

        Args:
            taken: devices with a job on them.
        """
        standing = self.standings[name]
        if name in taken:
            return f"job {taken[name].id} runs on it"
        # The cores belong to everybody: a search on the processor goes beside nothing else.
        if taken and (name == CPU or CPU in taken):
            return "a search on the processor shares it with nobody"
        if standing.reading.trouble is not None:
            return standing.reading.trouble
        idle_s = self.clock.now() - standing.since
        if idle_s < self.quiet_s:
            return f"it has been idle for {idle_s:.0f} s, and {self.quiet_s:.0f} s are asked for"
        return None

    def fits(self, name: str, job: Job) -> bool:
        """Whether a job wants this device."""
        spec, asked, reading = job.request.spec, job.request.gpu, self.standings[name].reading
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
        return has_nvidia_device() or any(name != CPU for name in self.standings)


def _counts_like_the_driver() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False
