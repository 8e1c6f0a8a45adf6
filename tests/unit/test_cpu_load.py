"""Attributing CPU time to processes, with a simulated /proc and with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.base.clock import SystemClock
from autotune.machine.cpu_load import CpuUse, CpuWatch
from tests.support import FakeClock

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LEADER = 10


class Machine:
    """A simulated machine: three cores, of which two are allowed, and a process tree. CPU times are in seconds."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.clock = FakeClock()
        self.busy_s = [100.0, 100.0, 100.0]
        self.idle_s = [500.0, 500.0, 500.0]
        #: pid: [own seconds, seconds of reaped children, parent]
        self.processes: dict[int, list[float]] = {LEADER: [3.0, 0.0, 1]}
        self.write()

    def watch(self) -> CpuWatch:
        return CpuWatch(LEADER, self.clock, proc=self.proc, cores=frozenset({0, 2}))

    def pass_by(self, seconds: float, *, busy: tuple[float, float, float], own: dict[int, float]) -> None:
        """Advance by ``seconds`` with ``busy`` cores used per core, and ``own`` seconds used per process."""
        self.clock.advance(seconds)
        for core, part in enumerate(busy):
            self.busy_s[core] += part * seconds
            self.idle_s[core] += (1 - part) * seconds
        for pid, used in own.items():
            self.processes[pid][0] += used
        self.write()

    def start(self, pid: int, parent: int = LEADER) -> None:
        self.processes[pid] = [0.0, 0.0, parent]
        self.write()

    def end(self, pid: int, *, waited_for: bool) -> None:
        own, reaped, parent = self.processes.pop(pid)
        (self.proc / str(pid) / "stat").unlink()
        if waited_for:
            self.processes[int(parent)][1] += own + reaped
        self.write()

    def write(self) -> None:
        def ticks(seconds: float) -> int:
            return round(seconds * TICKS_PER_S)

        lines = ["cpu 1 1 1 1 1 1 1 1 0 0"]
        for core, (busy, idle) in enumerate(zip(self.busy_s, self.idle_s, strict=True)):
            # Half is user time, half is stolen by the hypervisor.
            half = ticks(busy / 2)
            lines.append(f"cpu{core} {half} 0 0 {ticks(idle)} 0 0 0 {ticks(busy) - half} 0 0")
        (self.proc / "stat").write_text("\n".join([*lines, "intr 5", "ctxt 6"]) + "\n")
        for pid, (own, reaped, _) in self.processes.items():
            children = " ".join(str(p) for p, (*_, parent) in self.processes.items() if parent == pid)
            folder = self.proc / str(pid)
            (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
            (folder / "task" / str(pid) / "children").write_text(children)
            times = f"{ticks(own)} 0 {ticks(reaped)} 0"
            (folder / "stat").write_text(f"{pid} (a (b) c) S 1 0 0 0 0 0 0 0 0 0 {times} 20 0 1 0 {pid * 7} 0 0\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def approx(foreign: float, idle: float) -> CpuUse:
    # Ticks are rounded.
    return CpuUse(pytest.approx(foreign, abs=0.03), pytest.approx(idle, abs=0.03), pytest.approx(1.0))  # type: ignore[arg-type]


def test_time_that_is_not_ours_is_foreign(machine: Machine) -> None:
    watch = machine.watch()
    machine.pass_by(1.0, busy=(1.0, 0.0, 0.6), own={LEADER: 0.9})
    assert watch.cores == 2
    assert watch.read() == approx(foreign=0.7, idle=0.4)


def test_cores_that_are_not_allowed_are_ignored(machine: Machine) -> None:
    watch = machine.watch()
    machine.pass_by(1.0, busy=(0.5, 1.0, 0.5), own={LEADER: 1.0})
    assert watch.read() == approx(foreign=0.0, idle=1.0)


def test_descendants_are_ours(machine: Machine) -> None:
    machine.start(11)
    watch = machine.watch()
    machine.start(12, parent=11)
    machine.pass_by(1.0, busy=(1.0, 0.0, 1.0), own={LEADER: 0.5, 11: 0.5, 12: 0.6})
    assert watch.read() == approx(foreign=0.4, idle=0.0)


@pytest.mark.parametrize("waited_for", [True, False])
def test_exited_children_keep_their_time(machine: Machine, waited_for: bool) -> None:
    machine.start(11)
    machine.pass_by(5.0, busy=(1.0, 0.0, 0.0), own={11: 5.0})
    watch = machine.watch()
    machine.pass_by(0.9, busy=(1.0, 0.0, 0.0), own={11: 0.2 if waited_for else 0.0, LEADER: 0.7})
    machine.end(11, waited_for=waited_for)
    machine.pass_by(0.1, busy=(1.0, 0.0, 0.0), own={LEADER: 0.1})
    # The exit counts neither as five seconds of foreign work nor as five seconds of ours.
    expected = 0.0 if waited_for else 0.2
    assert watch.read() == approx(foreign=expected, idle=1.0)
    machine.pass_by(1.0, busy=(1.0, 0.0, 1.0), own={LEADER: 1.0})
    assert watch.read() == approx(foreign=1.0, idle=0.0)


def test_short_intervals_are_combined(machine: Machine) -> None:
    watch = machine.watch()
    machine.pass_by(1.0, busy=(0.0, 0.0, 0.0), own={})
    watch.read()
    for tenths in (1, 2, 3):
        machine.pass_by(0.1, busy=(1.0, 0.0, 1.0), own={})
        use = watch.read()
        assert use is not None
        # Until 0.3 s have passed since a reading, earlier intervals are included.
        assert use.span_s == pytest.approx(1.0 + tenths / 10 if tenths < 3 else 0.3)
    assert use.foreign_cores == pytest.approx(2.0, abs=0.1)


def test_use_is_unknown_if_proc_cannot_be_read(machine: Machine) -> None:
    (machine.proc / "stat").unlink()
    watch = machine.watch()
    machine.clock.advance(1.0)
    assert watch.read() is None


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


class TestAlone:
    """These have the machine to themselves."""

    def test_a_real_process_tree_is_distinguished_from_other_processes(self, stranger: subprocess.Popen[bytes]) -> None:
        """Measured from both sides at once, so that other activity on this machine does not matter."""
        work = "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
        nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
        ours, theirs = CpuWatch(os.getpid(), SystemClock()), CpuWatch(stranger.pid, SystemClock())
        subprocess.run([sys.executable, "-c", nested], check=True)
        from_here, from_there = ours.read(), theirs.read()
        assert from_here is not None and from_there is not None
        foreign_s = from_there.foreign_cores * from_there.span_s - from_here.foreign_cores * from_here.span_s
        assert foreign_s > 0.35
