"""Slurm's own commands. Each is called once, with a time limit."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.base.errors import MachineError, UsageError
from autotune.base.records import JobState

#: Slurm's own timeout for its controller is 10 s by default (MessageTimeout), and its commands retry.
LIMIT_S = 60.0
#: Base states of squeue(1) and sacct(1). In any other state, a job is entering or leaving an allocation.
_WORDS = {
    JobState.QUEUED: ("PENDING", "REQUEUED", "REQUEUE_FED"),
    JobState.PAUSED: ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "SUSPENDED", "STOPPED"),
    JobState.DONE: ("COMPLETED",),
    JobState.CANCELLED: ("CANCELLED",),
    JobState.FAILED: (
        *("BOOT_FAIL", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    ),
}
_STATES = {word: state for state, words in _WORDS.items() for word in words}
#: Reasons of a pending job that only a person can remove.
_HELD = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue")
#: Messages of a command that mean the controller cannot be reached, rather than that the job is wrong.
_SILENT = ("Unable to contact", "Socket timed out", "Connection refused", "Connection timed out", "Communication")


@dataclass(frozen=True)
class SlurmView:
    """What Slurm reports about a job.

    Attributes:
        word: Slurm's own word for its state.
        reason: why it is in this state; empty if Slurm gives no reason.
        node: where it runs or last ran; empty if it has not run.
        began: when it began or is expected to begin, in the controller's local time; empty if unknown.
    """

    state: JobState
    word: str
    reason: str = ""
    node: str = ""
    began: str = ""


def require_sbatch() -> None:
    """Raise an error if jobs cannot be submitted from this machine."""
    if shutil.which("sbatch") is None:
        raise MachineError(
            "there is no sbatch here, with which jobs are put into Slurm's queue",
            advice="submit on a login node of the cluster; without --to, a job is left to the daemon of this machine.",
        )


def squeue() -> dict[int, SlurmView]:
    """Return what Slurm reports about this user's jobs, by number: waiting, running and recently ended ones.

    Raises:
        MachineError: Slurm does not answer.
    """
    # The reason comes last, because it is free text that may contain the separator.
    text = _output("squeue", "--me", "--noheader", "--states=all", "--format=%A|%T|%N|%S|%r")
    rows = [line.split("|", 4) for line in text.splitlines()]
    return {int(row[0]): _seen(*row[1:]) for row in rows if len(row) == 5 and row[0].isdigit()}


def _seen(word: str, node: str, began: str, reason: str) -> SlurmView:
    state = JobState.PAUSED if word == "PENDING" and reason in _HELD else _STATES.get(word, JobState.RUNNING)
    return SlurmView(state, word, "" if reason == "None" else reason, node, "" if began == "N/A" else began)


def sacct(numbers: Iterable[int]) -> dict[int, SlurmView]:
    """Return what Slurm's accounting reports about jobs that its controller has forgotten, as it does after minutes.

    Raises:
        MachineError: there is no accounting, or it does not answer.
    """
    selection = f"--jobs={','.join(map(str, numbers))}"
    text = _output("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,State,NodeList", selection)
    rows = [line.split("|") for line in text.splitlines()]
    # "CANCELLED by 1000"
    words = {int(row[0]): (row[1].split()[0], row[2]) for row in rows if len(row) == 3 and row[0].isdigit() and row[1]}
    return {number: SlurmView(_STATES.get(w, JobState.RUNNING), w, node=node) for number, (w, node) in words.items()}


def is_running(number: int) -> bool:
    """Return whether Slurm lets a job run on: it is neither cancelled nor requeued, and its time is not up."""
    return _output("squeue", "--noheader", f"--jobs={number}", "--format=%T").strip() == "RUNNING"


def scancel(number: int) -> None:
    """End a job for good.

    Raises:
        UsageError: Slurm refuses.
        MachineError: Slurm does not answer.
    """
    _output("scancel", str(number))


def complaint(text: str) -> UsageError | MachineError:
    """Convert what a Slurm command wrote to stderr to an error, of the job or of the connection to Slurm."""
    lines = [line.partition("error: ")[2].strip().rstrip(".") for line in text.splitlines() if "error: " in line]
    reason = (
        "; ".join(dict.fromkeys(line for line in lines if line)) or " ".join(text.split())[-200:] or "no reason given"
    )
    if any(part in reason for part in _SILENT):
        return MachineError(
            f"Slurm does not answer: {reason}",
            advice="`scontrol ping` shows whether its controller is up; try again then.",
        )
    return UsageError(
        f"Slurm refuses: {reason}", advice="`sinfo` lists partitions, `scontrol show job ID` says more of a job."
    )


def _output(*words: str) -> str:
    try:
        process = subprocess.run(
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
    if process.returncode:
        raise complaint(process.stderr)
    return process.stdout
