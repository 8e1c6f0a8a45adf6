"""The state of the NVIDIA cards, from the driver's management library (NVML), and the machine's fingerprint.

Three cases are distinguished, because a search must never fall back to the CPU by mistake: a list of cards (possibly
empty), no driver, and a driver that does not answer. Within a card, ``None`` means unknown, never zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from autotune.records import DataRef, Fingerprint, Host, Probe

try:
    import pynvml
except ImportError:
    pynvml = None

_T = TypeVar("_T")
_GIB = 2**30

#: NVML's bits for clocks held down by something other than the load itself, most specific first (nvml.h,
#: nvmlClocksEventReasons). The power cap is not included: a card under load runs at it normally.
SLOWDOWNS = {
    0x40: "HW thermal slowdown",
    0x80: "HW power brake",
    0x20: "SW thermal slowdown",
    0x08: "HW slowdown",
}


@dataclass(frozen=True)
class Gpu:
    """One card as reported by NVML. ``None`` means that the driver does not tell, never "none".

    Attributes:
        index: NVML's number, in PCI order; CUDA may number cards differently, so address them by ``uuid``.
        memory_bytes, memory_used_bytes: of the whole card, all processes; ``None`` where CPU and GPU share memory.
        utilization_percent: share of the last sampling period in which a kernel ran.
        power_limit_w: the limit currently enforced.
        mig: the card is split into MIG instances.
        processes: pids of compute processes as the host numbers them (wrong inside containers).
        clocks_event_reasons: NVML's bit mask of what holds the clocks down.
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
    """Return the cards that CUDA shows under ``CUDA_VISIBLE_DEVICES``, in its order; all cards if it is not set.

    CUDA stops reading the variable at the first entry that matches no card.
    """
    if variable is None:
        return cards
    found: list[Gpu] = []
    for entry in (part.strip() for part in variable.split(",")):
        card = next((c for c in cards if entry == str(c.index) or (entry and c.uuid.startswith(entry))), None)
        if card is None:
            break
        found.append(card)
    return found


def has_nvidia_device(*, dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> bool:
    """Return whether the kernel has an NVIDIA driver loaded or a card's device file, regardless of the libraries."""
    return (proc / "driver" / "nvidia").exists() or any(dev.glob("nvidia[0-9]*"))


def gpus() -> list[Gpu] | NvmlUnavailable:
    """Return the cards this process may see, in NVML's order; an empty list if the driver has none.

    Opens and closes NVML on each call, so that a recovered driver is noticed and no handle crosses a fork. Never
    initializes CUDA, so it occupies no card.
    """
    if pynvml is None:
        return NvmlUnavailable(
            "the package nvidia-ml-py is not installed, so the driver cannot be asked.", has_nvidia_device()
        )
    try:
        with _nvml():
            return _cards()
    except pynvml.NVMLError as error:
        return _unavailable(error)


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _unavailable(error: Any) -> NvmlUnavailable:
    absent = {pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    if error.value in absent and not has_nvidia_device():
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
            cards.append(_card(index, handle, driver))
    if refused is not None and not cards:
        raise refused
    return cards


def _card(index: int, handle: Any, driver: str) -> Gpu:
    memory = _known(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    utilization = _known(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    power_mw = _known(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    processes = _known(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        driver_version=driver,
        mig=_mig(handle),
        memory_bytes=None if memory is None else int(memory.total),
        memory_used_bytes=None if memory is None else int(memory.used),
        utilization_percent=None if utilization is None else int(utilization.gpu),
        power_limit_w=None if power_mw is None else power_mw / 1000,
        processes=None if processes is None else tuple(int(process.pid) for process in processes),
        clocks_event_reasons=_clocks_event_reasons(handle),
        temperature_c=_temperature_c(handle),
    )


def _clocks_event_reasons(handle: Any) -> int | None:
    reasons = _known(lambda: int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    if reasons is None:
        # Older versions of the library use this name.
        reasons = _known(lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    return reasons


def _temperature_c(handle: Any) -> int | None:
    return _known(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)))


def _known(ask: Callable[[], _T]) -> _T | None:
    """Return the answer, or ``None`` if the card, the driver or this version of the library has none."""
    try:
        return ask()
    except (pynvml.NVMLError, AttributeError):
        return None


def _mig(handle: Any) -> bool:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError as error:
        # Cards and drivers without MIG report it in one of these ways; any other error is raised.
        if error.value in {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}:
            return False
        raise
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


@dataclass(frozen=True)
class CardReading:
    """The state of one card at one moment. ``None`` means unknown.

    Attributes:
        processes: pids of compute processes as the host numbers them (wrong inside containers).
        power_w: averaged over the driver's own sampling period.
        clocks_event_reasons: NVML's bit mask of what holds the clocks down.
        energy_j: energy used since the driver was loaded; only differences are meaningful.
    """

    processes: tuple[int, ...] | None = None
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

    def read(self) -> CardReading:
        """Read the card's state. Never raises for the driver's answers, and never initializes CUDA."""
        handle = self._found()
        if handle is None:
            return CardReading()
        power_mw = _known(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
        return CardReading(
            processes=self.processes(),
            sm_clock_mhz=_known(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))),
            memory_clock_mhz=_known(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM))),
            temperature_c=_temperature_c(handle),
            power_w=None if power_mw is None else power_mw / 1000,
            clocks_event_reasons=_clocks_event_reasons(handle),
            energy_j=self.energy_j(),
        )

    def processes(self) -> tuple[int, ...] | None:
        """Return the pids of the compute processes on the card, as the host numbers them; ``None`` if unknown."""
        handle = self._found()
        found = None if handle is None else _known(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return None if found is None else tuple(int(process.pid) for process in found)

    def energy_j(self) -> float | None:
        """Return the energy used since the driver was loaded; only differences are meaningful."""
        handle = self._found()
        found = None if handle is None else _known(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return None if found is None else found / 1000

    def sm_clock_mhz(self) -> int | None:
        """Return the clock of the card's multiprocessors now; ``None`` if unknown."""
        handle = self._found()
        return (
            None if handle is None else _known(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)))
        )

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


def fingerprint(probe: Probe, host: Host, gpu: Gpu | None, data: DataRef) -> Fingerprint:
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
            "mig": card.mig if card else None,
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
        },
        device_uuid=(probe.device_uuid or (card.uuid if card else None)) if on_cuda else None,
    )
