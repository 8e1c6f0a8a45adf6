"""Resources the operating system allows this process: cores, memory, shared memory, open files.

A container's limits are set by control groups, and the kernel enforces those of every ancestor, so each limit is the
smallest one between our own group and the root. Both generations are read (v2 ``cpu.max``, ``memory.max``;
v1 ``cpu.cfs_quota_us``, ``memory.limit_in_bytes``), because hosts with either or both are common.
File formats: the kernel's Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and filesystems/proc.rst.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

from autotune.base.errors import MachineError
from autotune.base.records import Host

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")

#: Main ID register part numbers of Arm's own server cores (implementer 0x41), from their reference manuals.
_ARM_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


def read_host(*, proc: Path = _PROC, cgroup: Path = _CGROUP, shm: Path = _SHM, affinity: int | None = None) -> Host:
    """Read the resources this process may use.

    Args:
        proc, cgroup, shm: where these file systems are mounted.
        affinity: number of cores in the affinity mask; ``None`` asks the kernel.

    Raises:
        MachineError: ``proc`` has no readable ``meminfo``: the system is not Linux, or /proc is hidden.
    """
    physical, available = _physical_memory(proc)
    for limit, free in _memory_limits(proc, cgroup):
        physical = min(physical, limit)
        available = min(available, free)
    shm_free_bytes, shm_bytes = shared_memory(shm=shm)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Host(
        cpu_model=_cpu_model(proc),
        cores=_cores(proc, cgroup, len(os.sched_getaffinity(0)) if affinity is None else affinity),
        memory_bytes=physical,
        available_bytes=available,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        open_files=sys.maxsize if files == resource.RLIM_INFINITY else files,
    )


def shared_memory(*, shm: Path = _SHM) -> tuple[int, int]:
    """Return ``(bytes free to us, size)`` of /dev/shm; zeros if it does not exist."""
    try:
        status = os.statvfs(shm)
    except OSError:
        return 0, 0
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def oom_kill_count(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return how many processes the kernel's OOM killer has killed in our control group since it was created.

    If the group does not report it, the count of the whole machine; ``None`` if neither does. Only the difference
    between two readings is meaningful.
    """
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            count = _table(folder / name).get("oom_kill")
            if count is not None:
                return count
    return _table(proc / "vmstat").get("oom_kill")


def tree_memory_bytes(pid: int, *, proc: Path = _PROC) -> int | None:
    """Return the memory in bytes of a process and all its descendants, counting each shared page once.

    This is the sum of proportional set sizes (a page mapped by n processes counts 1/n in each). If the kernel denies
    access to them, it is the private pages plus the shared pages divided by the number of processes, which is exact if
    the whole tree, and no other process, maps them. Processes that end during the reading are ignored.

    Returns:
        ``None`` if the process is gone.
    """
    try:
        leader = psutil.Process(pid)
        tree = [pid, *(child.pid for child in leader.children(recursive=True))]
    except psutil.Error:
        return None
    sizes = [_process_memory(proc / str(member), sharers=len(tree)) for member in tree]
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def _process_memory(folder: Path, *, sharers: int) -> int | None:
    proportional = _table(folder / "smaps_rollup").get("Pss")
    if proportional is not None:
        return proportional * 1024
    pages = (_read(folder / "statm") or "").split()
    if len(pages) < 3:
        return None
    resident, shared = int(pages[1]), int(pages[2])
    return (resident - shared + shared // sharers) * resource.getpagesize()


def _physical_memory(proc: Path) -> tuple[int, int]:
    meminfo = _table(proc / "meminfo")
    try:
        return meminfo["MemTotal"] * 1024, meminfo["MemAvailable"] * 1024
    except KeyError as error:
        raise MachineError(
            f"{proc / 'meminfo'} does not tell {error}", advice="autotune needs Linux with /proc mounted."
        ) from None


def _memory_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield ``(limit, bytes free under it)`` for each control group above us that has a limit."""
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for limit_name, usage_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _integer(folder / limit_name)
            if limit is None:
                continue
            # The kernel drops inactive cache before it kills anything.
            cache = _table(folder / "memory.stat").get(cache_name, 0)
            used = max(0, (_integer(folder / usage_name) or 0) - cache)
            yield limit, max(0, limit - used)


def _cores(proc: Path, cgroup: Path, affinity: int) -> int:
    cores = affinity
    for folder in _cgroup_folders(proc, cgroup, "cpu"):
        for quota, period in (
            tuple((_read(folder / "cpu.max") or "").split()[:2]) or ("max", "0"),
            (_read(folder / "cpu.cfs_quota_us") or "max", _read(folder / "cpu.cfs_period_us") or "0"),
        ):
            # "max" (v2) and -1 (v1) mean no quota.
            if quota.strip().isdigit() and period.strip().isdigit() and int(period) > 0:
                cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """Return the folders of our control group and all its ancestors for ``controller``, our own first.

    Inside a container the path in ``/proc/self/cgroup`` may be the host's, which does not exist here. The container's
    own group is then the root of the mount, which is always among the folders.
    """
    folders: list[Path] = []
    for line in (_read(proc / "self" / "cgroup") or "0::/").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            mounts = [cgroup, cgroup / "unified"]
        elif controller in controllers.split(","):
            mounts = [cgroup / controllers, cgroup / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            # This process was moved out of its namespace's root; following ".." would leave the mount.
            parts = []
        for mount in mounts:
            folders += [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


def _cpu_model(proc: Path) -> str:
    fields: dict[str, list[str]] = {}
    for line in (_read(proc / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        values = fields.setdefault(key.strip(), [])
        if value.strip() and value.strip() not in values:
            values.append(value.strip())
    if fields.get("model name"):
        return " + ".join(fields["model name"])
    # Arm kernels report numbers instead of a name; CPUs with different cores (big.LITTLE) report several.
    if fields.get("CPU part"):
        maker = " + ".join(fields.get("CPU implementer", []))
        known = _ARM_PARTS if maker == "0x41" else {}
        return f"Arm {maker} " + " + ".join(known.get(part, part) for part in fields["CPU part"])
    return platform.processor() or platform.machine() or "unknown"


def _read(path: Path) -> str | None:
    # A process or control group may vanish between two reads. That is a missing value, not an error.
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _integer(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """Parse lines ``name value`` or ``name: value unit`` whose value is a whole number."""
    rows = (line.split() for line in (_read(path) or "").splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
