"""Starts, terminates and kills the processes of jobs, and finds them again after a crash of the daemon."""

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
from autotune.daemon.claims import Claims
from autotune.base.files import write_atomic
from autotune.launcher.leftovers import is_alive
from autotune.launcher.survivors import JOB_MARK, kill_marked
from autotune.base.layout import STATE_DIR, JobFiles, QueueFiles
from autotune.base.records import Child, End, Job

#: Environment variables inherited from the daemon; all others come from the job's request.
_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER", "XDG_RUNTIME_DIR")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: A run truncates the job's log if it is larger than this.
LOG_BYTES = 4 * 2**20
#: Argument that makes a run's process apply its job's limits itself, because no control group does.
LIMIT_YOURSELF = "limit-yourself"


@dataclass(frozen=True)
class Ended:
    """A run whose process and all descendants have ended.

    Attributes:
        exit_code: of the process, negative for a signal; ``None`` if it belonged to an earlier daemon.
        end: the run's end record, if it wrote one.
    """

    job: int
    exit_code: int | None
    end: End | None


class Runner(Protocol):
    """Runs the jobs' processes. Runs on the daemon's main thread; no method waits for a process.

    A run is identified by its mark, which all its processes have in their environment. After a crash of the daemon the
    processes are found by the mark, since their pids may have been reused.
    """

    def start(self, job: Job, device: str, mark: str) -> Child:
        """Start a run.

        Raises:
            OSError: the process cannot be started.
            ValueError: an argument is not valid for a system call, such as one with a null byte.
        """
        ...

    def ended(self) -> list[Ended]:
        """Return the runs started here of which every process has ended since the last call."""
        ...

    def knows(self, job: int) -> bool:
        """Return whether a run of the job was started here and `ended` has not returned it yet."""
        ...

    def terminate(self, job: int) -> None:
        """Send SIGTERM to a run started here. The search saves its measurements and exits."""
        ...

    def kill(self, mark: str) -> bool:
        """Kill all processes of a run, including one of an earlier daemon; return whether any was still alive."""
        ...

    def read_end(self, job: int, mark: str) -> End | None:
        """Return the end record of a run; ``None`` if it has not written one."""
        ...

    def pids(self, job: int) -> frozenset[int] | None:
        """Return the pids of a run started here; ``None`` once its main process has exited."""
        ...


class ProcessRunner:
    """The real runner, which starts ``python -m autotune.daemon.job`` for each run.

    Args:
        scope: returns a command prefix that limits memory (bytes) and cores; ``None`` if control groups are not
            available and each process must limit itself.
        claims: the daemon's claims on devices, which a job's process inherits.
    """

    def __init__(
        self,
        files: QueueFiles,
        scope: Callable[[int | None, int | None], list[str]] | None = None,
        children: Children | None = None,
        claims: Claims | None = None,
    ) -> None:
        self._files = files
        self._claims = claims or Claims()
        self._scope = scope
        self._children = children or Children()
        #: Descendants of killed runs as ``{pid: start ticks}``, by mark.
        self._descendants: dict[str, dict[int, int]] = {}
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
                command,
                cwd=request.folder,
                env=environment,
                pass_fds=self._claims.filenos(device),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running[job.id] = (process, mark)
        return Child(pid=process.pid, started=started_ticks(process.pid) or 0)

    def ended(self) -> list[Ended]:
        found = []
        for number, (process, mark) in list(self._running.items()):
            # Descendants may have left the session. The device is not free until they have ended too.
            if process.poll() is not None and not self.kill(mark) and not self._children.end_orphans():
                del self._running[number]
                self._descendants.pop(mark, None)
                found.append(Ended(number, process.returncode, self.read_end(number, mark)))
        return found

    def knows(self, job: int) -> bool:
        return job in self._running

    def terminate(self, job: int) -> None:
        # Popen polls before it sends the signal, so the pid cannot have been reused.
        self._running[job][0].send_signal(signal.SIGTERM)

    def kill(self, mark: str) -> bool:
        # They are also tracked by pid: some clear or overwrite their environment and lose the mark, and of one that has
        # just been started the kernel shows no environment yet.
        descendants = self._descendants.setdefault(mark, {})
        for leader in [p.pid for p, m in self._running.values() if m == mark and p.poll() is None]:
            descendants |= {pid: started_ticks(pid) or 0 for pid in (leader, *_descendants(leader))}
        alive = bool(kill_marked(JOB_MARK, mark))
        for pid, started in descendants.items():
            if is_alive(pid) and started_ticks(pid) == started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                alive = True
        return alive

    def read_end(self, job: int, mark: str) -> End | None:
        try:
            end = End.model_validate_json(self._files.job(job).end.read_text())
        except (OSError, ValueError):
            return None
        return end if end.mark == mark else None

    def pids(self, job: int) -> frozenset[int] | None:
        process, _ = self._running[job]
        return None if process.poll() is not None else frozenset((process.pid, *_descendants(process.pid)))


def write_end(files: JobFiles, end: End) -> None:
    """Write the end record of a run."""
    write_atomic(files.end, end.model_dump_json())


def boot_id() -> str:
    """Return the id of the current boot of the machine."""
    return _BOOT_ID.read_text().strip()


def started_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; ``None`` if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def systemd_scope(memory_bytes: int | None, cores: int | None) -> list[str]:
    """Return a command prefix that runs the command in its own control group, under the user's systemd."""
    limits = [] if memory_bytes is None else [f"--property=MemoryMax={memory_bytes}", "--property=MemorySwapMax=0"]
    # Kills only the trial that exceeds the limit. Scopes have this property since systemd 253.
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
    """Return whether the user's systemd can run a command in its own control group."""
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
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    card = "" if device == "cpu" else device
    return {**inherited, **job.request.environment, "CUDA_VISIBLE_DEVICES": card, JOB_MARK: mark}


def limit_process(memory_bytes: int | None, cores: int | None) -> None:
    """Limit this process and its children, for systems where no control group can be used.

    RLIMIT_DATA applies to each process separately, and does not count the address space that CUDA reserves.
    """
    if memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, wanted))
    if cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
