"""What the daemon counts, in Prometheus' text format (exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.daemon.devices import DeviceState
from autotune.records import JobState


@dataclass(frozen=True)
class Metrics:
    """Figures of one moment.

    Attributes:
        standings: of the devices. taken: those with a job on them, and its number. looks: how often they were read.
        trouble: why nothing can be started. refused: connections, since the daemon's start.
        ended: runs of jobs that have ended since then, by what the job became.
    """

    jobs: Mapping[JobState, int]
    standings: Mapping[str, DeviceState]
    taken: Mapping[str, int]
    looks: int
    uptime_s: float
    trouble: str | None
    refused: int
    ended: Mapping[JobState, int]


def exposition(metrics: Metrics) -> str:
    """The figures as text."""
    lines: list[str] = []

    def family(name: str, kind: str, meaning: str, samples: list[tuple[dict[str, str], float]]) -> None:
        lines.extend((f"# HELP autotune_{name} {meaning}", f"# TYPE autotune_{name} {kind}"))
        for labels, value in samples:
            text = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels.items())
            lines.append(f"autotune_{name}{{{text}}} {value:g}" if text else f"autotune_{name} {value:g}")

    def by_device(value: str) -> list[tuple[dict[str, str], float]]:
        """1 for each device in that state, 0 for the others."""
        return [
            (
                {"device": name, "model": s.reading.model},
                float(((name in metrics.taken and "running") or s.word) == value),
            )
            for name, s in metrics.standings.items()
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
    family("device_readings_total", "counter", "How often all devices were read.", [({}, metrics.looks)])
    family("trouble", "gauge", "Nothing can be started.", [({}, float(metrics.trouble is not None))])
    family("connections_refused_total", "counter", "Connections that were refused or cut off.", [({}, metrics.refused)])
    family("uptime_seconds", "gauge", "Since the daemon was started.", [({}, metrics.uptime_s)])
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
