"""The processes of jobs: started, asked to end, killed, and known again after a crash of the daemon."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Protocol

import psutil  # type: ignore[import-untyped, unused-ignore]

from autotune.daemon.children import Children
from autotune.files import write_atomic
from autotune.launcher.leftovers import is_alive
from autotune.launcher.survivors import JOB_MARK, kill_marked
from autotune.layout import STATE_DIR, JobFiles, QueueFiles
from autotune.records import Child, End, Job

#: What every process needs to find its way; the rest comes from whoever submitted the job.
_KEPT = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER", "XDG_RUNTIME_DIR")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: A job's log is begun anew when it is larger than this.
LOG_BYTES = 4 * 2**20
#: Tells a run's process that nobody else keeps it within its job's limits.
LIMIT_YOURSELF = "limit-yourself"


@dataclass(frozen=True)
class Ended:
    """A job's process has ended, and so have all that it had started.

    Attributes:
        exit_code: of the process, negative for a signal; ``None`` where nobody was there to see it.
        end: its own last word, if it had one.
    """

    job: int
    exit_code: int | None
    end: End | None


class Runner(Protocol):
    """Runs the jobs' processes. For the daemon's main thread alone; no method waits for a process.

    A run is known by its mark, which all its processes carry in their environment, so that they are found after a
    crash of the daemon, whatever their numbers are by then.
    """

    def start(self, job: Job, device: str, mark: str) -> Child:
        """Start a run.

        Raises:
            OSError, ValueError: the process cannot be started; the second for a text that no system call takes.
        """
        ...

    def ended(self) -> list[Ended]:
        """Runs that were started here and have ended since the last call, every process of theirs."""
        ...

    def knows(self, job: int) -> bool:
        """Whether a run of the job was started here and has not been told of by `ended`."""
        ...

    def ask_to_end(self, job: int) -> None:
        """Ask a run that was started here to end soon, with everything measured kept."""
        ...

    def kill(self, mark: str) -> bool:
        """Kill what there is of a run, started here or by an earlier daemon; returns whether anything still lived."""
        ...

    def end_of(self, job: int, mark: str) -> End | None:
        """The last word of a run that nobody waited for."""
        ...

    def pids(self, job: int) -> frozenset[int] | None:
        """The processes of a run that was started here; ``None`` once it is ending by itself."""
        ...


class ProcessRunner:
    """The real runner: ``python -m autotune.daemon.job FOLDER`` for each run.

    Args:
        scope: makes a command one that runs it under limits of memory (bytes) and cores; ``None`` where only the
            process's own limits are to be had.
    """

    def __init__(
        self,
        files: QueueFiles,
        scope: Callable[[int | None, int | None], list[str]] | None = None,
        children: Children | None = None,
    ) -> None:
        self._files = files
        self._scope = scope
        self._children = children or Children()
        self._doomed: dict[str, dict[int, int]] = {}
        self._running: dict[int, tuple[subprocess.Popen[bytes], str]] = {}

    def start(self, job: Job, device: str, mark: str) -> Child:
        files, request = self._files.job(job.id), job.request
        files.folder.mkdir(exist_ok=True)
        limits = (request.host_memory_bytes, request.cores)
        limited = self._scope is not None and limits != (None, None)
        prefix = self._scope(*limits) if self._scope is not None and limited else []
        command = [*prefix, request.python, "-P", "-m", "autotune.daemon.job", str(files.folder), device, mark]
        command += [] if limited else [LIMIT_YOURSELF]
        environment = {**_environment(job, device, mark), STATE_DIR: str(self._files.folder)}
        with _log(files) as log:
            process = self._children.start(
                command, cwd=request.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._running[job.id] = (process, mark)
        return Child(pid=process.pid, started=started_ticks(process.pid) or 0)

    def ended(self) -> list[Ended]:
        found = []
        for number, (process, mark) in list(self._running.items()):
            # What it had started may have left its session; nothing begins on its device before that is gone too.
            if process.poll() is not None and not self.kill(mark) and not self._children.end_orphans():
                del self._running[number]
                self._doomed.pop(mark, None)
                found.append(Ended(number, process.returncode, self.end_of(number, mark)))
        return found

    def knows(self, job: int) -> bool:
        return job in self._running

    def ask_to_end(self, job: int) -> None:
        # Popen looks first whether it has ended: the number is still its own.
        self._running[job][0].send_signal(signal.SIGTERM)

    def kill(self, mark: str) -> bool:
        doomed = self._doomed.setdefault(mark, {})
        # Those below a marked process that hide their mark, by cleaning their environment or writing over it.
        for pid in [p.pid for p, m in self._running.values() if m == mark and p.poll() is None]:
            doomed |= {below: started_ticks(below) or 0 for below in _descendants(pid)}
        alive = bool(kill_marked(JOB_MARK, mark))
        for pid, started in doomed.items():
            if is_alive(pid) and started_ticks(pid) == started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                alive = True
        return alive

    def end_of(self, job: int, mark: str) -> End | None:
        try:
            end = End.model_validate_json(self._files.job(job).end.read_text())
        except (OSError, ValueError):
            return None
        return end if end.mark == mark else None

    def pids(self, job: int) -> frozenset[int] | None:
        process, _ = self._running[job]
        return None if process.poll() is not None else frozenset((process.pid, *_descendants(process.pid)))


def leave_end(files: JobFiles, end: End) -> None:
    """Write a run's last word."""
    write_atomic(files.end, end.model_dump_json())


def boot_id() -> str:
    """Of this start of the machine."""
    return _BOOT_ID.read_text().strip()


def started_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; ``None`` where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def systemd_scope(memory_bytes: int | None, cores: int | None) -> list[str]:
    """A command's beginning that puts it into a control group of its own, under the user's systemd."""
    limits = [] if memory_bytes is None else [f"--property=MemoryMax={memory_bytes}", "--property=MemorySwapMax=0"]
    # A trial that takes too much is ended alone; scopes know this since systemd 253.
    limits += ["--property=OOMPolicy=continue"] if _systemd_version() >= 253 else []
    limits += [] if cores is None else [f"--property=CPUQuota={100 * cores}%"]
    return ["systemd-run", "--user", "--scope", "--quiet", "--collect", *limits, "--"]


@cache
def _systemd_version() -> int:
    try:
        done = subprocess.run(["systemd-run", "--version"], capture_output=True, text=True, timeout=10, check=False)
        return int(done.stdout.split()[1].split(".")[0])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return 0


def _descendants(pid: int) -> list[int]:
    try:
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


@cache
def has_systemd() -> bool:
    """Whether the user's systemd gives a command a control group of its own."""
    if shutil.which("systemd-run") is None:
        return False
    try:
        done = subprocess.run([*systemd_scope(2**30, 1), "true"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _log(files: JobFiles) -> BinaryIO:
    too_large = files.log.exists() and files.log.stat().st_size > LOG_BYTES
    return files.log.open("wb" if too_large else "ab")


def _environment(job: Job, device: str, mark: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    card = "" if device == "cpu" else device
    return {**kept, **job.request.environment, "CUDA_VISIBLE_DEVICES": card, JOB_MARK: mark}


def limit_process(memory_bytes: int | None, cores: int | None) -> None:
    """Limit this process and all that it starts, where no control group does.

    RLIMIT_DATA holds for each process by itself, and not for what CUDA reserves of the address space.
    """
    if memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, wanted))
    if cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
