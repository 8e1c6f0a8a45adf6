"""Device memory of one launch: capacity and peak use.

On a CPU, device memory is the growth of this process's resident memory, whose peak the kernel records. Loader workers
are separate processes and do not count.
"""

from __future__ import annotations

import torch

from autotune.machine import system
from autotune.machine.host import read_host


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
