"""The daemon as a whole: its process, systemd, and the upkeep of profiles."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import logging.handlers
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from autotune.base.clock import Clock, SystemClock, timestamp
from autotune.base.errors import AutotuneError, MachineError, UsageError
from autotune.base.files import exclusive_lock, make_folder, write_atomic
from autotune.base.layout import DaemonFiles, lock_folder
from autotune.base.records import Done, Job, JobRequest
from autotune.daemon.claims import Children, Claims
from autotune.daemon.devices import Board, GpuQuery, RealDevices, Settings
from autotune.daemon.notices import Notices
from autotune.daemon.page import Page
from autotune.daemon.queue import Opened, Queue, open_queue
from autotune.daemon.runner import ProcessRunner, boot_id, has_systemd, systemd_scope
from autotune.daemon.scheduler import Scheduler
from autotune.daemon.server import Handlers, Server
from autotune.machine.gpu import gpus, keep_open

log = logging.getLogger(__name__)

#: Interval between checks for stale profiles.
EVERY_S = 600.0
#: A check is killed after this time; it usually takes a second or two.
LIMIT_S = 120.0


class Upkeep:
    """Checks periodically whether stored profiles are stale. Runs on the daemon's main thread; no method blocks.

    Args:
        profiles: the profile store's folder.
        submit: submits a request and names its study.
    """

    def __init__(
        self, queue: Queue, profiles: Path, submit: Callable[[JobRequest], Job], clock: Clock, children: Children
    ) -> None:
        self._queue = queue
        self._profiles = profiles
        self._submit = submit
        self._clock = clock
        self._children = children
        self._checked_at: float | None = None
        self._checks: list[tuple[subprocess.Popen[bytes], IO[bytes], list[Job]]] = []

    def step(self) -> None:
        """Process finished checks, and start new ones when they are due.

        Raises:
            MachineError: the queue cannot be read or written.
        """
        for process, output, jobs in list(self._checks):
            if process.poll() is not None:
                self._checks.remove((process, output, jobs))
                with output:
                    output.seek(0)
                    self._submit_stale(output.read(), process.returncode, jobs)
            elif self._checked_at is not None and self._clock.now() - self._checked_at > LIMIT_S:
                process.kill()
        if self._checked_at is None or self._clock.now() - self._checked_at >= EVERY_S:
            self._checked_at = self._clock.now()
            self._start_checks()

    def _start_checks(self) -> None:
        groups: dict[tuple[str, str], list[Job]] = {}
        for job in self._queue.kept_fresh():
            groups.setdefault((job.request.python, job.placed or "cpu"), []).append(job)
        for (python, device), jobs in groups.items():
            output = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process has ended)
            command = [python, "-P", "-m", "autotune.daemon.stale_check", str(self._profiles), device]
            try:
                process = self._children.start(
                    command,
                    env={**os.environ, **jobs[-1].request.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                )
            except (OSError, ValueError) as error:
                output.close()
                log.warning("cannot look whether profiles still hold: %s: %s", python, error)
                continue
            self._checks.append((process, output, jobs))

    def _submit_stale(self, output: bytes, exit_code: int, jobs: list[Job]) -> None:
        try:
            stale: dict[str, dict[str, Any]] = json.loads(output) if exit_code == 0 else {}
        except ValueError:
            stale = {}
        if exit_code != 0:
            # For example, an older autotune in the job's own interpreter does not have this check.
            log.warning("cannot look whether profiles still hold: the check ended with exit code %d", exit_code)
        # Only the latest job of each slot is submitted again.
        latest = {job.status.slot: job for job in jobs if isinstance(job.status, Done) and job.status.slot}
        for slot, job in latest.items():
            entry = stale.get(slot)
            if not entry or not entry["rows"]:
                continue
            rows = entry["rows"]
            request = rematch(job, slot, entry["baseline"], rows)
            if self._queue.is_known(request.spec.mark):
                continue
            submitted = self._submit(request)
            changes = "; ".join(f"{condition} was {before}, is {now}" for condition, before, now in rows)
            log.info("the profile %s holds no longer (%s): job %d searches again", slot, changes, submitted.id)


def rematch(job: Job, slot: str, baseline: dict[str, str], rows: list[list[str]]) -> JobRequest:
    """Return the request for a new search with the current configuration as its baseline.

    The request's mark is a hash of the slot and the changes, so that each change is submitted only once.

    Args:
        baseline: the current configuration, in ``--baseline`` form.
        rows: the changed conditions, each as name, old value and new value.
    """
    mark = hashlib.sha256(json.dumps([slot, sorted(rows)]).encode()).hexdigest()[:32]
    spec = job.request.spec.model_copy(
        update={"name": "", "mark": mark, "created": timestamp(), "baseline": baseline, "batch_size": None}
    )
    # The source hashes are dropped, because a change to the workload may be what made the profile stale.
    changes = {"spec": spec, "refreshes": slot, "after": None, "not_before": None, "sources": {}}
    return job.request.model_copy(update=changes)


def _notify_systemd(line: str) -> None:
    """Send a message such as ``READY=1`` or ``WATCHDOG=1`` to systemd (sd_notify(3)), if that has started the daemon.

    Never raises, since systemd may have gone away.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notice:
            notice.settimeout(1.0)
            notice.sendto(line.encode(), "\0" + address[1:] if address.startswith("@") else address)


