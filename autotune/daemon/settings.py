"""What a daemon goes by, chosen when it is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Thresholds and places.

    Attributes:
        quiet_s: a device has to have been idle for so long before a job gets it.
        utilization_percent, memory_bytes: a card that is used more is not idle. What the driver keeps for itself on an
            idle card counts as well.
        busy_cores: cores that others may use while the CPU counts as idle; ``None``: a tenth of those allowed.
        grace_s: a job that is asked to end has so long before it is killed.
        metrics: a file that gets the metrics in Prometheus' text format, for node_exporter's textfile collector.
        web: ``HOST:PORT`` of the page; ``None``: there is none.
    """

    quiet_s: float = 60.0
    utilization_percent: int = 5
    memory_bytes: int = 2**30
    busy_cores: float | None = None
    grace_s: float = 5.0
    metrics: Path | None = None
    web: str | None = None
