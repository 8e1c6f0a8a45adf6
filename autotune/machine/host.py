"""This machine: resources, compilers, what identifies it."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
import resource
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from autotune.base.errors import MachineError
from autotune.base.records import DataRef, Fingerprint, Host, Probe
from autotune.machine.gpu import Gpu

# Resources the operating system allows this process: cores, memory, shared memory, open files.
#
# A container's limits are set by control groups, and the kernel enforces those of every ancestor, so each limit is the
# smallest one between our own group and the root. Both generations are read (v2 ``cpu.max``, ``memory.max``; v1
# ``cpu.cfs_quota_us``, ``memory.limit_in_bytes``), because hosts with either or both are common. File formats: the
# kernel's Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and filesystems/proc.rst.


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
    meminfo = _table(proc / "meminfo")
    try:
        physical, available = meminfo["MemTotal"] * 1024, meminfo["MemAvailable"] * 1024
    except KeyError as error:
        raise MachineError(
            f"{proc / 'meminfo'} does not tell {error}", advice="autotune needs Linux with /proc mounted."
        ) from None
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
        usage = shutil.disk_usage(shm)
    except OSError:
        return 0, 0
    return usage.free, usage.total


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
        by_key = _ARM_PARTS if maker == "0x41" else {}
        return f"Arm {maker} " + " + ".join(by_key.get(part, part) for part in fields["CPU part"])
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


# The machine's fingerprint: what must stay the same for a measurement to remain valid.


_GIB = 2**30


def fingerprint(probe: Probe, host: Host, gpu: Gpu | None, data: DataRef, *, ranks: int = 1) -> Fingerprint:
    """Return what must stay the same for a measurement to remain valid.

    Name and memory of the card come from torch (`probe`), which sees the MIG instance or restricted view that is used
    for training and answers even when NVML does not. `gpu` adds what only NVML knows; it is ignored if the probe ran
    on the CPU. Memory is rounded (to 1 GiB, /dev/shm to 0.1 GiB) because the amount that the kernel reserves varies
    slightly on one machine.
    """
    on_cuda = probe.device.startswith("cuda")
    card = gpu if on_cuda else None
    return Fingerprint(
        values={
            "gpu_model": probe.device_name if on_cuda else None,
            "gpu_memory_bytes": probe.device_memory_bytes if on_cuda else None,
            "power_limit_w": card.power_limit_w if card else None,
            "mig": card.mig_in_force if card else None,
            "driver": card.driver_version if card else None,
            "torch": probe.torch_version,
            "cuda": probe.cuda_version,
            "cudnn": probe.cudnn_version,
            "cpu_model": host.cpu_model,
            "cores": host.cores,
            "memory_gib": round(host.memory_bytes / _GIB),
            "shm_gib": round(host.shm_bytes / _GIB, 1),
            "worker_start_method": probe.worker_start_method,
            "workload_sha256": probe.workload_sha256,
            "data_kind": data.kind,
            "data_identity": data.identity,
            **({} if ranks == 1 else {"ranks": ranks}),
            **({} if data.store is None else {"data_store": data.store.words}),
        },
        device_uuid=(card.uuid if card else probe.device_uuid) if on_cuda else None,
    )


# Which CUDA torch was built with, and which CUDA NVIDIA's driver runs. Imports no torch.


@dataclass(frozen=True)
class Cuda:
    """Versions of CUDA for which wheels of torch support the same cards, from ``major.minor`` up.

    Attributes:
        driver: the oldest driver, by its major version. It runs all minor versions of this major one.
        oldest, newest: cards, by their compute capability; the newest is ``None`` if it is the newest there is.
        wheels: wheels of torch for these versions, by the names of their indexes.
    """

    major: int
    minor: int
    driver: int
    oldest: tuple[int, int]
    newest: tuple[int, int] | None
    wheels: str

    def supports(self, card: tuple[int, int] | None) -> bool:
        """Return whether the wheels have kernels for a card; for one that is not known they have."""
        return card is None or (self.oldest <= card and (self.newest is None or card <= self.newest))


#: The newest first. Drivers: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
#: Cards: TORCH_CUDA_ARCH_LIST in https://github.com/pytorch/pytorch/blob/main/.ci/manywheel/build_cuda.sh
#: Wheels: https://github.com/pytorch/pytorch/blob/main/RELEASE.md
VERSIONS = (
    Cuda(13, 0, 580, (7, 5), None, "cu132 or cu130"),
    # Of those for 12.8, some also have kernels for Volta (7.0), those of torch 2.8 to 2.10.
    Cuda(12, 8, 525, (7, 5), None, "cu128 up to torch 2.11"),
    Cuda(12, 0, 525, (5, 0), (9, 0), "cu126 up to torch 2.14"),
    Cuda(11, 0, 450, (3, 7), (9, 0), "cu118 up to torch 2.7"),
)


def torch_versions() -> tuple[str | None, str | None]:
    """Return the versions of the installed torch and of the CUDA it was built with, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None, None
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
    return version[1] if version else None, cuda[1] if cuda else None


