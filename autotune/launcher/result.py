"""The result of a launch that has ended, from its exit code, its own report and evidence from the system."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from pathlib import Path

from pydantic import ValidationError

from autotune.base.errors import MORE_PROCESSES, SHM_FULL
from autotune.base.files import CANNOT_WRITE, has_room, read_regular
from autotune.base.layout import LaunchFiles
from autotune.base.records import TRANSIENT, LaunchKind, TrialResult, TrialSpec, TrialStatus
from autotune.launcher.watch import Watch

#: A result takes some kilobytes per second measured. A larger file is not ours.
MAX_RESULT_BYTES = 64 * 2**20
EVIDENCE_LINES = 15
#: Bytes at the end of a log that are searched for these lines, or for messages.
TAIL_BYTES = 2**14
#: A report may exceed the launcher's own clock by these seconds or this fraction.
CLOCK_S = 0.1
CLOCK_FRACTION = 0.01
#: First words of faulthandler's report when a signal kills a process.
_FATAL = "Fatal Python error: "
#: Last words of a library that cannot start a thread (EAGAIN); OpenMP's then exits.
_NO_PROCESSES = re.compile(rf"(fork|thread).{{0,200}}{os.strerror(errno.EAGAIN)}", re.DOTALL | re.IGNORECASE)
_HOST_OOM = "the kernel's memory killer ended {}"
_MORE_MEMORY = "use fewer workers, less prefetch or a smaller batch, or give the machine more memory."
#: /dev/shm counts as full if fewer bytes than this, or less than this fraction of it, are free.
FULL_BYTES = 2**20
FULL_PART = 0.01


def verdict(
    spec: TrialSpec,
    files: LaunchFiles,
    exit_code: int,
    watch: Watch,
    *,
    kernel_killed: bool,
    shared_memory: tuple[int, int] = (0, 0),
) -> TrialResult:
    """Return how a launch ended, from its wait status, result file and evidence from the system.

    ===============================  ===========  ===========  ==========================================
    the child                        exit code    result file  status
    ===============================  ===========  ===========  ==========================================
    reported success                 0            ok           complete (or pruned, as reported)
    reported a failure               1            failed       as reported; host_oom if a loader worker died
                                                               and the kernel counted an OOM kill
    died by a signal of its own      −11, −6 …    none         crashed
    SIGBUS                           −7           none         shm_exhausted if /dev/shm was full then, else crashed
    SIGKILL from outside             −9           none         host_oom if the kernel counted an OOM kill, else killed
    ended without a report           any          none         crashed: exit code 0 proves nothing
    reported success, then died      not 0        ok           complete, `unclean_exit`
    was killed by the launcher       −9           none         interrupted, timeout or hang
    reported, did not exit, killed   −9           any          as reported; a success has `unclean_exit`
    reported times that our own      any          ok           user_error
    clock contradicts
    ===============================  ===========  ===========  ==========================================

    Args:
        kernel_killed: the kernel's OOM killer killed a process during the launch.
        shared_memory: free bytes and size of /dev/shm right after the leader exited.
    """
    reported, unreadable = _read_result(spec, files)
    evidence = tail(files.stderr) if spec.command is None else _without_ours(tail(files.stderr))
    if reported is not None:
        result = _as_reported(reported, exit_code, evidence, watch, kernel_killed=kernel_killed)
        contradiction = _contradiction(reported, watch)
        return result if contradiction is None else _disbelieved(result, contradiction, evidence)
    if watch.ended is not None:
        status, cause, advice = watch.ended, watch.cause, None
        if watch.late is not None:
            cause = f"{cause}: {watch.late}, and the others wait for it"
        if status is not TrialStatus.INTERRUPTED:
            advice = f"the stacks of all threads are in {files.stderr}." if spec.command is None else watch.advice
    else:
        status, cause, advice = unreported(exit_code, unreadable, shared_memory, kernel_killed=kernel_killed)
    if status is TrialStatus.CRASHED:
        advice = f"its last words are in {files.stderr}."
        if evidence is not None and _NO_PROCESSES.search(evidence):
            cause, advice = f"{cause}, since no thread or process could be started", MORE_PROCESSES
    return TrialResult(
        launch=spec.launch,
        status=status,
        phase=watch.phase,
        cause=cause,
        advice=advice,
        evidence=evidence,
        exit_code=exit_code,
        peak_bytes=watch.peak_bytes,
        phase_s=watch.phase_s,
        transient=status in TRANSIENT,
        turn=watch.turn,
    )


def _without_ours(log: str | None) -> str | None:
    """Return a script's output without the lines in which the agent reports what it has set."""
    lines = (log or "").splitlines()
    return "\n".join(line for line in lines if not line.startswith("autotune: ")) or None


def _as_reported(
    reported: TrialResult, exit_code: int, evidence: str | None, watch: Watch, *, kernel_killed: bool
) -> TrialResult:
    """Return the child's own report, completed by what only the launcher knows."""
    success = reported.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)
    changes: dict[str, object] = {
        "exit_code": exit_code,
        "unclean_exit": success and exit_code != 0,
        "turn": None if success else watch.turn,
        "evidence": None if success else evidence,
        "phase": reported.phase if success else reported.phase or watch.phase,
    }
    if reported.status is TrialStatus.LOADER_WORKER_DIED and kernel_killed:
        changes |= {
            "status": TrialStatus.HOST_OOM,
            "cause": _HOST_OOM.format("a loader worker"),
            "advice": _MORE_MEMORY,
            "transient": False,
        }
    return reported.model_copy(update=changes)


