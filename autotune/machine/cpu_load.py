"""How busy the cores allowed are, and how much of that is others' doing.

The machine's own account (``/proc/stat``) less that of one process tree. File formats: the kernel's
Documentation/filesystems/proc.rst. Both accounts move in clock ticks of 10 ms, and the machine's is sampled at timer
interrupts, so that short spans say little.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

from autotune.clock import Clock

_PROC = Path("/proc")

#: Shorter spans than this are not judged: a tick more or less would be a tenth of a core.
SHORTEST_SPAN_S = 0.3
#: Readings of a tree in which processes ended meanwhile are taken again this often.
_ATTEMPTS = 3


@dataclass(frozen=True)
class CpuUse:
    """CPU time over some span, in cores.

    Attributes:
        foreign_cores: taken by others, time stolen by a hypervisor included; never negative.
        idle_cores: used by nobody.
        span_s: how long the span was.
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
    """CPU seconds of one process: its own, and those of its children that have ended and were waited for."""

    own_s: float
    reaped_s: float


class CpuWatch:
    """CPU use of the cores that this process may use now, reading by reading.

    Made and read in one thread. Readings a moment apart are told over the last `SHORTEST_SPAN_S` or more.

    Args:
        pid: the tree below this process, itself included, is ours.
        proc: where the file system is mounted.
        cores: which cores to look at; ``None`` asks the kernel which this process may use.
    """

    def __init__(self, pid: int, clock: Clock, *, proc: Path = _PROC, cores: frozenset[int] | None = None) -> None:
        allowed = frozenset(os.sched_getaffinity(0)) if cores is None else cores
        self.cores = len(allowed)
        self._names = {f"cpu{core}" for core in allowed}
        self._pid = pid
        self._clock = clock
        self._proc = proc
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        # What the tree has used until now is in no span.
        self._tree = self._snapshot()
        self._own_s = 0.0
        self._readings: deque[_Reading] = deque()
        self.read()

    def read(self) -> CpuUse | None:
        """The use since the reading before this one, or an earlier one if that is too recent.

        ``None`` where the kernel does not tell.
        """
        reading = self._take()
        if reading is None:
            return None
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

    def _take(self) -> _Reading | None:
        machine = self._machine()
        if machine is None:
            return None
        self._own_s += self._own_since()
        return _Reading(self._clock.now(), *machine, self._own_s)

    def _machine(self) -> tuple[float, float] | None:
        """``(busy, idle)`` CPU seconds of the cores since the machine started."""
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
        """CPU seconds of the tree since the last call.

        A process that was waited for lives on in its parent's account, so the sum over the tree keeps its time. One
        whose exit nobody waits for, or that leaves the tree, takes its whole past out of the sum; then only those
        are counted that are there in both readings.
        """
        before, now = self._tree, self._snapshot()
        self._tree = now
        nothing = _Spent(0.0, 0.0)
        alive = sum(spent.own_s - before.get(key, nothing).own_s for key, spent in now.items())
        total = sum(s.own_s + s.reaped_s for s in now.values()) - sum(s.own_s + s.reaped_s for s in before.values())
        return max(0.0, alive, total)

    def _snapshot(self) -> dict[tuple[int, int], _Spent]:
        """The tree's processes by pid and start time."""
        tree: dict[tuple[int, int], _Spent] = {}
        for _ in range(_ATTEMPTS):
            leader = self._process(self._pid)
            tree = dict(found for pid in self._pids() if (found := self._process(pid)))
            again = self._process(self._pid)
            # A child that ends meanwhile would be counted twice, or not at all.
            if leader is None or again is None or leader[1].reaped_s == again[1].reaped_s:
                break
        return tree

    def _pids(self) -> Iterator[int]:
        if not (self._proc / str(self._pid) / "task" / str(self._pid) / "children").exists():
            yield self._pid
            with contextlib.suppress(psutil.Error):
                yield from (child.pid for child in psutil.Process(self._pid).children(recursive=True))
            return
        todo = [self._pid]
        while todo:
            pid = todo.pop()
            yield pid
            # Children belong to the thread that made them.
            for path in (self._proc / str(pid) / "task").glob("*/children"):
                try:
                    todo += map(int, path.read_text().split())
                except OSError:
                    continue

    def _process(self, pid: int) -> tuple[tuple[int, int], _Spent] | None:
        try:
            text = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        # The name in parentheses may hold anything, parentheses included. Behind it, the third field comes first.
        fields = text.rpartition(")")[2].split()
        user, system, reaped_user, reaped_system = map(int, fields[11:15])
        spent = _Spent((user + system) * self._tick_s, (reaped_user + reaped_system) * self._tick_s)
        return (pid, int(fields[19])), spent
