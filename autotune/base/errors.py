"""Every error that autotune raises deliberately, and the exit code of a command that ends with it.

    AutotuneError                 70  an internal error of autotune
    ├── UsageError                 2  the request cannot be understood or carried out as written
    │   ├── UnknownNameError       2  a name that matches nothing; carries the closest names
    │   ├── UnscoredError          2  an objective lacks a figure of a launch
    │   └── ProfileError           2  a profile that cannot be read, or is newer than this version
    ├── InfeasibleError            3  nothing in the space could be measured
    ├── WorkloadError              4  the workload itself fails: its file, its data, its baseline
    ├── MachineError               5  the environment: driver, compiler, disk, permissions
    ├── ResumeRefusedError         6  the study on disk no longer matches this request or machine
    ├── DaemonUnreachableError     7  no daemon answers
    ├── NoVerdictError             8  too little could be measured for an answer
    └── InterruptedSearch  128 + N  signal N: 130 SIGINT, 143 SIGTERM, 129 SIGHUP; the study can be resumed

An error message is one sentence on what happened (``str(error)``) and, where the user can do something, ``advice`` on
what to change. Evidence (a log's path, a child's last lines) goes into ``detail``.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable

#: How a container gets more of /dev/shm, and what to do when it is full.
MORE_SHM = "Docker: --shm-size; Kubernetes: an emptyDir in memory at /dev/shm"
SHM_FULL = f"give the container more ({MORE_SHM}), or use fewer workers, less prefetch or smaller batches."
#: What to do if no process or thread can be started (EAGAIN).
MORE_PROCESSES = (
    "raise `ulimit -u`, or the container's limit of processes: every loader worker and every thread counts."
)
#: Signals that ask a search to end with everything measured on disk: Ctrl-C, a polite kill, a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class AutotuneError(Exception):
    """Base class of all errors that autotune raises deliberately.

    Attributes:
        advice: what the user can change, one sentence, or ``None``.
        detail: evidence to print below the message, possibly several lines, or ``None``.
        exit_code: the exit code of a command that ends with this error.
        stands_for: the meaning of that code, in a few words.
    """

    exit_code = 70
    stands_for = "a fault of autotune's own"

    def __init__(self, message: str, *, advice: str | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.advice = advice
        self.detail = detail
        if advice is not None:
            # A traceback, which is what a caller in Python sees, shows the message and the notes.
            self.add_note(f"{advice[:1].upper()}{advice[1:]}")


class UsageError(AutotuneError):
    """The request cannot be understood or carried out as written."""

    exit_code = 2
    stands_for = "usage"


class ImpossibleError(UsageError):
    """A value, or a combination of values, is not possible on this machine, though it may be elsewhere."""


class UnscoredError(UsageError):
    """An objective cannot score a launch, because a figure is missing or something was not stated."""


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
    stands_for = "nothing feasible"


class WorkloadError(AutotuneError):
    """The workload itself fails: its file, its data, or its baseline."""

    exit_code = 4
    stands_for = "the workload fails"


class MachineError(AutotuneError):
    """The environment prevents it: driver, compiler, disk, permissions, platform."""

    exit_code = 5
    stands_for = "environment"


class ResumeRefusedError(AutotuneError):
    """The study was made under another fingerprint or space.

    Attributes:
        differences: rows ``(what, in the study, now)``.
    """

    exit_code = 6
    stands_for = "resume refused"

    def __init__(
        self, message: str, differences: Iterable[tuple[str, str, str]] = (), *, advice: str | None = None
    ) -> None:
        super().__init__(message, advice=advice)
        self.differences = tuple(differences)


class DaemonUnreachableError(AutotuneError):
    """No daemon answers at the expected address."""

    exit_code = 7
    stands_for = "no daemon answers"


class NoVerdictError(AutotuneError):
    """What was measured does not answer the question. `search` and `verify` end with its exit code."""

    exit_code = 8
    stands_for = "no verdict"


class InterruptedSearch(AutotuneError):
    """A signal ended the search; all measurements so far are on disk.

    Args:
        signal_number: the signal received, one of `SIGNALS`.

    Attributes:
        study: the study as `autotune resume` takes it, once it is known.
        so_far: one sentence on the best of what was measured, if anything was.
    """

    study: str | None = None
    so_far: str | None = None

    def __init__(self, signal_number: int, *, advice: str | None = None) -> None:
        super().__init__("interrupted", advice=advice)
        self.exit_code = 128 + signal_number


#: The exit codes of an `InterruptedSearch`.
INTERRUPTED = frozenset(InterruptedSearch(number).exit_code for number in SIGNALS)
#: One class for each other exit code, in the order of the codes.
KINDS: tuple[type[AutotuneError], ...] = (
    UsageError,
    InfeasibleError,
    WorkloadError,
    MachineError,
    ResumeRefusedError,
    DaemonUnreachableError,
    NoVerdictError,
    AutotuneError,
)


def by_exit_code(code: int | None) -> type[AutotuneError]:
    """Return the class of the errors that end a command with this exit code; `AutotuneError` if none of `KINDS` does.

    Each of them can be constructed from a message and an advice.
    """
    return next((kind for kind in KINDS if kind.exit_code == code), AutotuneError)
