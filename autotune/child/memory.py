"""Device memory of one launch: capacity and peak use.

On a CPU, device memory is the growth of this process's resident memory, whose peak the kernel records. Loader workers
are separate processes and do not count.
"""

from __future__ import annotations

import torch

from autotune.child import system
from autotune.machine.host import read_host


class DeviceMemory:
    """Counts from construction, which happens before the model is built: what the process holds already is left out.

    Args:
        limit_bytes: the user's limit; ``None`` for no limit.

    Attributes:
        capacity_bytes: memory available to this launch: the limit, or the card's total memory, or the machine's free
            memory.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._limit_bytes = limit_bytes
        self._total_bytes = int(torch.cuda.get_device_properties(device).total_memory) if self._cuda else 0
        self.capacity_bytes = limit_bytes or self._total_bytes or read_host().available_bytes
        self._start_bytes = system.status_bytes("VmRSS")

    def enforce(self) -> None:
        """Apply the limit: allocations beyond it fail from now on."""
        if self._limit_bytes is None:
            return
        if self._cuda:
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / self._total_bytes), self._device)
        else:
            system.limit_data(self._limit_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak memory use so far; on CUDA, the peak of memory allocated by tensors."""
        if self._cuda:
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, system.status_bytes("VmHWM") - self._start_bytes)

    @property
    def peak_reserved_bytes(self) -> int | None:
        """CUDA: peak memory reserved on the card so far, including fragmentation; ``None`` on a CPU."""
        return int(torch.cuda.max_memory_reserved(self._device)) if self._cuda else None

    @property
    def alloc_retries(self) -> int | None:
        """CUDA: number of times the allocator had to empty its cache to continue; ``None`` on a CPU."""
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)) if self._cuda else None
