"""Asks NVML, the template's imports, or torch and CUDA, in a process of its own. Prints one JSON object.

python -m benchmarks.card.ask nvml UUID | template | torch UUID|cpu
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Ask, and print the answers."""
    what, *arguments = sys.argv[1:]
    asked: dict[str, Callable[..., Any]] = {"nvml": nvml, "template": template, "torch": cuda}
    print(json.dumps(asked[what](*arguments), default=str))


def tried(ask: Callable[[], Any]) -> Any:
    """Return an answer, or the error as text: the others are wanted all the same."""
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def nvml(uuid: str) -> dict[str, Any]:
    """Return what NVML says of a card, each answer or the error in its place."""
    import pynvml

    began = time.monotonic()
    pynvml.nvmlInit()
    init_s = time.monotonic() - began
    card = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def ask(name: str, *arguments: Any) -> Any:
        return attempt(name, card, *arguments)

    def attempt(name: str, *arguments: Any) -> Any:
        return tried(lambda: getattr(pynvml, name)(*arguments))

    def fields(found: Any, *names: str) -> Any:
        return found if isinstance(found, str) else {name: getattr(found, name) for name in names}

    def pids(found: Any) -> Any:
        return (
            found if isinstance(found, str) else {"count": len(found), "own_is_listed": own in [p.pid for p in found]}
        )

    own = os.getpid()
    version = getattr(pynvml, "nvmlMemory_v2", None)
    samples = ask("nvmlDeviceGetProcessUtilization", 0)
    told = {
        "init_s": round(init_s, 3),
        "driver": attempt("nvmlSystemGetDriverVersion"),
        "cuda_of_driver": attempt("nvmlSystemGetCudaDriverVersion"),
        "memory_v1": fields(ask("nvmlDeviceGetMemoryInfo"), "total", "free", "used"),
        "memory_v2": fields(ask("nvmlDeviceGetMemoryInfo", version), "total", "free", "used", "reserved"),
        "compute_processes": pids(ask("nvmlDeviceGetComputeRunningProcesses")),
        "graphics_processes": pids(ask("nvmlDeviceGetGraphicsRunningProcesses")),
        "process_utilization": samples if isinstance(samples, str) else len(samples),
        "utilization": fields(ask("nvmlDeviceGetUtilizationRates"), "gpu", "memory"),
        "event_reasons": _hex(ask("nvmlDeviceGetCurrentClocksEventReasons")),
        "throttle_reasons": _hex(ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
        "supported_reasons": _hex(ask("nvmlDeviceGetSupportedClocksThrottleReasons")),
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        "max_sm_clock_mhz": ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        "temperature_c": ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        "power_mw": ask("nvmlDeviceGetPowerUsage"),
        "power_limit_mw": ask("nvmlDeviceGetEnforcedPowerLimit"),
        "energy_mj": ask("nvmlDeviceGetTotalEnergyConsumption"),
        "mig_mode": ask("nvmlDeviceGetMigMode"),
        "compute_mode": ask("nvmlDeviceGetComputeMode"),
        "persistence_mode": ask("nvmlDeviceGetPersistenceMode"),
        "virtualization": ask("nvmlDeviceGetVirtualizationMode"),
    }
    began = time.monotonic()
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    return {**told, "shutdown_and_init_s": round(time.monotonic() - began, 3)}


def template() -> dict[str, Any]:
    """Return the threads after each import of the launcher's template, with and without its variables.

    With more than one, it cannot fork safely.
    """
    import subprocess

    lines = "\n".join(f"import {m}; n['{m}'] = len(os.listdir('/proc/self/task'))" for m in _IMPORTS)
    program = f"import json, os, time\nn, t = {{}}, time.monotonic()\n{lines}\nprint(json.dumps(n))"
    bare = {name: value for name, value in os.environ.items() if name not in _QUIET}
    return {
        name: json.loads(
            subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True).stdout
        )
        for name, env in (("as the template", {**bare, **_QUIET}), ("as anyone", bare))
    }


_IMPORTS = ("scipy.special", "torch", "torchvision")
_QUIET = {"OPENBLAS_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}


def cuda(uuid: str) -> dict[str, Any]:
    """Return what torch says of itself and of a card, and what its context costs."""
    began = time.monotonic()
    import torch
    import torchvision

    told: dict[str, Any] = {
        "import_s": round(time.monotonic() - began, 2),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": _version("triton"),
        "available": torch.cuda.is_available(),
        "allocator_settings": hasattr(torch._C, "_accelerator_setAllocatorSettings"),
    }
    return told if uuid == "cpu" else {**told, **_context(uuid)}


def _context(uuid: str) -> dict[str, Any]:
    import torch

    before = nvml(uuid)
    began = time.monotonic()
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    context_s = time.monotonic() - began
    one = torch.ones(1024, 1024, device="cuda")
    began = time.monotonic()
    (one @ one).sum().item()
    product_s = time.monotonic() - began
    after = nvml(uuid)
    properties = torch.cuda.get_device_properties(0)

    def used(told: dict[str, Any]) -> Any:
        memory = told["memory_v2"] if isinstance(told["memory_v2"], dict) else told["memory_v1"]
        return memory["used"]

    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "total_bytes": properties.total_memory,
        "free_bytes": free,
        "cuda_total_bytes": total,
        "context_s": round(context_s, 2),
        "first_product_s": round(product_s, 2),
        "context_and_libraries_bytes": tried(lambda: used(after) - used(before)),
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        "nvml_with_context": {n: after[n] for n in ("compute_processes", "process_utilization", "event_reasons")},
        "threads_with_context": len(os.listdir("/proc/self/task")),
        "reasons_under_load": tried(lambda: _under_load(uuid)),
        "events": tried(_events),
    }


def _under_load(uuid: str, seconds: float = 2.0) -> dict[str, Any]:
    """Return the reasons, clock and power that NVML tells while products run, each value once."""
    import pynvml
    import torch

    card = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    reasons: set[int] = set()
    clocks: list[int] = []
    took: list[float] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for _ in range(20):
            matrix @ matrix
        at = time.monotonic()
        reasons.add(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))
        clocks.append(pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM))
        took.append(time.monotonic() - at)
        torch.cuda.synchronize()
    power_w = pynvml.nvmlDeviceGetPowerUsage(card) / 1000
    return {
        "reasons": sorted(map(hex, reasons)),
        "sm_clock_mhz": [min(clocks), max(clocks)],
        "power_w": power_w,
        "two_readings_s": round(max(took), 4),
    }


def _events() -> dict[str, float]:
    """Return the milliseconds of the same work by CUDA events and by the clock on the wall."""
    import torch

    matrix = torch.randn(4096, 4096, device="cuda")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    (matrix @ matrix).sum().item()
    began = time.monotonic()
    first.record()
    for _ in range(200):
        matrix @ matrix
    last.record()
    torch.cuda.synchronize()
    return {"wall_ms": 1e3 * (time.monotonic() - began), "events_ms": first.elapsed_time(last)}


def _hex(found: Any) -> Any:
    return hex(found) if isinstance(found, int) else found


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
