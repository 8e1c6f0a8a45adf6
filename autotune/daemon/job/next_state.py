"""What a job becomes when its processes have ended."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.clock import timestamp
from autotune.daemon.job.runner import Ended
from autotune.errors import INTERRUPTED, AutotuneError, MachineError
from autotune.records import ATTEMPTS, Cancelled, Done, End, Failed, Job, Paused, Queued, Running, Status

#: Exit codes of a search that another time may go better: the environment, a fault of autotune's own, a signal.
AGAIN = frozenset({MachineError.exit_code, AutotuneError.exit_code}) | INTERRUPTED
STOPPED = "the daemon was stopped"


@dataclass(frozen=True)
class NextState:
    """A job's next state.

    Attributes:
        faults: how many of its runs have ended badly one after the other, this one included.
        again: it may be started again, but not at once.
    """

    status: Status
    faults: int
    again: bool = False


def next_state(job: Job, ended: Ended, boot_id: str, *, stopping: bool) -> NextState:
    """What a running job becomes.

    Args:
        ended: how its processes did.
        boot_id: of this start of the machine. stopping: the daemon is ending, and has ended this run.
    """
    status = job.status
    assert isinstance(status, Running)
    # What it said itself comes first: a process that dies while it is torn down has done its work.
    code = ended.end.exit_code if ended.end is not None else ended.exit_code
    if code == 0 and ended.end is not None:
        return NextState(Done(ended=timestamp(), found=ended.end.found, slot=ended.end.slot), 0)
    if status.then is not None:
        # When it was decided is not when it has ended.
        if isinstance(status.then, Failed | Cancelled):
            return NextState(status.then.model_copy(update={"ended": timestamp()}), job.faults)
        return NextState(status.then, job.faults)
    if status.boot_id != boot_id:
        return _after_a_reboot(job, said_something=ended.end is not None)
    if stopping and (code is None or code < 0 or code in INTERRUPTED):
        return NextState(Queued(why=STOPPED, boot_id=boot_id), job.faults)
    if code is None:
        return NextState(Queued(why="the daemon was ended while it ran"), job.faults)
    why = what_went_wrong(code, ended.end)
    # No last word: it did not come to an end of its own, whatever its exit code says.
    if code in AGAIN or code < 0 or ended.end is None:
        faults = job.faults + 1
        if faults < ATTEMPTS:
            return NextState(Queued(why=why), faults, again=True)
        why = f"{why}; {faults} times in a row"
        return NextState(Failed(ended=timestamp(), exit_code=max(code, 1), why=why), faults)
    return NextState(Failed(ended=timestamp(), exit_code=code, why=why), job.faults)


def _after_a_reboot(job: Job, *, said_something: bool) -> NextState:
    """Its machine went down while it ran: with a word to it, or by a crash, which may have been its own doing."""
    faults = job.faults if said_something else job.faults + 1
    if job.request.on_reboot == "pause":
        return NextState(Paused(since=timestamp(), why="the machine was started anew while it ran"), faults)
    if faults >= ATTEMPTS:
        return NextState(Paused(since=timestamp(), why=f"the machine went down {faults} times while it ran"), faults)
    return NextState(Queued(why="the machine was started anew"), faults)


def what_went_wrong(code: int, end: End | None) -> str:
    """How a run ended, in its own words where it had some."""
    if code in INTERRUPTED:
        return "somebody else told its process to end"
    if end is not None and end.message:
        return end.message if not end.advice else f"{end.message.rstrip('.')}; {end.advice}"
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
