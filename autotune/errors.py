"""Every error that autotune raises deliberately, and the exit code of a command that ends with it.

    AutotuneError                 70  an internal error of autotune
    ├── UsageError                 2  the request cannot be understood or carried out as written
    │   ├── UnknownNameError       2  a name that matches nothing; carries the closest names
    │   └── ProfileError           2  a profile that cannot be read, or is newer than this version
    ├── InfeasibleError            3  nothing in the space could be measured
    ├── WorkloadError              4  the workload itself fails: its file, its data, its baseline
    ├── MachineError               5  the environment: driver, compiler, disk, permissions
    ├── ResumeRefusedError         6  the study on disk no longer matches this request or machine
    ├── DaemonUnreachableError     7  no daemon answers
    └── InterruptedSearch    130/143  SIGINT or SIGTERM; the study can be resumed

An error message is one sentence on what happened (``str(error)``) and, where the user can do something, ``advice`` on
what to change. Evidence (a log's path, a child's last lines) goes into ``detail``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutotuneError(Exception):
    """Base class of all errors that autotune raises deliberately.

    Attributes:
        advice: what the user can change, one sentence, or ``None``.
        detail: evidence to print below the message, possibly several lines, or ``None``.
        exit_code: the exit code of a command that ends with this error.
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
    """A name that matches nothing known.

    Args:
        what: the kind of thing, as the user calls it ("model", "knob", "study").
        name: the name given.
        known: all accepted names; the closest are suggested.
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
    """A file that cannot be read as a profile."""


class InfeasibleError(AutotuneError):
    """No configuration of the space could be measured to the end."""

    exit_code = 3


class WorkloadError(AutotuneError):
    """The workload itself fails: its file, its data, or its baseline."""

    exit_code = 4


class MachineError(AutotuneError):
    """The environment prevents it: driver, compiler, disk, permissions, platform."""

    exit_code = 5


class ResumeRefusedError(AutotuneError):
    """The study was made under another fingerprint or space.

    Attributes:
        differences: rows ``(what, in the study, now)``.
    """

    exit_code = 6

    def __init__(self, message: str, differences: Iterable[tuple[str, str, str]], *, advice: str | None = None) -> None:
        super().__init__(message, advice=advice)
        self.differences = tuple(differences)


class DaemonUnreachableError(AutotuneError):
    """No daemon answers at the expected address."""

    exit_code = 7


class InterruptedSearch(AutotuneError):
    """A signal ended the search; all measurements so far are on disk.

    Args:
        signal_number: the signal received, 2 (SIGINT) or 15 (SIGTERM).
    """

    def __init__(self, signal_number: int, *, advice: str | None = None) -> None:
        super().__init__("interrupted", advice=advice)
        self.exit_code = 128 + signal_number
