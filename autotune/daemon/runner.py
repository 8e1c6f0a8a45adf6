"""A job's process, from its start to the job's next state."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import psutil
from pydantic import TypeAdapter

from autotune.base.clock import Clock, timestamp
from autotune.base.errors import INTERRUPTED, AutotuneError, MachineError, UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import STATE_DIR, JobFiles, QueueFiles
from autotune.base.observer import Observer
from autotune.base.records import (
    ATTEMPTS,
    Cancelled,
    Child,
    Config,
    Done,
    End,
    Failed,
    Job,
    JobRequest,
    Paused,
    Queued,
    Record,
    Running,
    Status,
)
from autotune.daemon.claims import Children, Claims
from autotune.launcher.watch import JOB_MARK, is_alive, kill_marked
from autotune.workload.catalog import source_hash

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
        exit_code: the process's exit code, negative for a signal; ``None`` if it belonged to an earlier daemon.
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
        """Return the runs started here whose last process has ended since the last call."""
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
        runs = []
        for number, (process, mark) in list(self._running.items()):
            # Descendants may have left the session. The device is not free until they have ended too.
            if process.poll() is not None and not self.kill(mark) and not self._children.end_orphans():
                del self._running[number]
                self._descendants.pop(mark, None)
                runs.append(Ended(number, process.returncode, self.read_end(number, mark)))
        return runs

    def knows(self, job: int) -> bool:
        return job in self._running

    def terminate(self, job: int) -> None:
        # Popen polls before it sends the signal, so the pid cannot have been reused.
        self._running[job][0].send_signal(signal.SIGTERM)

    def kill(self, mark: str) -> bool:
        # Processes are also tracked by pid: some clear or overwrite their environment and lose the mark, and the kernel
        # shows no environment yet for one that has just been started.
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
        process = subprocess.run(["systemd-run", "--version"], capture_output=True, text=True, timeout=10, check=False)
        return int(process.stdout.split()[1].split(".")[0])
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
        process = subprocess.run([*systemd_scope(2**30, 1), "true"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0


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
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def changed_source(request: JobRequest) -> str | None:
    """Return the first of a job's files that has changed since the job was submitted; ``None`` if none has.

    Raises:
        MachineError: a file cannot be read, perhaps because its disk is not mounted yet.
    """
    for path, submitted in request.sources.items():
        try:
            current = source_hash(Path(path))
        except (UsageError, OSError) as error:
            raise MachineError(f"{path} cannot be read: {error}") from error
        if current != submitted:
            return path
    return None


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


# The event log of a running search. The job's process writes it; ``autotune jobs attach`` and the web page read it.
#
# Each line is a JSON object with one key, the name of an `Observer` method. Each run starts a new file.

#: Minimum interval between frequent events of the same kind.
EVERY_S = 1.0


class EventLog(Observer):
    """An observer that writes every event to a file. Write errors, as on a full disk, are ignored."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        self._written_s: dict[str, float] = {}
        path.unlink(missing_ok=True)
        # Line-buffered, so that readers see each event at once.
        self._stream = path.open("w", buffering=1)

    def event(self, name: str, *values: Any) -> None:
        if self._is_due(name, values):
            # Writing to a closed stream raises ValueError.
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(json.dumps({name: values}, default=_plain) + "\n")

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._stream.close()

    def _is_due(self, name: str, values: tuple[Any, ...]) -> bool:
        if name not in ("data_progress", "beat", "clock") or (name == "data_progress" and values[0] == values[1]):
            return True
        what = f"beat {values[0].phase}" if name == "beat" else name
        now = self._clock.now()
        if now - self._written_s.get(what, -EVERY_S) < EVERY_S:
            return False
        self._written_s[what] = now
        return True


def _plain(value: Record | Config) -> dict[str, Any]:
    return value.model_dump(mode="json") if isinstance(value, Record) else dict(value)


def follow(path: Path, *, from_end: bool = False) -> Iterator[str | None]:
    """Yield the lines of a file that another process writes, and ``None`` whenever there is nothing new.

    A file that is replaced by a new one of the same name is followed like ``tail -F`` does.
    """
    stream = None
    rest = ""
    try:
        while True:
            if stream is None:
                with contextlib.suppress(OSError):
                    stream = path.open(errors="replace")
                    stream.seek(0, os.SEEK_END if from_end else os.SEEK_SET)
                    from_end, rest = False, ""
            text = stream.read() if stream is not None else ""
            *lines, rest = (rest + text).split("\n")
            yield from lines
            if text:
                continue
            if stream is not None and _is_replaced(path, stream.fileno()):
                stream.close()
                stream = None
            yield None
    finally:
        if stream is not None:
            stream.close()


_EVENTS = {name for name, value in vars(Observer).items() if inspect.isfunction(value)} - {"event"}


def tell(line: str, observer: Observer) -> None:
    """Report the event in a line to an observer. Unknown events are ignored, since the writer may be newer."""
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
        ((name, values),) = json.loads(line).items()
        if name not in _EVENTS:
            return
        types = zip(_types(name), values, strict=False)
        getattr(observer, name)(*(kind.validate_python(value) for kind, value in types))


@cache
def _types(event: str) -> list[TypeAdapter[Any]]:
    """Return the types of an event's values."""
    parameters = inspect.signature(getattr(Observer, event), eval_str=True).parameters
    return [TypeAdapter(one.annotation) for name, one in parameters.items() if name != "self"]


def _is_replaced(path: Path, descriptor: int) -> bool:
    try:
        return os.stat(path).st_ino != os.fstat(descriptor).st_ino
    except OSError:
        # Between two runs the old file is removed before the new one exists.
        return False
