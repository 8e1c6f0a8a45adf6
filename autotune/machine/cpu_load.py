"""Load of the processors, and their energy."""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from autotune.base.clock import Clock
from autotune.machine.system import children_of

# CPU load of the cores this process may use, and the part of it that is due to other processes.
#
# Foreign use is the machine's CPU time (``/proc/stat``) minus that of our process tree. File formats: the kernel's
# Documentation/filesystems/proc.rst. Both counters advance in clock ticks of 10 ms, and the machine's is sampled at
# timer interrupts, so short spans are imprecise.


_PROC = Path("/proc")

#: Shorter spans are not evaluated: even at this length, one tick of 10 ms is 3 % of a core.
SHORTEST_SPAN_S = 0.3
#: How often to repeat a reading of the tree during which processes ended.
_ATTEMPTS = 3


@dataclass(frozen=True)
class CpuUse:
    """CPU time over a span, in cores.

    Attributes:
        foreign_cores: used by other processes, including time stolen by a hypervisor; never negative.
        idle_cores: unused.
        span_s: length of the span.
    """

    foreign_cores: float
    idle_cores: float
    span_s: float


@dataclass(frozen=True)
class _Reading:
    at_s: float
    busy_s: float
    idle_s: float
    own_s: float


@dataclass(frozen=True)
class _Spent:
    """CPU seconds of one process: its own, and those of its children that were waited for."""

    own_s: float
    reaped_s: float


class CpuWatch:
    """CPU use of the cores that this process may use, from reading to reading.

    Create it and read it in one thread. Readings in quick succession report the last `SHORTEST_SPAN_S` or more.

    Args:
        pid: this process and its descendants count as ours.
        proc: where procfs is mounted.
        cores: which cores to look at; ``None`` for those this process may use.
    """

    def __init__(self, pid: int, clock: Clock, *, proc: Path = _PROC, cores: frozenset[int] | None = None) -> None:
        allowed = allowed_cores() if cores is None else cores
        self.cores = len(allowed)
        self._names = {f"cpu{core}" for core in allowed}
        self._pid = pid
        self._clock = clock
        self._proc = proc
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        # CPU time the tree used before now belongs to no span.
        self._tree = self._snapshot()
        self._own_s = 0.0
        self._readings: deque[_Reading] = deque()
        self.read()

    def read(self) -> CpuUse | None:
        """Return the use since the previous reading, or since an earlier one if that is too recent.

        ``None`` if the kernel does not report it.
        """
        machine = self._machine()
        if machine is None:
            return None
        self._own_s += self._own_since()
        reading = _Reading(self._clock.now(), *machine, self._own_s)
        while len(self._readings) > 1 and reading.at_s - self._readings[1].at_s >= SHORTEST_SPAN_S:
            self._readings.popleft()
        self._readings.append(reading)
        before = self._readings[0]
        span_s = reading.at_s - before.at_s
        if span_s <= 0:
            return None
        foreign_s = reading.busy_s - before.busy_s - (reading.own_s - before.own_s)
        return CpuUse(
            foreign_cores=max(0.0, foreign_s / span_s),
            idle_cores=max(0.0, (reading.idle_s - before.idle_s) / span_s),
            span_s=span_s,
        )

    def _machine(self) -> tuple[float, float] | None:
        """Return ``(busy, idle)`` CPU seconds of the cores since boot."""
        try:
            lines = (self._proc / "stat").read_text().splitlines()
        except OSError:
            return None
        busy = idle = found = 0
        for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
            if name in self._names and len(fields) >= 8:
                user, nice, system, idling, waiting, irq, softirq, stolen = map(int, fields[:8])
                busy += user + nice + system + irq + softirq + stolen
                idle += idling + waiting
                found += 1
        return (busy * self._tick_s, idle * self._tick_s) if found else None

    def _own_since(self) -> float:
        """Return the CPU seconds of the tree since the last call.

        The time of a process that was waited for moves to its parent's counter, so the sum over the tree keeps it. A
        process that nobody waits for, or that leaves the tree, takes all its time out of the sum. In that case only
        processes present in both readings are counted.
        """
        before, now = self._tree, self._snapshot()
        self._tree = now
        nothing = _Spent(0.0, 0.0)
        alive = sum(spent.own_s - before.get(key, nothing).own_s for key, spent in now.items())
        total = sum(s.own_s + s.reaped_s for s in now.values()) - sum(s.own_s + s.reaped_s for s in before.values())
        return max(0.0, alive, total)

    def _snapshot(self) -> dict[tuple[int, int], _Spent]:
        """Return the tree's processes by pid and start time."""
        tree: dict[tuple[int, int], _Spent] = {}
        for _ in range(_ATTEMPTS):
            leader = self._process(self._pid)
            tree = dict(found for pid in self._pids() if (found := self._process(pid)))
            again = self._process(self._pid)
            # A child that ends during the reading would be counted twice, or not at all.
            if leader is None or again is None or leader[1].reaped_s == again[1].reaped_s:
                break
        return tree

    def _pids(self) -> Iterator[int]:
        todo = [self._pid]
        while todo:
            yield (pid := todo.pop())
            todo += children_of(pid, proc=self._proc)

    def _process(self, pid: int) -> tuple[tuple[int, int], _Spent] | None:
        try:
            text = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        # The name in parentheses may contain anything, including parentheses. The third field follows it.
        fields = text.rpartition(")")[2].split()
        user, system, reaped_user, reaped_system = map(int, fields[11:15])
        spent = _Spent((user + system) * self._tick_s, (reaped_user + reaped_system) * self._tick_s)
        return (pid, int(fields[19])), spent


