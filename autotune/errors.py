"""Every error autotune raises on purpose, and the exit code each one ends a command with.

    AutotuneError                 70  a fault of autotune's own
    ├── UsageError                 2  the request cannot be understood or carried out as written
    │   ├── UnknownNameError       2  a name that stands for nothing; carries the closest names
    │   └── ProfileError           2  a profile that cannot be read, or is newer than this version
    ├── InfeasibleError            3  nothing in the space could be measured
    ├── WorkloadError              4  the workload itself fails: its file, its data, its baseline
    ├── MachineError               5  the environment: driver, compiler, disk, permissions
    ├── ResumeRefusedError         6  the study on disk no longer matches this request or machine
    ├── DaemonUnreachableError     7  no daemon answers
    └── InterruptedSearch    130/143  SIGINT or SIGTERM; the study can be resumed

A user's error is one sentence on what happened (``str(error)``) and, where there is something to do
about it, ``advice``: what to change. Evidence (a log's path, a child's last lines) goes to ``detail``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutotuneError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        advice: what the reader can change, one sentence, or ``None``.
        detail: evidence to print under the sentence, possibly several lines, or ``None``.
        exit_code: the process exit code that a command ends with.
    """

    exit_code = 70

    def __init__(self, message: str, *, advice: str | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.advice = advice
        self.detail = detail


class UsageError(AutotuneError):
    """The request cannot be understood or carried out as written."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that stands for nothing known.

    Args:
        what: the kind of thing, as the reader calls it ("model", "knob", "study").
        name: what was asked for.
        known: every name that would have been accepted; the closest are suggested.
    """

    def __init__(self, what: str, name: str, known: Iterable[str], *, advice: str | None = None) -> None:
        known = sorted(known)
        self.closest = tuple(difflib.get_close_matches(name, known, n=3, cutoff=0.5))
        if advice is None:
            if self.closest:
                advice = f"did you mean {' or '.join(self.closest)}?"
            elif 0 < len(known) <= 20:
                advice = f"known: {', '.join(known)}."
        super().__init__(f"unknown {what} {name!r}", advice=advice)


class ProfileError(UsageError):
    """A profile that cannot be read as one."""


class InfeasibleError(AutotuneError):
    """No configuration of the space could be measured to the end."""

    exit_code = 3


class WorkloadError(AutotuneError):
    """The workload itself fails: its file, its data, or its baseline."""

    exit_code = 4


class MachineError(AutotuneError):
    """The environment stands in the way: driver, compiler, disk, permissions, platform."""

    exit_code = 5


class ResumeRefusedError(AutotuneError):
    """A study was made under another fingerprint or space.

    Attributes:
        differences: rows ``(what, in the study, now)``.
    """

    exit_code = 6

    def __init__(self, message: str, differences: Iterable[tuple[str, str, str]], *, advice: str | None = None) -> None:
        super().__init__(message, advice=advice)
        self.differences = tuple(differences)


class DaemonUnreachableError(AutotuneError):
    """No daemon answers at the expected place."""

    exit_code = 7


class InterruptedSearch(AutotuneError):
    """A signal asked the search to end; what was measured is on disk.

    Args:
        signal_number: the signal received, 2 (SIGINT) or 15 (SIGTERM).
    """

    def __init__(self, signal_number: int, *, advice: str | None = None) -> None:
        super().__init__("interrupted", advice=advice)
        self.exit_code = 128 + signal_number
