"""Records consecutive launches of one configuration, one JSON line each.

The first line names the machine; every other is a `RecordedLaunch`. Lines are only ever appended, each when its launch
has ended, so an interrupted recording can be continued.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from autotune.base.records import DataRef, LaunchKind, Measurement, MeasurePlan, Record, TrialSpec, TrialStatus, Window
from autotune.launcher import Launcher
from autotune.machine.host import read_host
from autotune.stats import Rate
from benchmarks.launching import plain_config, run, workload
from benchmarks.tables import machine
from tests.support import make_measurement

#: Maximum number of attempts for a launch that is disturbed or killed from outside.
ATTEMPTS = 5


class Heading(Record):
    """The first line."""

    machine: str
    workload: str
    plan: MeasurePlan


class RecordedLaunch(Record):
    """One launch.

    Attributes:
        number: in chronological order, from 0. began_s: on the machine's monotonic clock.
        wall_s: of the whole launch.
        rate_per_s, low_per_s, high_per_s, relative_se, degrees: as reported by the launch.
        windows: ``(steps, samples, seconds)`` of the kept ones, in order. discarded: number of other windows.
    """

    number: int
    began_s: float
    wall_s: float
    batch_size: int
    rate_per_s: float
    low_per_s: float
    high_per_s: float
    relative_se: float | None
    degrees: float | None
    autocorrelation: float | None
    windows: tuple[tuple[int, int, float], ...]
    discarded: int = 0
    settled: bool = True
    attempts: int = 1

    @property
    def rate(self) -> Rate:
        """The rate with the interval of its own windows."""
        return Rate(self.rate_per_s, self.low_per_s, self.high_per_s, self.relative_se, self.degrees)

    def measurement(self, slowdown: float = 0.0) -> Measurement:
        """Return the measurement of a launch in which every step takes ``1 + slowdown`` times as long."""
        times = 1 + slowdown
        return make_measurement(
            self.rate_per_s / times,
            batch_size=self.batch_size,
            samples_per_s=self.rate_per_s / times,
            steady_per_s=self.rate_per_s / times,
            ci95_per_s=(self.low_per_s / times, self.high_per_s / times),
            relative_se=self.relative_se,
            degrees=self.degrees,
            autocorrelation=self.autocorrelation,
            windows=tuple(Window(steps=n, samples=m, seconds=s * times) for n, m, s in self.windows),
            measured_s=sum(s for _, _, s in self.windows) * times,
        )


def recorded(measurement: Measurement, *, number: int, began_s: float, wall_s: float, attempts: int) -> RecordedLaunch:
    """Create the line of a launch. Seconds are rounded to a microsecond."""
    return RecordedLaunch(
        number=number,
        began_s=round(began_s, 3),
        wall_s=round(wall_s, 3),
        batch_size=measurement.batch_size,
        rate_per_s=measurement.samples_per_s,
        low_per_s=measurement.ci95_per_s[0],
        high_per_s=measurement.ci95_per_s[1],
        relative_se=measurement.relative_se,
        degrees=measurement.degrees,
        autocorrelation=measurement.autocorrelation,
        windows=tuple((w.steps, w.samples, round(w.seconds, 6)) for w in measurement.windows),
        discarded=len(measurement.discarded),
        settled=measurement.settled,
        attempts=attempts,
    )


def record(
    path: Path, count: int, launcher: Launcher, folder: Path, plan: MeasurePlan, say: Callable[[str], None]
) -> None:
    """Append launches of `workloads/small_conv.py` until the file has ``count``.

    Raises:
        SystemExit: the file was recorded on another machine or with other settings, or a launch fails.
    """
    ref = workload("small_conv")
    heading = Heading(machine=machine().partition(";")[0], workload=ref.sha256, plan=plan)
    done: list[RecordedLaunch] = []
    if path.exists():
        found, done = read(path)
        if found != heading:
            raise SystemExit(f"{path} was recorded on another machine, or of another launch; choose another file")
    else:
        _append(path, heading)
    for number in range(len(done), count):
        attempts = 1
        while True:
            spec = TrialSpec(
                kind=LaunchKind.MEASURE,
                launch=f"launch-{number}",
                folder=str(folder / f"launch-{number}"),
                workload=ref,
                data=DataRef(kind="none"),
                config=plain_config(32, read_host().cores),
                batch_size=32,
                plan=plan,
            )
            began_s = time.monotonic()
            result = run(launcher, spec)
            if result.status is TrialStatus.COMPLETE and result.measurement is not None:
                break
            if not result.transient or attempts == ATTEMPTS:
                raise SystemExit(f"launch {number} ended as {result.status}: {result.cause}")
            attempts += 1
        line = recorded(result.measurement, number=number, began_s=began_s, wall_s=result.wall_s, attempts=attempts)
        _append(path, line)
        say(f"launch {number + 1} of {count}: {line.rate_per_s:.1f} samples/s, {len(line.windows)} windows")


def read(path: Path) -> tuple[Heading, list[RecordedLaunch]]:
    """Read a recording. An incomplete last line is removed from the file.

    Raises:
        SystemExit: the file does not exist or is not a recording.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from error
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    first, *lines = whole.splitlines() or [""]
    try:
        return Heading.model_validate_json(first), [RecordedLaunch.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise SystemExit(f"{path} is no recording of launches: {error}") from error


def _append(path: Path, line: Record) -> None:
    with path.open("a") as stream:
        stream.write(line.model_dump_json() + "\n")