# Sets of cores: as text, and as equal shares of those that this process may use.


_CPUS = Path("/sys/devices/system/cpu")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse a list as ``taskset -c`` takes it, such as ``0-3,8``; return the numbers, ascending.

    Raises:
        ValueError: the text is not such a list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is neither a core nor a range of cores")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part!r} is an empty range")
        cores.update(range(first, last + 1))
    return tuple(sorted(cores))


def cores_text(cores: Sequence[int]) -> str:
    """Return the shortest text that `parse_cores` reads as these cores."""
    parts: list[tuple[int, int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1] = parts[-1][0], core
        else:
            parts.append((core, core))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def allowed_cores() -> frozenset[int]:
    """Return the cores that this process may use."""
    return frozenset(os.sched_getaffinity(0))


def equal_shares(cores: frozenset[int], count: int, *, cpus: Path = _CPUS) -> list[tuple[int, ...]]:
    """Return equal shares of some cores, each ascending. Left over are fewer than ``count`` of them.

    Neighbours stay together: first the hardware threads of a core, then the cores of a package.

    Args:
        cpus: where the kernel tells of processors (Documentation/admin-guide/cputopology.rst).
    """
    size = len(cores) // count
    ordered = sorted(cores, key=lambda core: (*_place(cpus / f"cpu{core}" / "topology", core), core))
    return [tuple(sorted(ordered[i * size : (i + 1) * size])) for i in range(count)]


def _place(topology: Path, core: int) -> tuple[int, int]:
    """Return the numbers of the package and of the physical core of a processor."""
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, core


class Stops:
    """Counts the SIGCONT that ends each stop (by cpulimit, a debugger); of a SIGSTOP itself a process learns nothing.

    Create it in the main thread: elsewhere no signal handler can be set, and `count` stays ``None``. Stops that follow
    each other within one call into C (a backward pass) count as one.

    Attributes:
        count: number of stops so far; ``None`` if they are not counted.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        before = signal.getsignal(signal.SIGCONT)

        def continued(number: int, frame: FrameType | None) -> None:
            self.count = (self.count or 0) + 1
            if callable(before):
                before(number, frame)

        try:
            signal.signal(signal.SIGCONT, continued)
        except ValueError:
            return
        # The interrupted system calls of libraries go on, as they do without a handler.
        signal.siginterrupt(signal.SIGCONT, False)
        self.count = 0


# The energy that the processors use, from their own counters (RAPL, read by way of Linux' powercap).
#
# https://docs.kernel.org/power/powercap/powercap.html. Since Linux 5.10, only root may read them, unless the
# administrator allows it (CVE-2020-8694).

#: Where Linux has the counters. Those of AMD's processors have Intel's name, too.
POWERCAP = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"intel-rapl:\d+")
_PART = re.compile(r"intel-rapl:\d+:\d+")


@dataclass
class _Zone:
    """One counter. last_uj: its reading before; range_uj: where it begins at zero again."""

    path: Path
    range_uj: int
    last_uj: int


class Rapl:
    """Adds up the energy of all processor packages, and of the memory where it has a counter of its own.

    The counters wrap around after some minutes of full load: call `energy_j` at least once a minute.

    Args:
        folder: of the counters.

    Attributes:
        refused: why there is no figure, as a clause; ``None`` if there is one.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        self.refused: str | None = None
        self._joules = 0.0
        self._zones: list[_Zone] = []
        try:
            for path in sorted(folder.iterdir()):
                # A part of a package is counted in it; memory is not. What is called psys counts everything twice.
                name = _text(path / "name") if _PACKAGE.fullmatch(path.name) or _PART.fullmatch(path.name) else ""
                if (_PACKAGE.fullmatch(path.name) and name.startswith("package")) or name == "dram":
                    range_uj = int(_text(path / "max_energy_range_uj"))
                    self._zones.append(_Zone(path, range_uj, int(_text(path / "energy_uj"))))
        except PermissionError:
            self._refuse("only root may read the processor's energy counter")
        except (OSError, ValueError):
            self._refuse("the processor's energy counter cannot be read")
        if not self._zones and self.refused is None:
            self._refuse("this machine has no energy counter of its processor")

    def energy_j(self) -> float | None:
        """Return the joules used since this object was made; ``None`` if they are not known.

        A counter that wraps around more than once between two calls cannot be told from one that does so once.
        """
        if self.refused is not None:
            return None
        try:
            for zone in self._zones:
                now_uj = int(_text(zone.path / "energy_uj"))
                used_uj = now_uj - zone.last_uj
                self._joules += (used_uj if used_uj >= 0 else used_uj + zone.range_uj) / 1e6
                zone.last_uj = now_uj
        except (OSError, ValueError):
            self._refuse("the processor's energy counter cannot be read any more")
            return None
        return self._joules

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._zones = []


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
