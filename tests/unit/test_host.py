"""The resources that a process may use, read from a simulated /proc and from real processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.base.errors import MachineError
from autotune.base.records import Host
from autotune.machine.host import oom_kill_count, read_host, tree_memory_bytes

GIB = 2**30
CPU = "processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\n\n"
NEOVERSE_V2 = "CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Machine:
    """A simulated machine: /proc, /sys/fs/cgroup and /dev/shm as folders."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup, self.shm = root / "proc", root / "cgroup", root / "shm"
        for folder in (self.proc, self.cgroup, self.shm):
            folder.mkdir()
        self.put("meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB // 1024} kB\n")
        self.put("cpuinfo", CPU + CPU)
        self.put("self/cgroup", "0::/\n")

    def put(self, name: str, text: str) -> None:
        write(self.proc / name, text)

    def group(self, name: str, **files: str | int) -> None:
        for file, text in files.items():
            write(self.cgroup / name / file.replace("__", "."), f"{text}\n")

    def read(self, affinity: int = 16) -> Host:
        return read_host(proc=self.proc, cgroup=self.cgroup, shm=self.shm, affinity=affinity)

    def oom_kills(self) -> int | None:
        return oom_kill_count(proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_limits_the_machines_resources_count(machine: Machine) -> None:
    host = machine.read()
    assert (host.cpu_model, host.cores) == ("Fast CPU @ 3 GHz", 16)
    assert (host.memory_bytes, host.available_bytes) == (64 * GIB, 48 * GIB)
    assert host.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 0 < host.shm_free_bytes <= host.shm_bytes


def test_this_machine_can_be_read() -> None:
    host = read_host()
    assert 1 <= host.cores <= len(os.sched_getaffinity(0))
    assert 0 < host.available_bytes <= host.memory_bytes


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 16), ("400000 100000", 4), ("150000 100000", 2), ("1000 100000", 1), ("9900000 100000", 16)],
)
def test_v2_cpu_quota(machine: Machine, quota: str, cores: int) -> None:
    machine.group("", cpu__max=quota)
    assert machine.read().cores == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 16), ("250000", 3)])
def test_v1_cpu_quota(machine: Machine, quota: str, cores: int) -> None:
    machine.put("self/cgroup", "3:cpu,cpuacct:/docker/abc\n2:cpuset:/\n")
    machine.group("cpu,cpuacct/docker/abc", cpu__cfs_quota_us=quota, cpu__cfs_period_us=100000)
    assert machine.read().cores == cores


def test_the_tightest_ancestor_decides(machine: Machine) -> None:
    machine.put("self/cgroup", "0::/user.slice/job/step\n")
    machine.group("user.slice/job/step", memory__max="max", cpu__max="max 100000")
    machine.group("user.slice/job", memory__max=8 * GIB, memory__current=6 * GIB, cpu__max="600000 100000")
    machine.group("user.slice/job", memory__stat=f"anon 5\ninactive_file {GIB}")
    machine.group("user.slice", memory__max=32 * GIB, memory__current=10 * GIB, cpu__max="800000 100000")
    host = machine.read()
    assert host.cores == 6
    assert host.memory_bytes == 8 * GIB
    # 6 GiB in use, of which 1 GiB is reclaimable cache.
    assert host.available_bytes == 3 * GIB


def test_the_fullest_ancestor_decides_what_is_available(machine: Machine) -> None:
    machine.put("self/cgroup", "0::/full/mine\n")
    machine.group("full/mine", memory__max=4 * GIB, memory__current=GIB)
    machine.group("full", memory__max=20 * GIB, memory__current=19 * GIB)
    host = machine.read()
    assert (host.memory_bytes, host.available_bytes) == (4 * GIB, GIB)


def test_v1_memory_limit(machine: Machine) -> None:
    machine.put("self/cgroup", "4:memory:/docker/abc\n0::/\n")
    machine.group("memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB)
    machine.group("memory/docker/abc", memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=2 * GIB)
    machine.group("memory/docker/abc", memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB}")
    host = machine.read()
    assert (host.memory_bytes, host.available_bytes) == (6 * GIB, 5 * GIB)


def test_a_container_sees_its_own_group_as_root(machine: Machine) -> None:
    machine.put("self/cgroup", "0::/kubepods/pod1/the-hosts-path\n")
    machine.group("", memory__max=2 * GIB, memory__current=0)
    assert machine.read().memory_bytes == 2 * GIB


def test_a_path_outside_the_namespace_does_not_leave_the_mount(machine: Machine) -> None:
    machine.put("self/cgroup", "0::/../../outside\n")
    write(machine.cgroup.parent.parent / "outside" / "memory.max", "4096")
    machine.group("", memory__max=3 * GIB)
    assert machine.read().memory_bytes == 3 * GIB


def test_missing_shared_memory_is_zero_bytes(machine: Machine) -> None:
    machine.shm.rmdir()
    host = machine.read()
    assert (host.shm_bytes, host.shm_free_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        (NEOVERSE_V2 + NEOVERSE_V2, "Arm 0x41 Neoverse-V2"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd05\n\nCPU part\t: 0xd0c\n", "Arm 0x41 0xd05 + Neoverse-N1"),
        ("CPU implementer\t: 0x61\nCPU part\t: 0xd0c\n", "Arm 0x61 0xd0c"),
    ],
)
def test_arm_cpus_are_identified_by_numbers(machine: Machine, cpuinfo: str, model: str) -> None:
    machine.put("cpuinfo", cpuinfo)
    assert machine.read().cpu_model == model


def test_missing_meminfo_is_a_machine_error(machine: Machine) -> None:
    (machine.proc / "meminfo").unlink()
    with pytest.raises(MachineError, match="MemTotal"):
        machine.read()


def test_oom_kills_come_from_our_own_group_first(machine: Machine) -> None:
    assert machine.oom_kills() is None
    machine.put("vmstat", "pgfault 12\noom_kill 7\n")
    assert machine.oom_kills() == 7
    machine.put("self/cgroup", "4:memory:/mine\n0::/\n")
    machine.group("memory/mine", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2")
    assert machine.oom_kills() == 2
    machine.put("self/cgroup", "0::/mine\n")
    machine.group("mine", memory__events="low 0\noom 4\noom_kill 3")
    assert machine.oom_kills() == 3


SHARED = 64 * 2**20
FORKS_AND_WAITS = f"""
import os, sys
kept = b"x" * {SHARED}
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pair() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that shares 64 MiB with its one child, and the child's pid."""
    leader = subprocess.Popen(
        [sys.executable, "-c", FORKS_AND_WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert leader.stdout is not None
    try:
        yield leader, int(leader.stdout.readline())
    finally:
        leader.communicate(timeout=30)


def test_a_tree_counts_shared_pages_once(pair: tuple[subprocess.Popen[str], int]) -> None:
    size = tree_memory_bytes(pair[0].pid)
    assert size is not None
    assert SHARED < size < 1.8 * SHARED


def test_a_tree_without_proportional_sizes_divides_shared_pages(
    pair: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    leader, child = pair
    write(tmp_path / str(leader.pid) / "statm", "9000 5000 3000 1 0 1 0\n")
    write(tmp_path / str(child) / "statm", "9000 4000 3000 1 0 1 0\n")
    pages = (5000 - 3000) + (4000 - 3000) + 3000
    assert tree_memory_bytes(leader.pid, proc=tmp_path) == pages * resource.getpagesize()


def test_a_finished_process_has_no_memory() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert tree_memory_bytes(done.pid) is None