def trouble(
    cuda: str | None, driver: str, card: tuple[int, int] | None = None, *, library: tuple[int, int] | None = None
) -> str | None:
    """Return why torch cannot use a card with this driver, and what to install, in two sentences; ``None`` if it can.

    Args:
        cuda: the version that torch was built with; ``None``: torch was built without CUDA.
        driver: the driver's version, such as ``580.95.05``.
        card: its compute capability, if known, and if torch is one of PyTorch's own wheels.
        library: the version of CUDA that the library runs which torch will load (``libcuda``), if known. In containers
            it may be another than the driver outside comes with (NVIDIA's package cuda-compat).
    """
    found = fitting(driver, card, library)
    major = found[0].major if found else None
    fits = f"a torch wheel for CUDA {major} ({', or '.join(v.wheels for v in reversed(found))})" if found else None
    fits = fits or "no torch wheel"
    if cuda is None:
        return f"torch was built without CUDA. This driver runs {fits}."
    built = _of(cuda)
    if built is None:
        return None
    if not built.supports(card):
        assert card is not None
        return f"CUDA {cuda} has no kernels for compute capability {card[0]}.{card[1]}. This card runs {fits}."
    if library is not None and library[0] < built.major and _runs(driver, built, None):
        own = f"The CUDA library that is found here is for CUDA {library[0]}.{library[1]}, older than the driver"
        return f"CUDA {cuda} needs a newer one. {own}: look for an old cuda-compat in LD_LIBRARY_PATH."
    if _runs(driver, built, library) is False:
        return f"CUDA {cuda} needs driver {built.driver} or newer. Update the driver; this one runs {fits}."
    return None


def fitting(driver: str, card: tuple[int, int] | None, library: tuple[int, int] | None = None) -> list[Cuda]:
    """Return the versions of the newest CUDA that a driver (``580.95.05``) runs on a card; see `trouble`."""
    found = [v for v in VERSIONS if _runs(driver, v, library) and v.supports(card)]
    return [v for v in found if v.major == found[0].major]


def _of(cuda: str) -> Cuda | None:
    numbers = [int(part) for part in cuda.split(".")[:2] if part.isdigit()]
    major, minor = (*numbers, 0, 0)[:2]
    return next((v for v in VERSIONS if v.major == major and v.minor <= minor), None)


def _runs(driver: str, version: Cuda, library: tuple[int, int] | None) -> bool | None:
    """Return whether a driver runs a version; ``None`` if that is not known."""
    if library is not None:
        return library[0] >= version.major
    major = driver.partition(".")[0]
    return int(major) >= version.driver if major.isdigit() else None


# What torch.compile needs on a machine besides PyTorch: a compiler, and Python's header files. Starts no process.


_HEADER = "Python.h"
#: Lists of folders in which gcc and clang look for header files.
_SEARCHED = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")


@dataclass(frozen=True)
class Lack:
    """Something that is not there.

    Attributes:
        what: a clause that names it. advice: what to install, as a sentence's end.
    """

    what: str
    advice: str


def cxx_compiler(env: Mapping[str, str]) -> str | None:
    """Return the path of the C++ compiler that Inductor uses for the CPU; ``None`` if there is none."""
    # Inductor looks for these two and no other.
    return shutil.which(_program(env.get("CXX")) or "g++", path=env.get("PATH"))


def c_compiler(env: Mapping[str, str]) -> str | None:
    """Return the path of the C compiler with which Triton builds its launcher; ``None`` if there is none."""
    stated = _program(env.get("CC"))
    names = (stated,) if stated else ("gcc", "clang")
    return next((path for name in names if (path := shutil.which(name, path=env.get("PATH")))), None)


def python_header(env: Mapping[str, str]) -> Path | None:
    """Return the path of ``Python.h``, which both compilers need; ``None`` if there is none."""
    searched = [folder for name in _SEARCHED for folder in env.get(name, "").split(os.pathsep) if folder]
    for folder in (*_include_folders(), *searched):
        header = Path(folder, _HEADER)
        if header.is_file():
            return header
    return None


def no_python_header() -> Lack:
    """Return the lack of ``Python.h``, with the place where it should be."""
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    advice = f"install Python's header files (Debian: apt install {package})."
    return Lack(f"{_HEADER} is not in {_include_folders()[0]}", advice)


NO_C_COMPILER = Lack("there is no C compiler for Triton", "install gcc (Debian: apt install gcc) or set CC.")
NO_CXX_COMPILER = Lack("there is no C++ compiler for Inductor", "install g++ (Debian: apt install g++) or set CXX.")


def _program(stated: str | None) -> str | None:
    """Return the program of a command line such as ``ccache g++``."""
    try:
        return next(iter(shlex.split(stated or "")), None)
    except ValueError:  # quotes that are not closed
        return stated


def _include_folders() -> tuple[str, ...]:
    # Debian's own scheme adds "local", where the headers are not.
    return sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix")
