"""The machine's fingerprint: what must stay the same for a measurement to remain valid."""

from __future__ import annotations

from autotune.machine.gpu import Gpu
from autotune.base.records import DataRef, Fingerprint, Host, Probe

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
