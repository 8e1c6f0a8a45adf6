"""The state of the NVIDIA cards, from the driver's management library (NVML).

Three cases are distinguished, because a search must never fall back to the CPU by mistake: a list of cards (possibly
empty), no driver, and a driver that does not answer. Within a card, ``None`` means unknown, never zero.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

try:
    import pynvml
except ImportError:
    pynvml = None

_T = TypeVar("_T")
#: CUDA's Multi-Process Service computes for all its clients in this process, which stays on the card after them.
_MPS_SERVER = "nvidia-cuda-mps-server"
#: PCI's number of NVIDIA, and the beginning of the class of display controllers (/usr/share/misc/pci.ids).
_VENDOR, _DISPLAY = "0x10de", "0x03"
#: NVML's bits for clocks held down by something other than the load itself (nvml.h, nvmlClocksEventReasons). The power
#: cap (0x04) is not included: a card under load runs at it normally. HW slowdown (0x08) is not either: it accompanies
#: the first two of these, and alone it may mean no more than a change of the performance state.
SLOWDOWNS = {
    0x40: "HW thermal slowdown",
    0x80: "HW power brake",
    0x20: "SW thermal slowdown",
}
#: The slowdown that is some cards' normal state under load: passively cooled ones, laptops, densely packed servers.
LASTING_SLOWDOWN = 0x20


@dataclass(frozen=True)
class Gpu:
    """One card, or one MIG instance of a card, as reported by NVML. ``None`` means that the driver does not tell, never
    "none".

    Attributes:
        index: NVML's number, in PCI order; CUDA may number cards differently, so address them by ``uuid``. Of an
            instance: its number on its card.
        mig: the card is split into MIG instances.
        memory_bytes: of the whole card or instance; ``None`` where CPU and GPU share memory.
        memory_used_bytes: by all processes, without what the driver reserves for itself.
        utilization_percent: share of the last sampling period in which a kernel ran; not known of instances.
        power_limit_w: the limit currently enforced, on the whole card.
        processes: pids of compute processes as the host numbers them (wrong inside containers).
        clocks_event_reasons: NVML's bit mask of what holds the clocks down.
        compute_capability: major and minor version of what the card can compute: (9, 0).
        instances: the MIG instances of the card that this process may see.
        profile: of an instance: its size, such as ``1g.18gb``; ``None`` for a card.
        old_uuid: of an instance: ``MIG-GPU-<card>/<GPU instance>/<compute instance>``, its name before driver R470.
    """

    index: int
    uuid: str
    name: str
    driver_version: str
    mig: bool
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization_percent: int | None = None
    power_limit_w: float | None = None
    processes: tuple[int, ...] | None = None
    clocks_event_reasons: int | None = None
    temperature_c: int | None = None
    compute_capability: tuple[int, int] | None = None
    instances: tuple[Gpu, ...] = ()
    profile: str | None = None
    old_uuid: str | None = None

    @property
    def mig_in_force(self) -> str | bool:
        """Which part of the card a training here has: an instance of this profile, or all, split (True) or not."""
        return self.profile or self.mig

    def is_called(self, name: str) -> bool:
        """Return whether CUDA accepts ``name`` for this device: the beginning of a UUID, or an instance's old one."""
        return bool(name) and (self.uuid.startswith(name) or name == self.old_uuid)


@dataclass(frozen=True)
class NvmlUnavailable:
    """The cards could not be listed.

    Attributes:
        reason: one sentence.
        driver_present: False: this machine has no NVIDIA driver, so the CPU is the device. True: there is a driver that
            does not answer; it may do so later, and there may be cards.
    """

    reason: str
    driver_present: bool


def visible(cards: list[Gpu], variable: str | None) -> list[Gpu]:
    """Return the cards and MIG instances that ``CUDA_VISIBLE_DEVICES`` names, in its order; all cards if it is not set.

    CUDA stops reading the variable at the first entry that matches nothing. Of several MIG instances it shows a process
    only the first; the others can still be used, each by a process of its own.
    """
    if variable is None:
        return cards
    devices: list[Gpu] = []
    for entry in (part.strip() for part in variable.split(",")):
        # CUDA numbers only the cards that it may use; NVML, whose numbers the devices keep, also those of other jobs.
        device = cards[int(entry)] if entry.isdecimal() and int(entry) < len(cards) else None
        device = device or next((d for d in with_instances(cards) if d.is_called(entry)), None)
        if device is None:
            break
        devices.append(device)
    return devices


def with_instances(cards: list[Gpu]) -> list[Gpu]:
    """Return the cards, each followed by its MIG instances."""
    return [device for card in cards for device in (card, *card.instances)]


