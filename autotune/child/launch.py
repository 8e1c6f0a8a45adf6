"""What all kinds of launch share: the workload, the device and its memory, and progress reports."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import Dataset

from autotune.base.clock import Clock
from autotune.base.errors import MachineError
from autotune.base.records import Beat, Config, Phase, TrialSpec
from autotune.machine import system
from autotune.machine.gpu import NvmlUnavailable, cuda_version, gpus
from autotune.machine.host import read_host, trouble
from autotune.training.feed import Collate, SampleOrder
from autotune.training.process_settings import process
from autotune.training.step import Wrap, open_loader, workload_knobs
from autotune.workload import contract
from autotune.workload.contract import Context

#: Minimum seconds between beats. Steps can be much faster than anyone reads.
MIN_GAP_S = 0.1


class Beats:
    """Reports progress to the launcher, one JSON line per beat, and keeps the seconds spent in each phase.

    Args:
        descriptor: the write end of the launcher's pipe. If the launcher is gone, a broken pipe is ignored. If it is
            stopped, a full pipe drops beats instead of holding up the training.

    Attributes:
        clock: that of the launch. began: its reading at the start of the launch, from which start-up time is counted.
    """

    def __init__(self, descriptor: int, clock: Clock) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self.clock = clock
        self.began = self._phase_began = clock.now()
        self._last = float("-inf")
        self.phase: Phase | None = None
        self.phase_s: dict[str, float] = {}
        #: Returns the peak memory to report in each beat; set once the device is known.
        self.memory_bytes: Callable[[], int | None] = lambda: None
        #: Returns the number of samples that the launch's loaders have drawn; set once there is a workload.
        self.samples_drawn: Callable[[], int | None] = lambda: None
        #: Why the last window does not count; ``None`` if it does.
        self.disturbed: str | None = None
        #: The entrant whose turn it is; ``None`` if there are no turns.
        self.whose: int | None = None

    def enter(self, phase: Phase) -> None:
        """Start a phase, ending the previous one."""
        self.close()
        self.phase = phase
        self._phase_began = self.clock.now()
        self._write(Beat(phase=phase))

    def step(self, number: int, *, rate_per_s: float | None = None, loss: float | None = None) -> None:
        """Report that a step of the current phase has finished."""
        if self.phase is not None and self.clock.now() - self._last >= MIN_GAP_S:
            self._write(
                Beat(phase=self.phase, step=number, rate_per_s=rate_per_s, loss=loss, memory_bytes=self.memory_bytes())
            )

    def turn(self, number: int) -> None:
        """Report that an entrant's turn begins, at once: whatever ends the process from here on is charged to it."""
        if self.phase is not None and number != self.whose:
            self.whose = number
            self._write(Beat(phase=self.phase))

    def processes(self, pids: Iterable[int]) -> None:
        """Report processes of the launch that do not report themselves (`system.report_processes`), so that what they
        leave in shared memory is removed."""
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._descriptor, b"".join(b'{"forked": %d}\n' % pid for pid in pids))

    def close(self) -> None:
        """End the current phase and add its duration to `phase_s`."""
        if self.phase is not None:
            spent = self.clock.now() - self._phase_began
            self.phase_s[self.phase.value] = self.phase_s.get(self.phase.value, 0.0) + spent
            self.phase = None

    def _write(self, beat: Beat) -> None:
        self._last = self.clock.now()
        stamped = beat.model_copy(update={"at_s": self._last, "turn": self.whose, "disturbed": self.disturbed})
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._descriptor, stamped.model_dump_json(exclude_none=True).encode() + b"\n")


# Device memory of one launch: capacity and peak use.
#
# On a CPU, device memory is the growth of this process's resident memory, whose peak the kernel records. Loader workers
# are separate processes and do not count.