def _escaped(command: Sequence[str]) -> str:
    """Quote a command for ExecStart, where % begins a specifier and $ a variable (systemd.service(5))."""
    return shlex.join(command).replace("%", "%%").replace("$", "$$")


def unit(command: Sequence[str]) -> str:
    """Return a systemd user unit that runs ``command``.

    The unit's sandboxing needs no privileges, so it works for every user. The whole file system stays visible and
    memory may be both writable and executable, because trainings write to any folder and compile code.
    """
    return f"""\
[Unit]
Description=autotune: finds the fastest way to run trainings, when the machine is quiet
StartLimitIntervalSec=600
StartLimitBurst=10

[Service]
Type=notify
NotifyAccess=main
ExecStart={_escaped(command)}
WatchdogSec=60
Restart=on-failure
RestartSec=5
# It ends its searches by itself, with everything measured kept, and they go on at the next start.
KillMode=mixed
TimeoutStopSec=60
# A trial that takes too much memory is ended alone.
OOMPolicy=continue
Nice=5

NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
UMask=0077

[Install]
WantedBy=default.target
"""


TICK_S = 1.0
#: Minimum interval between ticks triggered by calls.
MIN_TICK_S = 0.2
METRICS_S = 15.0
#: On shutdown, maximum time to wait for killed processes after the grace period.
KILL_WAIT_S = 10.0
_LOG_BYTES = 4 * 2**20
_LOGS = 3


def run(files: DaemonFiles, settings: Settings) -> None:
    """Run the daemon until it is stopped.

    Raises:
        UsageError: a daemon is already running.
        MachineError: the state folder, the queue or the socket cannot be created or opened.
    """
    make_folder(files.state, "--state-dir names another folder.", mode=0o700)
    with exclusive_lock(files.lock) as free, _signals() as (received, wakeup):
        if not free:
            raise UsageError("a daemon runs already", advice="`autotune daemon status` asks it.")
        with _logging(files.log):
            _Daemon(files, settings, received).serve(wakeup)