def _contradiction(reported: TrialResult, watch: Watch) -> str | None:
    """Return how the launcher's own clock contradicts a report, as a sentence; ``None`` if it does not."""
    if watch.was_stopped:
        return None
    measured = reported.measurement
    if measured is not None:
        lost_s = sum(window.seconds for window in measured.discarded)
        # If an earlier launch started the script, the startup time belongs to that launch.
        startup_s = 0.0 if reported.within is not None else measured.startup_s
        claimed_s = startup_s + measured.compile_s + measured.warmup_s + measured.measured_s + lost_s
        if claimed_s > watch.seconds + max(CLOCK_S, CLOCK_FRACTION * watch.seconds):
            return (
                f"it reports {measured.measured_s:.2f} s of measuring, {claimed_s:.2f} s in all, and by the search's "
                f"own clock it took {watch.seconds:.2f} s"
            )
    if watch.clock_speed != 1.0:
        return f"its clock ran {watch.clock_speed:.2f} times as fast as the search's own while it measured"
    return None


def _disbelieved(result: TrialResult, contradiction: str, evidence: str | None) -> TrialResult:
    """Return a result without its figures, which cannot be true."""
    return result.model_copy(
        update={
            "status": TrialStatus.USER_ERROR,
            "cause": contradiction,
            "advice": "see whether the workload replaces time.monotonic, or writes to files of autotune.",
            "evidence": evidence,
            "unclean_exit": False,
            "rate_seen_per_s": None,
            "measurement": None,
            "heat": None,
            # The machine may also have held up the search's own process.
            "transient": True,
        }
    )


def unreported(
    exit_code: int, unreadable: str | None, shared_memory: tuple[int, int], *, kernel_killed: bool
) -> tuple[TrialStatus, str, str | None]:
    """Return status, cause and advice for a child that ended by itself without a report."""
    if exit_code == -signal.SIGKILL and kernel_killed:
        return TrialStatus.HOST_OOM, _HOST_OOM.format("it"), _MORE_MEMORY
    if exit_code == -signal.SIGKILL and unreadable is None:
        return TrialStatus.KILLED, "killed from outside (SIGKILL)", None
    if exit_code == -signal.SIGBUS and _is_full(shared_memory):
        free, size = shared_memory
        cause = f"died by SIGBUS with {free / 2**20:.1f} of {size / 2**20:.0f} MiB free in /dev/shm"
        return TrialStatus.SHM_EXHAUSTED, cause, SHM_FULL
    if exit_code < 0 and unreadable is None:
        return TrialStatus.CRASHED, f"died by {signal_name(-exit_code)}", None
    return TrialStatus.CRASHED, unreadable or f"ended with exit code {exit_code} and reported nothing", None


def _is_full(shared_memory: tuple[int, int]) -> bool:
    free, size = shared_memory
    return size > 0 and free < max(FULL_BYTES, FULL_PART * size)


def lacked_room(result: TrialResult, files: LaunchFiles) -> bool:
    """Return whether a launch failed because the disk is full, whatever its result says.

    With little room left, the result itself may not have fit. The child signals that by its exit code, which proves
    nothing on its own.
    """
    if result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED, TrialStatus.INTERRUPTED):
        return False
    if result.exit_code == CANNOT_WRITE and shutil.disk_usage(files.folder).free < MAX_RESULT_BYTES:
        return True
    return not has_room(files.folder)


def _read_result(spec: TrialSpec, files: LaunchFiles) -> tuple[TrialResult | None, str | None]:
    """Return the child's own report, or the reason why there is no credible one."""
    try:
        result = TrialResult.model_validate_json(read_regular(files.result, MAX_RESULT_BYTES))
    except FileNotFoundError:
        return None, None
    except OSError as error:
        if error.errno == errno.EFBIG:
            return None, f"its result file is larger than {MAX_RESULT_BYTES >> 20} MiB"
        return None, f"its result file cannot be read ({error.strerror})"
    except ValidationError as error:
        return None, f"its result file cannot be read ({type(error).__name__})"
    missing = _missing(spec, result)
    return (None, f"its result file is not its own: {missing}") if missing else (result, None)


def _missing(spec: TrialSpec, result: TrialResult) -> str | None:
    """Return what shows that a result is not ours, if anything: user code can write to the file too."""
    if result.launch != spec.launch:
        return f"it names launch {result.launch!r}"
    if result.status is not TrialStatus.COMPLETE:
        return None if result.cause else "a failure without a cause"
    parts = {
        LaunchKind.PROBE: result.probe,
        LaunchKind.TRAIN_CHECK: result.check,
        LaunchKind.HOLD: result.hold,
        LaunchKind.HEAT: result.heat,
    }
    return None if parts.get(spec.kind, result.measurement) else f"a success without what a {spec.kind} launch is for"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGBUS``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_of(path: Path, limit_bytes: int = TAIL_BYTES) -> str:
    """Return the end of a log, whatever its encoding; empty if it cannot be read."""
    try:
        return read_regular(path, limit_bytes, tail=True).decode(errors="replace")
    except OSError:
        return ""


def tail(path: Path, lines: int = EVIDENCE_LINES) -> str | None:
    """Return the last lines of a log; ``None`` if it is empty or missing.

    If they contain the stack dump of a fatal signal, return the lines from there on: the innermost call comes first.
    """
    text = end_of(path)
    _, fatal, stack = text.rpartition(_FATAL)
    if fatal:
        return "\n".join((fatal + stack).strip().splitlines()[:lines])
    return "\n".join(text.strip().splitlines()[-lines:]) or None
