"""What the NVIDIA cards are doing now, through the driver's management library (NVML), and the fingerprint.

Three answers are kept apart, because a search must never fall back to the CPU by mistake: cards (possibly
none), no driver at all, and a driver that does not answer. Within a card, ``None`` means unknown, never zero.
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

#: NVML's bits for clocks held down by something that is not the load itself, the most telling first (nvml.h,
#: nvmlClocksEventReasons). A power cap is not among them: under load it is a card's normal life.
SLOWDOWNS = {
    0x40: "HW thermal slowdown",
    0x80: "HW power brake",
    0x20: "SW thermal slowdown",
    0x08: "HW slowdown",
}


@dataclass(frozen=True)
class Gpu:
    """One card as NVML sees it. ``None`` is "the driver does not tell", never "none".

    Attributes:
        index: NVML's number, in PCI order; CUDA may count otherwise, so address cards by ``uuid``.
        memory_bytes, memory_used_bytes: of the whole card, all processes; ``None`` where CPU and GPU share memory.
        utilization_percent: share of the last sampling period in which a kernel ran.
        power_limit_w: the limit enforced now.
        mig: the card is split into instances.
        processes: pids of compute processes, as the driver's host numbers them (wrong inside containers).
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
    """Nothing is known about cards.

    Attributes:
        reason: one sentence.
        driver_present: False: this machine runs no NVIDIA driver, so the CPU is the device. True: there is a driver
            and it does not answer; it may do so later, and it may have cards.
    """

    reason: str
    driver_present: bool


def visible(cards: list[Gpu], variable: str | None) -> list[Gpu]:
    """The cards that CUDA shows under ``CUDA_VISIBLE_DEVICES``, in its order; all of them where it is not set.

    CUDA stops reading the variable at the first entry that names nothing.
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
    """Whether the kernel has an NVIDIA driver loaded or a card's device file, whatever the libraries say."""
    return (proc / "driver" / "nvidia").exists() or any(dev.glob("nvidia[0-9]*"))


def gpus() -> list[Gpu] | NvmlUnavailable:
    """The cards this process may see, in NVML's order; an empty list from a driver that has none.

    Opens and closes NVML each time: a driver that comes back is seen, and no handle crosses a fork. Never
    initialises CUDA, so it does not occupy a card.
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
            # A scheduler gave this card to somebody else.
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
        # The older name of the same call.
        reasons = _known(lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    return reasons


def _temperature_c(handle: Any) -> int | None:
    return _known(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)))


def _known(ask: Callable[[], _T]) -> _T | None:
    """The answer, or ``None`` where the card, the driver or this version of the library has none."""
    try:
        return ask()
    except (pynvml.NVMLError, AttributeError):
        return None


def _mig(handle: Any) -> bool:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError as error:
        # Cards and drivers that know no MIG say so in one of these ways; anything else is not an answer.
        if error.value in {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}:
            return False
        raise
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


@dataclass(frozen=True)
class CardReading:
    """What one card does at a moment. ``None`` is unknown.

    Attributes:
        processes: pids of compute processes, as the driver's host numbers them (wrong inside containers).
        power_w: averaged over the driver's own sampling period.
        clocks_event_reasons: NVML's bit mask of what holds the clocks down.
        energy_j: used since the driver was loaded; only differences mean anything.
    """

    processes: tuple[int, ...] | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    clocks_event_reasons: int | None = None
    energy_j: float | None = None


class CardWatch:
    """One card, looked at again and again with NVML kept open. For one process: a handle does not cross a fork.

    A driver that does not answer now is asked again at the next reading; until it does, everything is unknown.

    Args:
        uuid: as the driver spells it, of a card or of a MIG instance.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._open = False
        self._handle: Any = None

    def read(self) -> CardReading:
        """What the card does now. Never raises for what the driver answers, and never wakes CUDA."""
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
        """Pids of the compute processes on the card, as the driver's host numbers them; ``None`` is unknown."""
        handle = self._found()
        found = None if handle is None else _known(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return None if found is None else tuple(int(process.pid) for process in found)

    def energy_j(self) -> float | None:
        """Used since the driver was loaded; only differences mean anything."""
        handle = self._found()
        found = None if handle is None else _known(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return None if found is None else found / 1000

    def close(self) -> None:
        """Let go of NVML. May be called twice."""
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
    """What must stay the same for a measurement to hold.

    Name and memory of the card come from torch (`probe`): it sees the MIG instance or the limited view
    that is trained on, and it answers even while NVML does not. `gpu` adds what only NVML knows, and is left
    aside when the probe ran on the CPU. Memory is rounded (to 1 GiB, /dev/shm to 0.1 GiB), because kernels of
    the same machine reserve a little more or less.
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