def gpus() -> list[Gpu] | NvmlUnavailable:
    """Return the cards this process may see, in NVML's order; an empty list if the driver has none.

    Opens and closes NVML on each call, except where `kept_open` holds it. Never initializes CUDA,
    so it occupies no card.
    """
    if pynvml is None:
        return NvmlUnavailable(
            "the package nvidia-ml-py is not installed, so the driver cannot be asked.", has_nvidia_driver()
        )
    try:
        with _opened():
            return _cards()
    except pynvml.NVMLError as error:
        return _unavailable(error)


def _unavailable(error: Any) -> NvmlUnavailable:
    absent = {pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    if error.value in absent and not has_nvidia_driver():
        return NvmlUnavailable("no NVIDIA driver on this machine.", driver_present=False)
    return NvmlUnavailable(f"there is an NVIDIA driver, and NVML fails with: {error}.", driver_present=True)


def _cards() -> list[Gpu]:
    driver = pynvml.nvmlSystemGetDriverVersion()
    count = pynvml.nvmlDeviceGetCount()
    cards: list[Gpu] = []
    refused: Any = None
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NO_PERMISSION:
                raise
            # A scheduler assigned this card to someone else.
            refused = error
        else:
            card = _device(index, handle, driver)
            if _is_split(handle):
                card = replace(card, mig=True, instances=tuple(_instances(card, handle)))
            cards.append(card)
    if refused is not None and not cards:
        raise refused
    return cards


def _instances(card: Gpu, handle: Any) -> Iterator[Gpu]:
    """Yield the MIG instances of a card; those assigned to others are left out, as their cards are."""
    for index in range(_known(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError as error:
            if error.value not in {pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION}:
                raise
            continue
        yield replace(
            _device(index, instance, card.driver_version),
            # The driver reports these only for whole cards.
            power_limit_w=card.power_limit_w,
            clocks_event_reasons=card.clocks_event_reasons,
            temperature_c=card.temperature_c,
            compute_capability=card.compute_capability,
            profile=_profile(instance),
            old_uuid=_old_uuid(card.uuid, instance),
        )


def _device(index: int, handle: Any, driver: str) -> Gpu:
    """Return a card or an instance by its own handle."""
    memory = _memory(handle)
    utilization = _known(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    power_mw = _known(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    capability = _known(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        driver_version=driver,
        mig=False,
        memory_bytes=None if memory is None else int(memory.total),
        memory_used_bytes=None if memory is None else int(memory.used),
        utilization_percent=None if utilization is None else int(utilization.gpu),
        power_limit_w=None if power_mw is None else power_mw / 1000,
        processes=_processes(handle),
        clocks_event_reasons=_clocks_event_reasons(handle),
        temperature_c=_temperature_c(handle),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
    )


def _clocks_event_reasons(handle: Any) -> int | None:
    reasons = _known(lambda: int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    if reasons is None:
        # Older versions of the library use this name.
        reasons = _known(lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    return reasons


def _temperature_c(handle: Any) -> int | None:
    return _known(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)))


@dataclass(frozen=True)
class CardReading:
    """The state of one card at one moment. ``None`` means unknown.

    Attributes:
        processes: pids of compute processes as the host numbers them (wrong inside containers).
        sm_percent: by pid, the time in which a process used the SMs since the last reading; empty if none did. Some
            drivers number these pids differently from `processes`.
        power_w: averaged over the driver's own sampling period; unknown of a MIG instance, of which no driver tells it.
        clocks_event_reasons: NVML's bit mask of what holds the clocks down.
        energy_j: energy used since the driver was loaded; only differences are meaningful.
    """

    processes: tuple[int, ...] | None = None
    sm_percent: dict[int, int] | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    clocks_event_reasons: int | None = None
    energy_j: float | None = None


class CardWatch:
    """Reads one card repeatedly with NVML kept open. For use in one process: a handle does not cross a fork.

    If the driver does not answer, everything is unknown; it is asked again at the next reading.

    Args:
        uuid: of a card or MIG instance, as the driver spells it.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._open = False
        self._handle: Any = None
        self._sampled_until = 0

    def read(self) -> CardReading:
        """Read the card's state. Never raises for the driver's answers, and never initializes CUDA."""
        own = self._found()
        if own is None:
            return CardReading()
        # An instance has no clocks or temperature of its own. Its card's power is drawn by other instances as well.
        handle = _whole(own)
        power_mw = _known(lambda: pynvml.nvmlDeviceGetPowerUsage(handle)) if handle is own else None
        return CardReading(
            processes=self.processes(),
            sm_percent=self.sm_percent(),
            sm_clock_mhz=self.sm_clock_mhz(),
            memory_clock_mhz=_known(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM))),
            temperature_c=_temperature_c(handle),
            power_w=None if power_mw is None else power_mw / 1000,
            clocks_event_reasons=self.clocks_event_reasons(),
            energy_j=self.energy_j(),
        )

    def processes(self) -> tuple[int, ...] | None:
        """Return the pids of the compute processes on the card, as the host numbers them; ``None`` if unknown."""
        handle = self._found()
        return None if handle is None else _processes(handle)

    def sm_percent(self) -> dict[int, int] | None:
        """Return by pid how much of the time since the last call each process used the SMs; ``None`` if unknown, as it
        is where MPS's server computes for several processes."""
        handle = self._found()
        if handle is None or any(map(_is_mps_server, _pids(handle) or ())):
            return None
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, self._sampled_until)
        except pynvml.NVMLError as error:
            return {} if error.value == pynvml.NVML_ERROR_NOT_FOUND else None
        except AttributeError:
            return None
        # Some drivers fill the rest of the buffer with old samples, or with zeros and absurd figures.
        valid = [s for s in samples if s.pid and s.smUtil <= 100 and s.timeStamp > self._sampled_until]
        self._sampled_until = max((int(s.timeStamp) for s in valid), default=self._sampled_until)
        return {int(s.pid): int(s.smUtil) for s in sorted(valid, key=lambda s: int(s.timeStamp))}

    def energy_j(self) -> float | None:
        """Return the energy used since the driver was loaded; only differences are meaningful."""
        handle = self._found()
        energy_mj = None if handle is None else _known(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return None if energy_mj is None else energy_mj / 1000

    def sm_clock_mhz(self) -> int | None:
        """Return the clock of the card's multiprocessors now; ``None`` if unknown."""
        handle = self._found()
        if handle is None:
            return None
        # An instance has no clocks of its own.
        card = _whole(handle)
        return _known(lambda: int(pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM)))

    def clocks_event_reasons(self) -> int | None:
        """Return NVML's bit mask of what holds the clocks down now; ``None`` if unknown."""
        handle = self._found()
        return None if handle is None else _clocks_event_reasons(_whole(handle))

    def close(self) -> None:
        """Shut NVML down. May be called twice."""
        if self._open:
            self._open, self._handle = False, None
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _found(self) -> Any:
        if pynvml is None:
            return None
        with contextlib.suppress(pynvml.NVMLError):
            if not self._open:
                pynvml.nvmlInit()
                self._open = True
            if self._handle is None:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        return self._handle


# NVML itself: opened for each query, and kept open between queries by those who ask often.
#
# Without persistence mode, the driver takes seconds to wake the cards each time that the first of its users comes.


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
def _opened() -> Iterator[None]:
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


def _known(ask: Callable[[], _T]) -> _T | None:
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


def _memory(handle: Any) -> Any:
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
    return _known(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))


def _processes(handle: Any) -> tuple[int, ...] | None:
    """Return the pids of a card's compute processes, without the MPS server; ``None`` if unknown."""
    pids = _pids(handle)
    return None if pids is None else tuple(pid for pid in pids if not _is_mps_server(pid))


def _pids(handle: Any) -> tuple[int, ...] | None:
    running = _known(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return None if running is None else tuple(int(process.pid) for process in running)


def _is_mps_server(pid: int) -> bool:
    """Return whether a process is the MPS server, as far as its name is known here, which it is not in a container."""
    try:
        name = _known(lambda: pynvml.nvmlSystemGetProcessName(pid)) or ""
    except UnicodeDecodeError:
        return False
    return str(name).partition(" ")[0].endswith(_MPS_SERVER)


def cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver's library here supports, such as (13, 2); ``None`` if unknown.

    In containers that library may be newer than the driver's kernel module, whose version NVML reports.
    """
    if pynvml is None:
        return None
    with contextlib.suppress(pynvml.NVMLError), _opened():
        version = _known(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return None if version is None else (version // 1000, version % 1000 // 10)
    return None


def _is_split(handle: Any) -> bool:
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


def _whole(device: Any) -> Any:
    """Return the card of a MIG instance, or the card itself."""
    return _known(lambda: pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)) or device


def _profile(instance: Any) -> str:
    """Return the profile of a MIG instance, the end of its name: ``NVIDIA H200 MIG 1g.18gb``."""
    match = re.search(r"MIG (\S+)$", _known(lambda: pynvml.nvmlDeviceGetName(instance)) or "")
    if match:
        return match[1]
    parts = _known(lambda: pynvml.nvmlDeviceGetAttributes_v2(instance))
    return "unknown" if parts is None else f"{parts.gpuInstanceSliceCount}g of {parts.memorySizeMB} MiB"


def _old_uuid(card_uuid: str, instance: Any) -> str | None:
    """Return the name of a MIG instance for drivers before R470; ``None`` if the driver does not report it."""
    gpu = _known(lambda: pynvml.nvmlDeviceGetGpuInstanceId(instance))
    compute = _known(lambda: pynvml.nvmlDeviceGetComputeInstanceId(instance))
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
