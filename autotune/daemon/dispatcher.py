"""Picks the next job, starts it, and explains why a queued job does not start."""

from __future__ import annotations

import contextlib
import errno
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Protocol

from autotune.base.clock import Clock, timestamp
from autotune.daemon.claims import Unclaimed
from autotune.daemon.devices import Board
from autotune.daemon.job.runner import Runner
from autotune.daemon.job.sources import changed_source
from autotune.daemon.queue import Queue
from autotune.base.errors import MachineError, UsageError
from autotune.base.records import Failed, Job, JobState, Queued, Running, Status

log = logging.getLogger(__name__)

#: Delay before a failed job is retried. It doubles with each further failure, up to the maximum.
BACKOFF_S = 60.0
MAX_BACKOFF_S = 3600.0
#: Attempts to start a job before it fails. With the backoff they span some hours, since a disk may be mounted late.
MAX_FAULTS = 10
#: Errors of exec(2) that concern the job's own interpreter or folder. Any other error is blamed on the machine.
_JOB_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC})


class Transition(Protocol):
    """Moves a job to a state that ends it, or ends its current run."""

    def __call__(self, job: Job, to: Status, states: tuple[JobState, ...] | None = None, **changes: object) -> Job: ...


class Dispatcher:
    """Selects queued jobs and starts them.

    Args:
        jitter: returns a random number between 0 and 1.
        update_devices: reads the devices.
        end: moves a job to another state.
    """

    def __init__(
        self,
        queue: Queue,
        runner: Runner,
        board: Board,
        clock: Clock,
        wall_s: Callable[[], float],
        boot_id: str,
        jitter: Callable[[], float],
        *,
        update_devices: Callable[[], None],
        end: Transition,
    ) -> None:
        self.queue = queue
        self.board = board
        self._runner = runner
        self._clock = clock
        self._wall_s = wall_s
        self._boot_id = boot_id
        self._jitter = jitter
        self._update_devices = update_devices
        self._end = end
        #: Time before which a job is not started again, by job id.
        self._backoff_until: dict[int, float] = {}
        #: How often in a row a job's process could not be started, which says nothing of its runs.
        self._deferred: Counter[int] = Counter()
        #: Job ids with the quiet devices and those free for ``--allow-busy``, of which none fits the job.
        self._unfit: set[tuple[int, tuple[str, ...], tuple[str, ...]]] = set()
        #: The devices that existed when ``_unfit`` was filled.
        self._unfit_among: set[str] = set()

    def next(self, taken: Mapping[str, Job], tried: Collection[str] = ()) -> tuple[Job, str] | None:
        """Return the next job that can run now, and its device.

        Args:
            taken: the running jobs, by device.
            tried: devices that are left out.
        """
        now = self._clock.now()
        if self._unfit_among != set(self.board.states):
            self._unfit, self._unfit_among = set(), set(self.board.states)
        quiet, free = (
            tuple(n for n in self.board.states if n not in tried and not self.board.obstacle(n, taken, allow_busy=busy))
            for busy in (False, True)
        )
        if not free:
            return None
        for number in self.queue.startable(self._wall_s(), self.minute(), only_allow_busy=not quiet):
            if self._backoff_until.get(number, 0.0) > now or (number, quiet, free) in self._unfit:
                continue
            job = self.queue.job(number)
            names = free if job.request.spec.allow_busy else quiet
            device = next((name for name in names if self.board.fits(name, job)), None)
            if device is not None:
                return job, device
            # Remembered, so that a queue of ten thousand jobs is not read every second.
            self._unfit.add((number, quiet, free))
        return None

    def start(self, job: Job, device: str) -> bool:
        """Claim a job for a device and start its process; return whether it runs.

        Raises:
            MachineError: the machine cannot start a process now. The claim is released.
        """
        try:
            changed = changed_source(job.request)
        except MachineError as error:
            self._defer(job, str(error))
            return False
        if changed is not None:
            why = f"{changed} is not as it was when the job was submitted"
            self._end(job, Failed(ended=timestamp(), exit_code=UsageError.exit_code, why=why))
            return False
        try:
            self.board.claims.take(device)
        except Unclaimed:
            # Another daemon was faster; the next tick says so.
            return False
        started = False
        try:
            started = self._start(job, device)
        finally:
            if not started:
                self.board.claims.release(device)
        return started

    def _start(self, job: Job, device: str) -> bool:
        """Record that a job runs on a device, and start its process; return whether it runs."""
        mark = uuid.uuid4().hex
        status = Running(since=timestamp(), device=device, boot_id=self._boot_id, mark=mark)
        claimed = self.queue.move(job.id, JobState.QUEUED, status, placed=job.placed or device, runs=job.runs + 1)
        # Another process may have appeared on the device while the claim was written.
        self._update_devices()
        trouble = self.board.trouble(device, allow_busy=job.request.spec.allow_busy)
        if trouble is not None:
            self.queue.move(job.id, JobState.RUNNING, Queued(why=trouble), placed=job.placed, runs=job.runs)
            return False
        try:
            child = self._runner.start(claimed, device, mark)
        except (OSError, ValueError) as error:
            self._release(claimed, job, error)
            return False
        self._deferred.pop(job.id, None)
        log.info("job %d (%s) runs on %s, process %d", job.id, job.request.spec.name, device, child.pid)
        # If this cannot be written, the job still runs and is found by its mark.
        with contextlib.suppress(MachineError):
            self.queue.move(job.id, JobState.RUNNING, status.model_copy(update={"child": child}))
        return True

    def _release(self, claimed: Job, before: Job, error: OSError | ValueError) -> None:
        """Release a claim whose process could not be started. A lack of machine resources is not the job's fault."""
        why = f"its process cannot be started: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, ValueError):
            self._end(claimed, Failed(ended=timestamp(), exit_code=UsageError.exit_code, why=why))
            return
        released = self.queue.move(
            claimed.id, JobState.RUNNING, Queued(why=why), placed=before.placed, runs=before.runs
        )
        if error.errno not in _JOB_ERRORS:
            raise MachineError(why)
        self._defer(released, why)

    def _defer(self, job: Job, why: str) -> None:
        """Requeue a job with a backoff, because a disk or interpreter that it needs is missing for now."""
        self._deferred[job.id] += 1
        if self._deferred[job.id] >= MAX_FAULTS:
            del self._deferred[job.id]
            self._end(job, Failed(ended=timestamp(), exit_code=MachineError.exit_code, why=why))
            return
        self.back_off(job.id, self._deferred[job.id])
        self._end(job, Queued(why=why))

    def back_off(self, number: int, faults: int) -> None:
        """Delay the next start of a failed job, exponentially in the number of faults.

        Up to the same time again is added at random: jobs of two daemons that have disturbed each other would else
        meet again.
        """
        wait_s = min(BACKOFF_S * 2 ** (faults - 1), MAX_BACKOFF_S)
        self.delay(number, wait_s * (1 + self._jitter()))

    def delay(self, number: int, seconds: float) -> None:
        """Keep a job from starting for some seconds, even if a device is free."""
        self._backoff_until[number] = self._clock.now() + seconds

    def clear_backoff(self, number: int) -> None:
        """Let a job start at once, because a user resumed or retried it."""
        self._backoff_until.pop(number, None)
        self._deferred.pop(number, None)

    def obstacle(self, job: Job, taken: Mapping[str, Job]) -> str:
        """Return why a queued job does not run, as a clause.

        Args:
            taken: the running jobs, by device.
        """
        request = job.request
        if request.not_before is not None and request.not_before > self._wall_s():
            return "the time before which it is not to run has not come"
        if request.window is not None and not within(request.window, self.minute()):
            return "the time of day in which it may run has not come"
        if request.after is not None and self.queue.job(request.after).state is not JobState.DONE:
            return f"job {request.after} is not done"
        left_s = self._backoff_until.get(job.id, 0.0) - self._clock.now()
        if left_s > 0:
            return f"it is tried again in {left_s:.0f} s"
        if not self.board.states:
            return "the devices have not been looked at yet"
        fitting = [name for name in self.board.states if self.board.fits(name, job)]
        if not fitting:
            _, _, named = request.spec.device.partition(":")
            wanted = job.placed or (request.gpu if request.gpu != "any" else named or "card")
            return f"there is no {wanted} here that it could run on"
        busy = request.spec.allow_busy
        obstacles = [self.board.obstacle(name, taken, allow_busy=busy) for name in fitting]
        if None in obstacles:
            return "its turn has not come yet"
        return "; ".join(f"{name}: {why}" for name, why in zip(fitting, obstacles, strict=True))

    def minute(self) -> int:
        """Return the current minute of the day, local time."""
        local = datetime.fromtimestamp(self._wall_s())
        return 60 * local.hour + local.minute


def within(window: tuple[int, int], minute: int) -> bool:
    """Return whether a minute of the day lies in a window. The window may span midnight."""
    opens, closes = window
    return opens <= minute < closes if opens < closes else minute >= opens or minute < closes