class DeviceMemory:
    """Counts from construction, which happens before the model is built: what the process holds already is left out.

    Args:
        limit_bytes: the user's limit; ``None`` for no limit.

    Attributes:
        capacity_bytes: memory available to this launch: what is free on the card or the machine, or the limit.
        first_step_bytes: CUDA: peak memory reserved up to the end of the first step; ``None`` before that and on a CPU.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._limit_bytes = limit_bytes
        self._total_bytes = int(torch.cuda.get_device_properties(device).total_memory) if self._cuda else 0
        self.capacity_bytes = limit_bytes or read_host().available_bytes
        if self._cuda:
            free_bytes = available_on(device)
            self.capacity_bytes = min(limit_bytes or free_bytes, free_bytes)
        self.first_step_bytes: int | None = None
        self._first_retries = 0
        self._start_bytes = system.status_bytes("VmRSS")

    def enforce(self) -> None:
        """Apply the limit: allocations beyond it fail from now on."""
        if self._limit_bytes is None:
            return
        if self._cuda:
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / self._total_bytes), self._device)
        else:
            system.limit_data(self._limit_bytes)

    def first_step_over(self) -> None:
        """CUDA: count peaks and retries from here on. Call this when the first step is finished.

        In the first step cuDNN and Inductor try kernels with workspaces that no later step needs. The allocator keeps
        that memory, so it is returned to the device; otherwise it would count as the training's own.
        """
        if not self._cuda:
            return
        self.first_step_bytes = self.peak_reserved_bytes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._first_retries = self._retries()

    def begin_turn(self) -> None:
        """Count the peak from here on, without what earlier turns of a heat have left in the allocators."""
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            system.reset_peak()

    @property
    def peak_bytes(self) -> int:
        """Peak memory use so far; on CUDA, the peak of memory allocated by tensors, since the first step."""
        if self._cuda:
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, system.status_bytes("VmHWM") - self._start_bytes)

    @property
    def peak_reserved_bytes(self) -> int | None:
        """CUDA: peak memory reserved on the card since the first step, including fragmentation; ``None`` on a CPU."""
        return int(torch.cuda.max_memory_reserved(self._device)) if self._cuda else None

    @property
    def alloc_retries(self) -> int | None:
        """CUDA: number of times the allocator had to empty its cache to continue, since the first step; ``None`` on a
        CPU."""
        return self._retries() - self._first_retries if self._cuda else None

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


def available_on(device: torch.device) -> int:
    """Return the memory of a CUDA device that this process may use, in bytes: what is free, and what it has reserved.

    The CUDA context and other processes take the rest. Initializes CUDA.
    """
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes + torch.cuda.memory_reserved(device))


#: On a CPU, a heat may take this many times the memory that one training may.
HEAT_ROOM = 2


class Launch:
    """A launch with its workload loaded. Nothing is on the device yet, and no worker has started.

    Args:
        applied: the configuration applied to the process beforehand; ``None``: the spec's configuration.

    Attributes:
        ctx: the context passed to the workload's functions.
        order: the order of the samples, for all loaders of the launch.
        memory: available after `wake`.

    Raises:
        MachineError: torch cannot use the requested device.
    """

    memory: DeviceMemory

    def __init__(self, spec: TrialSpec, beats: Beats, applied: Config | None = None) -> None:
        self.spec = spec
        self.beats = beats
        process(spec.config if applied is None else applied)
        beats.enter(Phase.LOAD)
        self.device = _device(spec)
        if self.device.index:
            # The thread that pins memory starts together with the loader's workers, on the card that is current then.
            # If that were the first card, a rank on another card would open a second context.
            torch.cuda.set_device(self.device)
        self.workload = contract.load(spec.workload)
        self.ctx = Context(
            device=str(self.device),
            batch_size=int(spec.config.get("batch_size", spec.batch_size)),
            image_size=spec.image_size,
            seed=spec.seed,
            data=spec.data,
            args=contract.args_of(self.workload, spec.workload),
            knobs=workload_knobs(self.workload, spec.config),
            rank=spec.rank,
            ranks=spec.ranks,
        )
        self.order = SampleOrder(spec.seed, spec.first_sample, rank=spec.rank, ranks=spec.ranks)
        beats.samples_drawn = lambda: self.order.drawn * spec.ranks

    def open_loader(
        self, *, data: tuple[Dataset[Any], Collate] | None = None, wrap: Wrap | None = None
    ) -> Iterable[Any]:
        """Open the loader under the spec's configuration. Its workers start with the first ``iter``.

        It begins with samples that no launch of the study has read before (see `SampleOrder`).

        Raises:
            WorkloadError: the data set does not fill one batch.
        """
        return open_loader(
            self.workload,
            self.ctx,
            self.spec.config,
            worker_start_method=self.spec.worker_start_method,
            data=data,
            order=self.order,
            seed=order_seed(self.spec),
            wrap=wrap,
        )

    def wake(self) -> None:
        """Enter the build phase: initialize the device and start counting and limiting memory."""
        self.beats.enter(Phase.BUILD)
        limit_bytes = self.spec.memory_limit_bytes
        if limit_bytes is not None and self.spec.heat is not None and self.device.type == "cpu":
            # The C library and oneDNN keep what one entrant has freed; on its own, the next entrant would not have
            # that.
            limit_bytes *= HEAT_ROOM
        self.memory = DeviceMemory(self.device, limit_bytes)
        self.memory.enforce()
        self.beats.memory_bytes = lambda: self.memory.peak_bytes


def order_seed(spec: TrialSpec) -> int:
    """Return the seed of a launch's own random numbers, from 0 to 2**63 - 1. It follows from the study's seed and the
    launch's name."""
    suffix = f"/{spec.rank}" if spec.rank else ""
    digest = hashlib.blake2b(f"{spec.seed}/{spec.launch}{suffix}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _device(spec: TrialSpec) -> torch.device:
    """Return the torch device of a launch without initializing CUDA, because loader workers are forked before that.

    If the launcher made one card the only visible one, it is ``cuda:0`` whatever its name.
    """
    name = spec.devices[spec.rank] if len(spec.devices) > 1 else spec.devices[0]
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MachineError(
            f"torch {torch.__version__} cannot use {name}",
            advice=_trouble() or "see what `autotune doctor` says of the GPU; --device cpu leaves it alone.",
        )
    renumbered = "CUDA_VISIBLE_DEVICES" in spec.env
    index = spec.rank if renumbered or ":" not in name else int(name.rsplit(":", 1)[1])
    if index >= torch.cuda.device_count():
        raise MachineError(f"there is no cuda:{index}: torch sees {torch.cuda.device_count()} device(s)")
    return torch.device("cuda", index)


def _trouble() -> str | None:
    """Return why torch cannot use the driver, and what to do, as far as their versions show."""
    cards = gpus()
    if isinstance(cards, NvmlUnavailable) or not cards:
        return None
    driver = cards[0].driver_version
    # A library that is newer than the driver works on some cards only, and here torch has just failed.
    return trouble(torch.version.cuda, driver) or trouble(torch.version.cuda, driver, library=cuda_version())
