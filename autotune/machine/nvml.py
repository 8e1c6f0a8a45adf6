"""The library of NVIDIA's driver, NVML: opened for each query, and kept open between queries by those who ask often.

Without persistence mode, the driver takes seconds to wake the cards each time that the first of its users comes.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

try:
    import pynvml
except ImportError:
    pynvml = None

__all__ = [
    "cuda_version",
    "has_nvidia_card",
    "has_nvidia_driver",
    "is_split",
    "keep_open",
    "kept_open",
    "known",
    "memory",
    "old_uuid",
    "opened",
    "processes",
    "profile",
    "pynvml",
    "serves_several",
    "whole",
]

_T = TypeVar("_T")
#: CUDA's Multi-Process Service computes for all its clients in this process, which stays on the card after them.
_MPS_SERVER = "nvidia-cuda-mps-server"
#: PCI's number of NVIDIA, and the beginning of the class of display controllers (/usr/share/misc/pci.ids).
_VENDOR, _DISPLAY = "0x10de", "0x03"


class _Kept:
    """Whether NVML is to be kept open between queries, and whether it is.

    Attributes:
        wanted_by: how many blocks and processes ask for it.
        is_open: NVML, which counts its users, counts one for this object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wanted_by = 0
        self.is_open = False

    def want(self, count: int) -> None:
        with self._lock:
            self.wanted_by += count
        if not self.wanted_by:
            self.close()

    def open(self) -> None:
        with self._lock:
            if self.wanted_by and not self.is_open:
                pynvml.nvmlInit()
                self.is_open = True

    def close(self) -> None:
        with self._lock:
            if self.is_open:
                self.is_open = False
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()


_kept = _Kept()
# The driver knows a connection by the process that opened it, so none is open while this process forks. What is started
# by `subprocess` inherits nothing, and does not come here.
os.register_at_fork(before=_kept.close)


def keep_open() -> None:
    """Keep NVML open between queries, until this process ends."""
    _kept.want(+1)


@contextlib.contextmanager
def kept_open() -> Iterator[None]:
    """Keep NVML open between the queries of this block, from the first of them on."""
    _kept.want(+1)
    try:
        yield
    finally:
        _kept.want(-1)


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Open NVML for a query. If the query fails, NVML is closed altogether, and the next one meets a recovered driver.

    Raises:
        pynvml.NVMLError: there is no driver, or it does not answer.
    """
    try:
        pynvml.nvmlInit()
        try:
            _kept.open()
            yield
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        _kept.close()
        raise


def known(ask: Callable[[], _T]) -> _T | None:
    """Return the answer, or ``None`` if the card, the driver or this version of the library has none."""
    try:
        return ask()
    except (pynvml.NVMLError, AttributeError):
        return None
    except Exception as error:
        # Raised where the driver lacks a newer form of a function; it is no NVMLError, and old versions do not know it.
        if type(error).__name__ == "NVMLLibraryMismatchError":
            return None
        raise


def memory(handle: Any) -> Any:
    """Return the memory of a card or instance (``total`` and ``used``, in bytes); ``None`` if the driver does not tell.

    The first version of this query counts the driver's reserve as used. It is asked only where the second is not known.
    """
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value not in {
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_INVALID_ARGUMENT,
            pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        }:
            return None
    return known(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))


def processes(handle: Any) -> tuple[int, ...] | None:
    """Return the pids of a card's compute processes, without the MPS server; ``None`` if unknown."""
    pids = _pids(handle)
    return None if pids is None else tuple(pid for pid in pids if not _is_mps_server(pid))


def serves_several(handle: Any) -> bool:
    """Return whether the MPS server computes on a card for other processes, as far as it is visible."""
    return any(_is_mps_server(pid) for pid in _pids(handle) or ())


def _pids(handle: Any) -> tuple[int, ...] | None:
    running = known(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return None if running is None else tuple(int(process.pid) for process in running)


def _is_mps_server(pid: int) -> bool:
    """Return whether a process is the MPS server, as far as its name is known here, which it is not in a container."""
    try:
        name = known(lambda: pynvml.nvmlSystemGetProcessName(pid)) or ""
    except UnicodeDecodeError:
        return False
    return str(name).partition(" ")[0].endswith(_MPS_SERVER)


def cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver's library here supports, such as (13, 2); ``None`` if unknown.

    In containers that library may be newer than the driver's kernel module, whose version NVML reports.
    """
    if pynvml is None:
        return None
    with contextlib.suppress(pynvml.NVMLError), opened():
        version = known(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return None if version is None else (version // 1000, version % 1000 // 10)
    return None


def is_split(handle: Any) -> bool:
    """Return whether a card is split into MIG instances.

    Raises:
        pynvml.NVMLError: the driver does not answer.
    """
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError as error:
        # Cards and drivers without MIG report it in one of these ways; any other error is raised.
        if error.value in {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}:
            return False
        raise
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def whole(device: Any) -> Any:
    """Return the card of a MIG instance, or the card itself."""
    return known(lambda: pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)) or device


def profile(instance: Any) -> str:
    """Return the profile of a MIG instance, the end of its name: ``NVIDIA H200 MIG 1g.18gb``."""
    match = re.search(r"MIG (\S+)$", known(lambda: pynvml.nvmlDeviceGetName(instance)) or "")
    if match:
        return match[1]
    parts = known(lambda: pynvml.nvmlDeviceGetAttributes_v2(instance))
    return "unknown" if parts is None else f"{parts.gpuInstanceSliceCount}g of {parts.memorySizeMB} MiB"


def old_uuid(card_uuid: str, instance: Any) -> str | None:
    """Return the name of a MIG instance for drivers before R470; ``None`` if the driver does not report it."""
    gpu = known(lambda: pynvml.nvmlDeviceGetGpuInstanceId(instance))
    compute = known(lambda: pynvml.nvmlDeviceGetComputeInstanceId(instance))
    return None if gpu is None or compute is None else f"MIG-{card_uuid}/{gpu}/{compute}"


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    """Return whether NVIDIA's driver is loaded, or a card's device file exists, regardless of the libraries.

    Ask NVML first, which knows better. Under WSL2 the driver is that of Windows: Linux sees one device file for the
    cards of all vendors, and CUDA's library in the folder that Windows fills, if NVIDIA's driver is installed.
    """
    if (root / "proc/driver/nvidia").exists() or any(root.glob("dev/nvidia[0-9]*")):
        return True
    return (root / "dev/dxg").exists() and any(root.glob("usr/lib/wsl/lib/libcuda.so*"))


def has_nvidia_card(root: Path = Path("/")) -> bool:
    """Return whether the PCI bus has an NVIDIA display controller, with or without a driver."""
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError):
            kind = vendor.with_name("class").read_text()
            if vendor.read_text().strip() == _VENDOR and kind.startswith(_DISPLAY):
                return True
    return False
