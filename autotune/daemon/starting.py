"""Whose turn it is, why another one's is not, and the way from a claim to a process."""

from __future__ import annotations

import contextlib
import errno
import logging
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Protocol

from autotune.clock import Clock, timestamp
from autotune.daemon.devices import Board
from autotune.daemon.job.runner import Runner
from autotune.daemon.job.sources import changed_source
from autotune.daemon.queue import Queue
from autotune.errors import MachineError, UsageError
from autotune.records import Failed, Job, JobState, Queued, Running, Status

log = logging.getLogger(__name__)

#: After a run that ended badly its job waits so long, and twice as long after each further one.
BACK_OFF_S = 60.0
LONGEST_BACK_OFF_S = 3600.0
#: One that cannot be started at all is tried so often, which takes some hours: a disk may be mounted late.
PATIENCE = 10
#: Why a process cannot be started that concern its own interpreter or folder. Anything else is the machine's.
_PERMANENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC})


class Finish(Protocol):
    """Lets a job go into a state that ends it, or a run of it."""

    def __call__(self, job: Job, to: Status, states: tuple[JobState, ...] | None = None, **changes: object) -> Job: ...


class Starting:
    """Finds the next job and starts it.

    Args:
        look: reads the devices. end: lets a job go into another state.
    """

    def __init__(
        self,
        queue: Queue,
        runner: Runner,
        board: Board,
        clock: Clock,
        wall_s: Callable[[], float],
        boot_id: str,
        *,
        look: Callable[[], None],
        end: Finish,
    ) -> None:
        self.queue = queue
        self.board = board
        self._runner = runner
        self._clock = clock
        self._wall_s = wall_s
        self._boot_id = boot_id
        self._look = look
        self._end = end
        #: After which moment a job may be started again.
        self._held_back: dict[int, float] = {}
        #: Jobs and the devices that they were seen not to fit.
        self._unfit: set[tuple[int, tuple[str, ...]]] = set()
        self._unfit_among: set[str] = set()

    def next(self, free: list[str]) -> tuple[Job, str] | None:
        """The job whose turn it is on one of these devices, and which one that is."""
        now = self._clock.now()
        if self._unfit_among != set(self.board.standings):
            self._unfit, self._unfit_among = set(), set(self.board.standings)
        for number in self.queue.startable(self._wall_s(), self.minute()):
            if self._held_back.get(number, 0.0) > now or (number, tuple(free)) in self._unfit:
                continue
            job = self.queue.job(number)
            device = next((name for name in free if self.board.fits(name, job)), None)
            if device is not None:
                return job, device
            # What does not fit now does not fit until it changes: ten thousand are not read each second.
            self._unfit.add((number, tuple(free)))
        return None

    def begin(self, job: Job, device: str) -> bool:
        """Claim a job for a device, and start its process; returns whether it runs.

        Raises:
            MachineError: the machine cannot start anything now; the claim is given back.
        """
        try:
            changed = changed_source(job.request)
        except MachineError as error:
            self._hold_back(job, str(error))
            return False
        if changed is not None:
            why = f"{changed} is not as it was when the job was submitted"
            self._end(job, Failed(ended=timestamp(), exit_code=UsageError.exit_code, why=why))
            return False
        mark = uuid.uuid4().hex
        status = Running(since=timestamp(), device=device, boot_id=self._boot_id, mark=mark)
        claimed = self.queue.move(job.id, JobState.QUEUED, status, placed=job.placed or device, runs=job.runs + 1)
        # Somebody may have come while that was written down.
        self._look()
        trouble = self.board.standings[device].reading.trouble
        if trouble is not None:
            self.queue.move(job.id, JobState.RUNNING, Queued(why=trouble), placed=job.placed, runs=job.runs)
            return False
        try:
            child = self._runner.start(claimed, device, mark)
        except (OSError, ValueError) as error:
            self._could_not_start(claimed, job, error)
            return False
        log.info("job %d (%s) runs on %s, process %d", job.id, job.request.spec.name, device, child.pid)
        # Where that cannot be written it runs all the same, and is found by its mark.
        with contextlib.suppress(MachineError):
            self.queue.move(job.id, JobState.RUNNING, status.model_copy(update={"child": child}))
        return True

    def _could_not_start(self, claimed: Job, before: Job, error: OSError | ValueError) -> None:
        """Give a claim back. A machine that has too little of something now is no fault of the job's."""
        why = f"its process cannot be started: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, ValueError):
            self._end(claimed, Failed(ended=timestamp(), exit_code=UsageError.exit_code, why=why))
            return
        given_back = self.queue.move(
            claimed.id, JobState.RUNNING, Queued(why=why), placed=before.placed, runs=before.runs
        )
        if error.errno not in _PERMANENT:
            raise MachineError(why)
        self._hold_back(given_back, why)

    def _hold_back(self, job: Job, why: str) -> None:
        """Let a job wait for what it needs: a disk that is not there yet, or an interpreter. Each time for longer."""
        faults = job.faults + 1
        if faults >= PATIENCE:
            self._end(job, Failed(ended=timestamp(), exit_code=MachineError.exit_code, why=why), faults=faults)
            return
        self.back_off(job.id, faults)
        self._end(job, Queued(why=why), faults=faults)

    def back_off(self, number: int, faults: int) -> None:
        """Let a job that ended badly wait before it is started again, each time for longer."""
        wait_s = min(BACK_OFF_S * 2 ** (faults - 1), LONGEST_BACK_OFF_S)
        self.let_wait(number, wait_s)

    def let_wait(self, number: int, seconds: float) -> None:
        """Let a job wait, whatever is free."""
        self._held_back[number] = self._clock.now() + seconds

    def forget(self, number: int) -> None:
        """Somebody wants it to be tried now."""
        self._held_back.pop(number, None)

    def obstacle(self, job: Job, taken: Mapping[str, Job]) -> str:
        """Why a queued job does not run, as a clause.

        Args:
            taken: devices with a job on them.
        """
        request = job.request
        if request.not_before is not None and request.not_before > self._wall_s():
            return "the time before which it is not to run has not come"
        if request.window is not None and not within(request.window, self.minute()):
            return "the time of day in which it may run has not come"
        if request.after is not None and self.queue.job(request.after).state is not JobState.DONE:
            return f"job {request.after} is not done"
        left_s = self._held_back.get(job.id, 0.0) - self._clock.now()
        if left_s > 0:
            return f"it is tried again in {left_s:.0f} s"
        fitting = [name for name in self.board.standings if self.board.fits(name, job)]
        if not fitting:
            wanted = job.placed or (request.gpu if request.gpu != "any" else "card")
            return f"there is no {wanted} here that it could run on"
        obstacles = [self.board.obstacle(name, taken) for name in fitting]
        if None in obstacles:
            return "others have their turn before it"
        return "; ".join(f"{name}: {why}" for name, why in zip(fitting, obstacles, strict=True))

    def minute(self) -> int:
        """Of the day, local time."""
        local = datetime.fromtimestamp(self._wall_s())
        return 60 * local.hour + local.minute


def within(window: tuple[int, int], minute: int) -> bool:
    """Whether a minute of the day lies in a window, which may go over midnight."""
    opens, closes = window
    return opens <= minute < closes if opens < closes else minute >= opens or minute < closes
