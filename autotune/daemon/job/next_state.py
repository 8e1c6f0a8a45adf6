"""The next state of a job whose processes have ended."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.base.clock import timestamp
from autotune.daemon.job.runner import Ended
from autotune.base.errors import INTERRUPTED, AutotuneError, MachineError
from autotune.base.records import ATTEMPTS, Cancelled, Done, End, Failed, Job, Paused, Queued, Running, Status

#: Exit codes of a search that may succeed when retried: an environment error, an internal error, or a signal.
_RETRYABLE = frozenset({MachineError.exit_code, AutotuneError.exit_code}) | INTERRUPTED
STOPPED = "the daemon was stopped"


@dataclass(frozen=True)
class NextState:
    """A job's next state.

    Attributes:
        faults: number of consecutive failed runs, including this one.
        backoff: the job is retried, but only after a delay.
    """

    status: Status
    faults: int
    backoff: bool = False


def next_state(job: Job, ended: Ended, boot_id: str, *, stopping: bool) -> NextState:
    """Return the next state of a running job whose processes have ended.

    Args:
        ended: how the processes ended.
        boot_id: identifies the current boot of the machine.
        stopping: the daemon is stopping, and has terminated this run.
    """
    status = job.status
    assert isinstance(status, Running)
    # The end record takes precedence over the exit code: a process that crashes in teardown has finished its work.
    code = ended.end.exit_code if ended.end is not None else ended.exit_code
    if code == 0 and ended.end is not None:
        end = ended.end
        return NextState(Done(ended=timestamp(), found=end.found, open=end.open, slot=end.slot), 0)
    if status.then is not None:
        # The status was created when the stop was decided; the end time is now.
        if isinstance(status.then, Failed | Cancelled):
            return NextState(status.then.model_copy(update={"ended": timestamp()}), job.faults)
        return NextState(status.then, job.faults)
    if status.boot_id != boot_id:
        return _after_reboot(job, has_end=ended.end is not None)
    if stopping and (code is None or code < 0 or code in INTERRUPTED):
        return NextState(Queued(why=STOPPED, boot_id=boot_id), job.faults)
    if code is None:
        return NextState(Queued(why="the daemon was ended while it ran"), job.faults)
    why = failure_reason(code, ended.end)
    # Without an end record the run did not finish by itself, whatever its exit code is.
    if code in _RETRYABLE or code < 0 or ended.end is None:
        faults = job.faults + 1
        if faults < ATTEMPTS:
            return NextState(Queued(why=why), faults, backoff=True)
        why = f"{why}; {faults} times in a row"
        return NextState(Failed(ended=timestamp(), exit_code=max(code, 1), why=why), faults)
    return NextState(Failed(ended=timestamp(), exit_code=code, why=why), job.faults)


def _after_reboot(job: Job, *, has_end: bool) -> NextState:
    """Return the next state of a job that was running when the machine went down.

    Without an end record the machine has crashed. That counts as a fault, because the job may have caused the crash.
    """
    faults = job.faults if has_end else job.faults + 1
    if job.request.on_reboot == "pause":
        return NextState(Paused(since=timestamp(), why="the machine was started anew while it ran"), faults)
    if faults >= ATTEMPTS:
        return NextState(Paused(since=timestamp(), why=f"the machine went down {faults} times while it ran"), faults)
    return NextState(Queued(why="the machine was started anew"), faults)


def failure_reason(code: int, end: End | None) -> str:
    """Describe why a run failed, using its own message if it left one."""
    if code in INTERRUPTED:
        return "somebody else told its process to end"
    if end is not None and end.message:
        return end.message if not end.advice else f"{end.message.rstrip('.')}; {end.advice}"
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
