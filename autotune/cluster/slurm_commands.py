"""Slurm's own commands. Each is called once, with a time limit."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.base.errors import MachineError, UsageError
from autotune.base.records import JobState

#: Slurm's own limit for an answer of its controller is 10 s by default (MessageTimeout), and its commands try again.
LIMIT_S = 60.0
#: Base states of squeue(1) and sacct(1). What is not listed here is on its way into, or out of, an allocation.
_STATES = {
    "PENDING": JobState.QUEUED,
    "REQUEUED": JobState.QUEUED,
    "REQUEUE_FED": JobState.QUEUED,
    "REQUEUE_HOLD": JobState.PAUSED,
    "SPECIAL_EXIT": JobState.PAUSED,
    "RESV_DEL_HOLD": JobState.PAUSED,
    "SUSPENDED": JobState.PAUSED,
    "STOPPED": JobState.PAUSED,
    "COMPLETED": JobState.DONE,
    "CANCELLED": JobState.CANCELLED,
    "BOOT_FAIL": JobState.FAILED,
    "DEADLINE": JobState.FAILED,
    "FAILED": JobState.FAILED,
    "NODE_FAIL": JobState.FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "PREEMPTED": JobState.FAILED,
    "REVOKED": JobState.FAILED,
    "TIMEOUT": JobState.FAILED,
}
#: Reasons of a pending job that only a person removes.
_HELD = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue")
#: What a command says if it is not the job that is wrong, but the way to the controller.
_SILENT = ("Unable to contact", "Socket timed out", "Connection refused", "Connection timed out", "Communication")


@dataclass(frozen=True)
class SlurmView:
    """What Slurm says of a job.

    Attributes:
        word: Slurm's own word for its state.
        reason: why it is in this state; empty if Slurm gives no reason.
        node: where it runs or has run last; empty if it has not.
        began: when it has begun, or is expected to begin, in the controller's local time; empty if that is not known.
    """

    state: JobState
    word: str
    reason: str = ""
    node: str = ""
    began: str = ""


def require_sbatch() -> None:
    """Raise if this is no machine from which jobs are submitted.

    Raises:
        MachineError: there is no sbatch.
    """
    if shutil.which("sbatch") is None:
        raise MachineError(
            "there is no sbatch here, with which jobs are put into Slurm's queue",
            advice="submit on a login node of the cluster; without --to, a job is left to the daemon of this machine.",
        )


def squeue() -> dict[int, SlurmView]:
    """Return what Slurm says of this user's jobs, by number: those that wait or run, and those that ended lately.

    Raises:
        MachineError: Slurm does not answer.
    """
    # The reason comes last: it is a text of its own, and may hold the separator.
    text = _output("squeue", "--me", "--noheader", "--states=all", "--format=%A|%T|%N|%S|%r")
    rows = [line.split("|", 4) for line in text.splitlines()]
    return {int(row[0]): _seen(*row[1:]) for row in rows if len(row) == 5 and row[0].isdigit()}


def _seen(word: str, node: str, began: str, reason: str) -> SlurmView:
    state = JobState.PAUSED if word == "PENDING" and reason in _HELD else _STATES.get(word, JobState.RUNNING)
    return SlurmView(state, word, "" if reason == "None" else reason, node, "" if began == "N/A" else began)


def sacct(numbers: Iterable[int]) -> dict[int, SlurmView]:
    """Return what Slurm's accounting says of jobs that its controller has forgotten, as it does after some minutes.

    Raises:
        MachineError: there is no accounting, or it does not answer.
    """
    asked = f"--jobs={','.join(map(str, numbers))}"
    text = _output("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,State,NodeList", asked)
    rows = [line.split("|") for line in text.splitlines()]
    # "CANCELLED by 1000"
    words = {int(row[0]): (row[1].split()[0], row[2]) for row in rows if len(row) == 3 and row[0].isdigit() and row[1]}
    return {number: SlurmView(_STATES.get(w, JobState.RUNNING), w, node=node) for number, (w, node) in words.items()}


def is_running(number: int) -> bool:
    """Return whether Slurm lets a job run on: it was neither cancelled nor requeued, and its time is not over."""
    return _output("squeue", "--noheader", f"--jobs={number}", "--format=%T").strip() == "RUNNING"


def scancel(number: int) -> None:
    """End a job for good.

    Raises:
        UsageError: Slurm refuses.
        MachineError: Slurm does not answer.
    """
    _output("scancel", str(number))


def complaint(text: str) -> UsageError | MachineError:
    """Return what a command of Slurm's has written to stderr as an error: of the job, or of the way to Slurm."""
    lines = [line.partition("error: ")[2].strip().rstrip(".") for line in text.splitlines() if "error: " in line]
    told = (
        "; ".join(dict.fromkeys(line for line in lines if line)) or " ".join(text.split())[-200:] or "no reason given"
    )
    if any(part in told for part in _SILENT):
        return MachineError(
            f"Slurm does not answer: {told}",
            advice="`scontrol ping` shows whether its controller is up; try again then.",
        )
    return UsageError(
        f"Slurm refuses: {told}", advice="`sinfo` lists partitions, `scontrol show job ID` says more of a job."
    )


def _output(*words: str) -> str:
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise MachineError(
            f"{words[0]} cannot be run: {error.strerror}", advice="ask on a machine that has Slurm's commands."
        ) from error
    except subprocess.TimeoutExpired:
        raise MachineError(f"Slurm does not answer: {words[0]} took longer than {LIMIT_S:.0f} s") from None
    if done.returncode:
        raise complaint(done.stderr)
    return done.stdout
