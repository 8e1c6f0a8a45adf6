"""The daemon's metrics in the Prometheus text format (exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.base.records import JobState
from autotune.daemon.devices import DeviceState


@dataclass(frozen=True)
class Metrics:
    """A snapshot of the daemon's counters.

    Attributes:
        devices: state of each device, by name.
        taken: id of the job that runs on a device, by device name.
        reads: number of times all devices were read.
        trouble: why no job can be started; ``None`` if jobs can.
        refused: connections refused since the daemon started.
        ended: runs ended since the daemon started, by the state their job went into.
    """

    jobs: Mapping[JobState, int]
    devices: Mapping[str, DeviceState]
    taken: Mapping[str, int]
    reads: int
    uptime_s: float
    trouble: str | None
    refused: int
    ended: Mapping[JobState, int]


def exposition(metrics: Metrics) -> str:
    """Format the metrics as text."""
    lines: list[str] = []

    def family(name: str, kind: str, meaning: str, samples: list[tuple[dict[str, str], float]]) -> None:
        lines.extend((f"# HELP autotune_{name} {meaning}", f"# TYPE autotune_{name} {kind}"))
        for labels, value in samples:
            text = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels.items())
            lines.append(f"autotune_{name}{{{text}}} {value:g}" if text else f"autotune_{name} {value:g}")

    def by_device(value: str) -> list[tuple[dict[str, str], float]]:
        """Return 1 for each device in the state ``value`` and 0 for the others."""
        return [
            (
                {"device": name, "model": s.reading.model},
                float(((name in metrics.taken and "running") or s.label) == value),
            )
            for name, s in metrics.devices.items()
        ]

    family("jobs", "gauge", "Jobs by state.", [({"state": s.value}, n) for s, n in metrics.jobs.items()])
    family(
        "runs_ended_total",
        "counter",
        "Runs of jobs that have ended, by what their job became.",
        [({"state": s.value}, metrics.ended.get(s, 0)) for s in JobState if s is not JobState.RUNNING],
    )
    family("device_running", "gauge", "A job of ours runs on the device.", by_device("running"))
    family("device_idle", "gauge", "Nobody uses the device.", by_device("idle"))
    family("device_unknown", "gauge", "It cannot be found out who uses the device.", by_device("unknown"))
    family(
        "device_quarantined",
        "gauge",
        "Memory is in use and no process is there that uses it.",
        by_device("quarantined"),
    )
    family("device_readings_total", "counter", "How often all devices were read.", [({}, metrics.reads)])
    family("trouble", "gauge", "Nothing can be started.", [({}, float(metrics.trouble is not None))])
    family("connections_refused_total", "counter", "Connections that were refused or cut off.", [({}, metrics.refused)])
    family("uptime_seconds", "gauge", "Since the daemon was started.", [({}, metrics.uptime_s)])
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