class _Daemon:
    """The daemon's parts and its main loop. The lock must be held."""

    def __init__(self, files: DaemonFiles, settings: Settings, received: list[int]) -> None:
        self._files = files
        self._settings = settings
        self._received = received
        self._clock = SystemClock()
        opened = open_queue(files.queue)
        notes = _notes(opened)
        for note in notes:
            log.warning("%s", note)
        self._queue = opened.queue
        children = Children(adopts=True)
        claims = Claims(lock_folder())
        self._notices = Notices(self._clock, children)
        self._scheduler = Scheduler(
            self._queue,
            ProcessRunner(files.queue, systemd_scope if has_systemd() else None, children, claims),
            Board(RealDevices(settings, cards=GpuQuery(gpus)), self._clock, settings.quiet_s, claims),
            self._notices,
            settings,
            self._clock,
            time.time,
            boot_id(),
        )
        self._handlers = Handlers(self._queue, self._scheduler, self._clock, notes)
        self._upkeep = Upkeep(self._queue, files.profiles, lambda r: self._handlers.submit(r)[0], self._clock, children)
        self._server = Server(files.socket, self._handlers.handle)
        self._page = Page(files, settings.web, self._clock, children)
        self._handlers.page = self._page.status
        self._metrics_at = 0.0
        self._troubles: dict[str, str] = {}
        self._ends_at: float | None = None

    def serve(self, wakeup: int) -> None:
        """Reply to calls and tick until the daemon is stopped and its runs have ended."""
        self._server.wake_on(wakeup)
        self._guarded(self._write_address)
        _notify_systemd("READY=1")
        log.info("the daemon runs, process %d", os.getpid())
        # The daemon queries NVML all the time, and its end must not wait for a hanging driver: the process closes it.
        keep_open()
        try:
            ticked = -TICK_S
            while not self._is_over():
                due_s = ticked + TICK_S - self._clock.now()
                woken = self._server.serve(max(0.0, due_s))
                now = self._clock.now()
                if now - ticked >= TICK_S or woken or (self._handlers.changed and now - ticked >= MIN_TICK_S):
                    ticked = now
                    self._tick()
        finally:
            _notify_systemd("STOPPING=1")
            self._notices.close()
            self._page.close()
            self._server.close()
            self._queue.close()
            log.info("the daemon has ended")

    def _tick(self) -> None:
        self._handlers.changed = False
        if self._received and not self._scheduler.stopping:
            log.info("signal %d: the daemon ends", self._received[0])
            _notify_systemd("STOPPING=1")
            self._scheduler.stop(now=False)
        self._guarded(self._check_queue)
        self._scheduler.tick()
        if not self._scheduler.stopping:
            for step in (self._upkeep.step, self._page.step):
                self._guarded(step)
        # The watchdog is notified only here, so that systemd detects a scheduler that hangs.
        _notify_systemd("WATCHDOG=1")
        if not self._server.is_in_place():
            self._guarded(self._rebind)
        self._handlers.refused = self._server.refused
        if self._settings.metrics is not None and self._clock.now() >= self._metrics_at:
            self._metrics_at = self._clock.now() + METRICS_S
            self._guarded(self._write_metrics)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step and log its error, but only if it differs from the last one. Never raises."""
        try:
            step()
        except AutotuneError as error:
            if self._troubles.get(step.__name__) != str(error):
                log.warning("%s", error)
            self._troubles[step.__name__] = str(error)
        except Exception:
            if self._troubles.get(step.__name__) != "a fault":
                log.exception("step %s", step.__name__)
            self._troubles[step.__name__] = "a fault"
        else:
            self._troubles.pop(step.__name__, None)

    def _rebind(self) -> None:
        """Create the socket again, in the state folder if the runtime folder is gone (a logout removes it)."""
        try:
            self._server.rebind(self._files.socket)
        except MachineError:
            self._server.rebind(self._files.lasting_socket)
        log.warning("the socket was taken away; now it is at %s", self._server.path)
        self._write_address()

    def _write_address(self) -> None:
        write_atomic(self._files.address, f"{self._server.path}\n")

    def _check_queue(self) -> None:
        """Rebuild ``queue.db`` from the jobs' folders if it was removed."""
        if self._queue.is_in_place():
            return
        if not self._files.queue.jobs.is_dir():
            # Without the jobs' folders the rebuilt queue would be empty, which is worse than an error.
            raise MachineError(f"{self._files.state} was taken away", advice="put it back, or stop the daemon.")
        self._queue.close()
        opened = open_queue(self._files.queue)
        opened.queue.close()
        log.warning("queue.db was taken away, and was made again from the jobs' folders")
        self._handlers.notes += ("queue.db was taken away, and was made again from the jobs' folders",)

    def _write_metrics(self) -> None:
        assert self._settings.metrics is not None
        write_atomic(self._settings.metrics, self._handlers.metrics())

    def _is_over(self) -> bool:
        if not self._scheduler.stopping:
            return False
        self._ends_at = self._ends_at or self._clock.now() + self._settings.grace_s + KILL_WAIT_S
        # The next daemon kills processes that are still there. Notices have the grace period too.
        left_s = self._ends_at - self._clock.now()
        if self._scheduler.has_runs():
            return left_s < 0
        return left_s < KILL_WAIT_S or not self._notices.is_sending()


def _notes(opened: Opened) -> tuple[str, ...]:
    """Describe the repairs made when the queue was opened, one sentence each."""
    notes = []
    if opened.aside is not None:
        notes.append(f"the queue was damaged, and was made again from the jobs' folders; the old one is {opened.aside}")
    notes += [f"a job could not be read; what there is of it is in {folder}" for folder in opened.lost]
    return tuple(notes)


@contextlib.contextmanager
def _signals() -> Iterator[tuple[list[int], int]]:
    """Handle signals; yield the stop signals received, and a descriptor that is readable after any signal.

    SIGCHLD makes the descriptor readable too, so that the main loop wakes when a child exits.
    """
    received: list[int] = []
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _frame: received.append(n)) for number in numbers}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield received, reader
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def _logging(path: Path) -> Iterator[None]:
    """Log to the daemon's log file, and to stderr if that is a terminal or the systemd journal."""
    handlers: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=_LOGS)
    ]
    # Stderr redirected to a file would grow without bound.
    if sys.stderr is not None and (sys.stderr.isatty() or "JOURNAL_STREAM" in os.environ):
        handlers.append(logging.StreamHandler())
    logger = logging.getLogger("autotune")
    # A failed write to the log must not print tracebacks; a full disk is reported by `autotune daemon status`.
    logging.raiseExceptions = False
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
