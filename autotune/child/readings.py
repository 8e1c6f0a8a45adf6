"""Rates that a program itself reports, in its output or in a file, in place of what the agent would observe."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.base.errors import WorkloadError
from autotune.base.layout import LaunchFiles
from autotune.base.records import CommandRef, Measurement, TrialSpec
from autotune.child.trail import SeenStep, Trail

#: Lines end with either: a progress bar overwrites itself.
_ENDS = re.compile(rb"[\r\n]+")
#: Of a line that does not end, only this many last bytes are kept.
_LONGEST_LINE = 2**16


class Readings(Trail):
    """Turns the rates that a program writes into steps of a training, while they are being written.

    A rate is that of the time since the one before; what it counts (images, tokens) is up to the program. Each makes
    one step of a training, which lasts about as long as has passed since then, so that a whole number of samples gives
    the reported rate.

    Args:
        files: those of the launch, whose output is read if `path` is ``None``.
        samples_per_step: samples in one step of the program, for programs that report seconds per step.

    Attributes:
        expression: the regular expression that is searched for, as the user gave it.
    """

    def __init__(self, files: LaunchFiles, command: CommandRef, path: Path | None, samples_per_step: int) -> None:
        super().__init__(files.trail)
        self.expression = command.rate or ""
        self._pattern = re.compile(self.expression)
        self._samples_per_step = samples_per_step
        if path is None:
            self._tails = [_Tail(files.stdout, is_log=True), _Tail(files.stderr, is_log=True)]
        else:
            self._tails = [_Tail(path, is_log=False)]
        self._read_at: float | None = None

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails:
            tail.close()

    def read(self, *, decide: bool = False) -> list[SeenStep]:
        # Raises `WorkloadError` if what the expression matched is not a number.
        steps = []
        for tail in self._tails:
            for line in tail.lines():
                match = self._pattern.search(line)
                step = None if match is None else self._step(match)
                if step is not None:
                    steps.append(step)
        # Anything that the program writes is a sign of life.
        self.events = sum(tail.taken for tail in self._tails)
        return steps

    def known(self, found: Measurement, spec: TrialSpec) -> Measurement:
        """Return `found` without what remains unknown of a program that the agent does not enter: its waits, the
        device's share of a step, and the memory of a card that it takes."""
        unknown: dict[str, Any] = {"device_per_s": None, "loader_wait_fraction": None}
        if spec.devices[0] != "cpu":
            unknown["peak_allocated_bytes"] = None
        return found.model_copy(update={**unknown, "batch_size": spec.batch_size})

    def _step(self, match: re.Match[str]) -> SeenStep | None:
        (name, text), *_ = match.groupdict("").items()
        try:
            value = float(text.replace(",", "").replace("_", ""))
        except ValueError:
            raise WorkloadError(
                f"--rate found {text[:60]!r} in {match.string.strip()[:100]!r}, which is no number",
                advice=f"let (?P<{name}>…) match the number alone.",
            ) from None
        if not math.isfinite(value) or value <= 0:
            # Some programs report a rate of 0 when they begin.
            return None
        before, self._read_at = self._read_at, time.monotonic()
        self.optimizer_steps[0] += 1
        if before is None:
            self.began_at = self._read_at
            return None
        passed_s = self._read_at - before
        per_s, unit = (value, 1) if name == "rate" else (self._samples_per_step / value, self._samples_per_step)
        samples = unit * max(1, round(passed_s * per_s / unit))
        return SeenStep(
            ended_at=self._read_at,
            seconds=samples / per_s,
            host_s=passed_s,
            wait_s=0.0,
            samples=samples,
            whole=True,
            turned=False,
            own_s=samples / per_s,
        )


class _Tail:
    """The lines of a growing file, without those that it held when this object was created.

    Args:
        is_log: the file is one of the launch's own logs: new at each launch, and truncated when it grows long.

    Attributes:
        taken: bytes read so far.
    """

    def __init__(self, path: Path, *, is_log: bool) -> None:
        self.taken = 0
        self._path = path
        self._is_log = is_log
        self._descriptor: int | None = None
        self._rest = b""
        # A file that an earlier run has left may be appended to, or replaced.
        self._left = None if is_log else _look(path)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def lines(self) -> Iterator[str]:
        """Yield the lines that have ended since the last call."""
        descriptor = self._descriptor = self._opened() if self._descriptor is None else self._descriptor
        if descriptor is None:
            return
        size = os.fstat(descriptor).st_size
        if size < os.lseek(descriptor, 0, os.SEEK_CUR):
            os.lseek(descriptor, size if self._is_log else 0, os.SEEK_SET)
            # The line that had not ended is gone with what was cut.
            self._rest = b""
        while data := os.read(descriptor, 2**16):
            self.taken += len(data)
            *lines, rest = _ENDS.split(self._rest + data)
            self._rest = rest[-_LONGEST_LINE:]
            yield from (line.decode(errors="replace") for line in lines)
        now = _look(self._path)
        if now is not None and not os.path.samestat(now, os.fstat(descriptor)):
            # The program has replaced the file.
            self.close()
            self._left, self._rest = None, b""

    def _opened(self) -> int | None:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        if self._left is not None and os.path.samestat(self._left, os.fstat(descriptor)):
            os.lseek(descriptor, self._left.st_size, os.SEEK_SET)
        return descriptor


def _look(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
