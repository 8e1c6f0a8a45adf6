"""Device memory of one launch: how much of it there is, and how much was needed at most.

On a CPU the device's memory is this process's own: the growth of its resident memory, which the kernel keeps the peak
of. Loader workers live elsewhere.
"""

from __future__ import annotations

import torch

from autotune.child import system
from autotune.machine.host import read_host


class DeviceMemory:
    """Counts from where it is made: before the model is built, and behind whatever else the process holds.

    Args:
        limit_bytes: what the user allows; ``None`` is all there is.

    Attributes:
        capacity_bytes: what there is for this launch: the limit, or else the card's whole memory, or what is free on
            the machine.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._limit_bytes = limit_bytes
        self._total_bytes = int(torch.cuda.get_device_properties(device).total_memory) if self._cuda else 0
        self.capacity_bytes = limit_bytes or self._total_bytes or read_host().available_bytes
        self._start_bytes = system.status_bytes("VmRSS")

    def enforce(self) -> None:
        """Make the limit real: more is refused from here on."""
        if self._limit_bytes is None:
            return
        if self._cuda:
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / self._total_bytes), self._device)
        else:
            system.limit_data(self._limit_bytes)

    @property
    def peak_bytes(self) -> int:
        """Needed at most so far: by tensors on CUDA."""
        if self._cuda:
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, system.status_bytes("VmHWM") - self._start_bytes)

    @property
    def peak_reserved_bytes(self) -> int | None:
        """CUDA: taken from the card at most so far, fragmentation included; ``None`` on a CPU."""
        return int(torch.cuda.max_memory_reserved(self._device)) if self._cuda else None

    @property
    def alloc_retries(self) -> int | None:
        """CUDA: how often the allocator had to empty its cache to go on; ``None`` on a CPU."""
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)) if self._cuda else None
