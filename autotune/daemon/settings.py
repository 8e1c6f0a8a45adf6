"""The daemon's settings, fixed when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Thresholds, timeouts and output locations.

    Attributes:
        quiet_s: seconds a device must have been idle before a job is started on it.
        utilization_percent, memory_bytes: a GPU above either limit is not idle. Memory the driver reserves on an idle
            GPU counts too.
        busy_cores: cores that other processes may use while the CPU still counts as idle; ``None`` means a tenth of the
            cores allowed.
        grace_s: seconds between SIGTERM and SIGKILL when a job is stopped.
        metrics: file for metrics in the Prometheus text format, read by node_exporter's textfile collector.
        web: ``HOST:PORT`` of the web page; ``None`` disables it.
    """

    quiet_s: float = 60.0
    utilization_percent: int = 5
    memory_bytes: int = 2**30
    busy_cores: float | None = None
    grace_s: float = 5.0
    metrics: Path | None = None
    web: str | None = None
