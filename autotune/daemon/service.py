"""The daemon as a process: its lock, its socket, its loop, its end."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.clock import SystemClock
from autotune.daemon.children import Children
from autotune.daemon.devices import Board, RealDevices
from autotune.daemon.job.runner import ProcessRunner, boot_id, has_systemd, systemd_scope
from autotune.daemon.notices import Notices
from autotune.daemon.patient import Patient
from autotune.daemon.queue import Opened, open_queue
from autotune.daemon.rpc.handlers import Desk
from autotune.daemon.rpc.server import Server
from autotune.daemon.scheduler import Scheduler
from autotune.daemon.settings import Settings
from autotune.daemon.systemd import Supervisor
from autotune.daemon.upkeep import Upkeep
from autotune.daemon.web.process import Page
from autotune.errors import AutotuneError, MachineError, UsageError
from autotune.files import exclusive_lock, write_atomic
from autotune.layout import DaemonFiles
from autotune.machine.gpu import gpus

log = logging.getLogger(__name__)

TICK_S = 1.0
#: Calls that change nothing do not make it tick more often than this.
LEAST_S = 0.2
METRICS_S = 15.0
#: A daemon that is to end waits no longer for processes that were killed.
PATIENCE_S = 10.0
_LOG_BYTES = 4 * 2**20
_LOGS = 3


def run(files: DaemonFiles, settings: Settings) -> None:
    """Be the daemon until somebody ends it.

    Raises:
        UsageError: one runs already.
        MachineError: its files or its socket cannot be had.
    """
    try:
        files.state.mkdir(parents=True, exist_ok=True)
        os.chmod(files.state, 0o700)
    except OSError as error:
        raise MachineError(
            f"cannot make {files.state}: {error.strerror}", advice="--state-dir names another folder."
        ) from error
    with exclusive_lock(files.lock) as free, _signals() as (received, wakeup):
        if not free:
            raise UsageError("a daemon runs already", advice="`autotune daemon status` asks it.")
        with _logging(files.log):
            _Daemon(files, settings, received).serve(wakeup)


class _Daemon:
    """A daemon that holds the lock."""

    def __init__(self, files: DaemonFiles, settings: Settings, received: list[int]) -> None:
        self._files = files
        self._settings = settings
        self._received = received
        self._clock = SystemClock()
        self._supervisor = Supervisor(os.environ)
        opened = open_queue(files.queue)
        notes = _notes(opened)
        for note in notes:
            log.warning("%s", note)
        self._queue = opened.queue
        children = Children(adopts=True)
        self._scheduler = Scheduler(
            self._queue,
            ProcessRunner(files.queue, systemd_scope if has_systemd() else None, children),
            Board(RealDevices(settings, cards=Patient(gpus)), self._clock, settings.quiet_s),
            Notices(self._clock, children),
            settings,
            self._clock,
            time.time,
            boot_id(),
        )
        self._desk = Desk(self._queue, self._scheduler, self._clock, notes)
        self._upkeep = Upkeep(self._queue, files.profiles, lambda r: self._desk.submit(r)[0], self._clock, children)
        self._server = Server(files.socket, self._desk.answer, self._clock)
        self._page = Page(files, settings.web, self._clock, children)
        self._desk.page = self._page.where
        self._metrics_at = 0.0
        self._troubles: dict[str, str] = {}
        self._ends_at: float | None = None

    def serve(self, wakeup: int) -> None:
        """Answer calls and tick, until there is nothing left to be ended."""
        self._server.wake_for(wakeup)
        self._carefully(self._say_where)
        self._supervisor.tell("READY=1")
        log.info("the daemon runs, process %d", os.getpid())
        try:
            ticked = -TICK_S
            while not self._is_over():
                due_s = ticked + TICK_S - self._clock.now()
                woken = self._server.serve(max(0.0, due_s))
                now = self._clock.now()
                if now - ticked >= TICK_S or woken or (self._desk.changed and now - ticked >= LEAST_S):
                    ticked = now
                    self._tick()
        finally:
            self._supervisor.tell("STOPPING=1")
            self._page.close()
            self._server.close()
            self._queue.close()
            log.info("the daemon has ended")

    def _tick(self) -> None:
        self._desk.changed = False
        if self._received and not self._scheduler.stopping:
            log.info("signal %d: the daemon ends", self._received[0])
            self._supervisor.tell("STOPPING=1")
            self._scheduler.stop(now=False)
        self._carefully(self._keep_the_queue)
        self._scheduler.tick()
        if not self._scheduler.stopping:
            for step in (self._upkeep.step, self._page.step):
                self._carefully(step)
        # Fed from here and nowhere else: a scheduler that hangs has to be seen.
        self._supervisor.tell("WATCHDOG=1")
        if not self._server.is_in_place():
            self._carefully(self._listen_again)
        self._desk.refused = self._server.refused
        if self._settings.metrics is not None and self._clock.now() >= self._metrics_at:
            self._metrics_at = self._clock.now() + METRICS_S
            self._carefully(self._write_metrics)

    def _carefully(self, step: Callable[[], None]) -> None:
        """Take a step that must not end the daemon; the same trouble is logged once."""
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

    def _listen_again(self) -> None:
        """Where it was, or else beside what lasts: a logout takes the user's runtime folder away."""
        try:
            self._server.listen_again(self._files.socket)
        except MachineError:
            self._server.listen_again(self._files.lasting_socket)
        log.warning("the socket was taken away; now it is at %s", self._server.path)
        self._say_where()

    def _say_where(self) -> None:
        write_atomic(self._files.address, f"{self._server.path}\n")

    def _keep_the_queue(self) -> None:
        """Make the queue's file again where somebody has taken it away."""
        if self._queue.is_in_place():
            return
        if not self._files.queue.jobs.is_dir():
            # An empty queue would be worse than none.
            raise MachineError(f"{self._files.state} was taken away", advice="put it back, or stop the daemon.")
        self._queue.close()
        opened = open_queue(self._files.queue)
        opened.queue.close()
        log.warning("queue.db was taken away, and was made again from the jobs' folders")
        self._desk.notes += ("queue.db was taken away, and was made again from the jobs' folders",)

    def _write_metrics(self) -> None:
        assert self._settings.metrics is not None
        write_atomic(self._settings.metrics, self._desk.metrics())

    def _is_over(self) -> bool:
        if not self._scheduler.stopping:
            return False
        self._ends_at = self._ends_at or self._clock.now() + self._settings.grace_s + PATIENCE_S
        # What is left is found by the next daemon.
        return not self._scheduler.has_runs() or self._clock.now() > self._ends_at


def _notes(opened: Opened) -> tuple[str, ...]:
    """What had to be done to open the queue, as sentences."""
    notes = []
    if opened.aside is not None:
        notes.append(f"the queue was damaged, and was made again from the jobs' folders; the old one is {opened.aside}")
    notes += [f"a job could not be read; what there is of it is in {folder}" for folder in opened.lost]
    return tuple(notes)


@contextlib.contextmanager
def _signals() -> Iterator[tuple[list[int], int]]:
    """Signals received, and a descriptor that can be read when one has come: a child that ended, or a wish to end."""
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
    """Write to the daemon's log, and to stderr where a person or systemd reads that."""
    handlers: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=_LOGS)
    ]
    # Not into a file that nobody bounds.
    if sys.stderr is not None and (sys.stderr.isatty() or "JOURNAL_STREAM" in os.environ):
        handlers.append(logging.StreamHandler())
    logger = logging.getLogger("autotune")
    # A full disk is no reason to end, and is said by other means.
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
