"""The scheduler, and the runs that it manages."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from autotune.base.clock import Clock, timestamp
from autotune.base.errors import MachineError, UsageError
from autotune.base.files import has_room
from autotune.base.records import Cancelled, Done, Failed, Job, JobState, Paused, Queued, Running, Status
from autotune.daemon.devices import CPU, Board, Dispatcher, Settings, within
from autotune.daemon.notices import Notices
from autotune.daemon.queue import Queue
from autotune.daemon.runner import Ended, Runner, next_state

log = logging.getLogger(__name__)

#: Interval between writes of a job's running time.
SAVE_EVERY_S = 10.0


@dataclass
class _Run:
    """One run. Times are in seconds of the clock.

    Attributes:
        saved: the job's record includes the running time up to here.
        stop_since: when the run was told to stop; ``None`` if it was not.
        terminated: the process has been sent SIGTERM.
        then: the job's next state, if the run is being stopped.
    """

    saved: float
    stop_since: float | None = None
    terminated: bool = False
    then: Queued | Paused | Failed | Cancelled | None = None


_T = TypeVar("_T")

#: Interval between reads of the devices: with a job running on a GPU, with queued jobs, and otherwise.
READ_RUNNING_S = 1.0
READ_WAITING_S = 5.0
READ_IDLE_S = 15.0
#: Number of queued jobs for which a list says why they wait. A queue may hold ten thousand.
EXPLAINED = 100
#: After a failed step, such as a write to the queue, no job is started for this time.
RETRY_S = 5.0
#: Free disk space needed to start a job: room for a few job records and the database's journal.
ROOM_BYTES = 64 * 2**10


class Scheduler:
    """Moves jobs through the queue. There is one scheduler per queue, and it runs on the main thread.

    Args:
        clock: measures all durations and deadlines.
        wall_s: returns UNIX seconds, for times of day set by the user.
        boot_id: identifies the current boot of the machine.
        jitter: returns a random number between 0 and 1.
    """

    def __init__(
        self,
        queue: Queue,
        runner: Runner,
        board: Board,
        notices: Notices,
        settings: Settings,
        clock: Clock,
        wall_s: Callable[[], float],
        boot_id: str,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.queue = queue
        self.board = board
        #: Why no job can be started; ``None`` if jobs can.
        self.trouble: str | None = None
        self.stopping = False
        #: Number of runs that have ended, by the state their job went into.
        self.ended_runs: Counter[JobState] = Counter()
        self._runner = runner
        self._notices = notices
        self._settings = settings
        self._clock = clock
        self._boot_id = boot_id
        self._jitter = jitter
        self._dispatcher = Dispatcher(
            queue, runner, board, clock, wall_s, boot_id, jitter, self._update_devices, self._end
        )
        #: The runs that this daemon has started, by the number of their job.
        self._runs: dict[int, _Run] = {}
        self._devices_read_at: float | None = None
        self._retry_at = 0.0
        #: Runs that have ended but are not recorded in the queue yet.
        self._ended: dict[int, Ended] = {}
        self._reboot_policy_applied = False
        self._cache: dict[str, tuple[int, object]] = {}

    def tick(self) -> None:
        """Run every step. Never raises: a failed step is retried at a later tick, and the other steps still run."""
        steps = (
            self.reap,
            self.recover,
            self.read_devices,
            self.stop_runs,
            self.fail_dependents,
            self.start,
            self.notify,
        )
        troubles = [trouble for step in steps if (trouble := self._run_step(step)) is not None]
        if troubles:
            self._retry_at = self._clock.now() + RETRY_S
        if troubles or self._clock.now() >= self._retry_at:
            self.trouble = troubles[0] if troubles else None

    def _run_step(self, step: Callable[[], None]) -> str | None:
        """Run a step; return its error message, or ``None`` if it succeeded."""
        try:
            step()
        except MachineError as error:
            trouble = str(error)
            if trouble != self.trouble:
                log.error("%s", trouble)
        except Exception as error:
            trouble = f"a fault of autotune's own: {type(error).__name__}: {error}"
            if trouble != self.trouble:
                log.exception("step %s", step.__name__)
        else:
            return None
        return trouble

    # The steps, in order.

    def reap(self) -> None:
        """Move jobs whose processes have ended to their next state."""
        # A process can be waited for only once, so its result is kept until the queue has recorded it.
        self._ended |= {ended.job: ended for ended in self._runner.ended()}
        for number, ended in list(self._ended.items()):
            run = self._runs.get(number)
            unsaved_s = self._clock.now() - run.saved if run else 0.0
            self._settle(self.queue.job(number), ended, spent_s=unsaved_s)
            self._runs.pop(number, None)
            del self._ended[number]

    def recover(self) -> None:
        """Do the same for jobs left running by an earlier daemon, after killing their remaining processes."""
        for job in self.running():
            status = job.status
            assert isinstance(status, Running)
            if self._runner.knows(job.id) or job.id in self._ended:
                continue
            # No process survives a reboot.
            if status.boot_id == self._boot_id and self._runner.kill(status.mark):
                continue
            self._settle(job, Ended(job.id, None, self._runner.read_end(job.id, status.mark)))
        if not self._reboot_policy_applied:
            self._apply_reboot_policy()
            self._reboot_policy_applied = True

    def read_devices(self) -> None:
        """Read the devices if a read is due."""
        on_cards = any(device != CPU for device in self.taken())
        every_s = READ_RUNNING_S if on_cards else READ_WAITING_S if self._waiting() else READ_IDLE_S
        # A short quiet period needs more frequent reads.
        every_s = min(every_s, max(READ_RUNNING_S, self._settings.quiet_s / 3))
        if self._devices_read_at is None or self._clock.now() - self._devices_read_at >= every_s:
            self._update_devices()

    def stop_runs(self) -> None:
        """Terminate running jobs that must stop, and kill those that do not exit within the grace period."""
        trouble = None
        for job in self.running():
            if job.id not in self._runs or job.id in self._ended:
                continue
            try:
                self._check(job, self._runs[job.id])
            except MachineError as error:
                # A failed write for one job must not keep the others from being stopped.
                trouble = error
        if trouble is not None:
            raise trouble

    def fail_dependents(self) -> None:
        """Fail jobs whose dependency has failed or was cancelled."""
        for job in self._cached("dependency failed", self.queue.dependency_failed):
            why = f"job {job.request.after}, which it waited for, was not done"
            self._end(job, Failed(ended=timestamp(), exit_code=None, why=why))

    def start(self) -> None:
        """Start the next jobs on quiet devices."""
        if self.stopping or self._clock.now() < self._retry_at:
            return
        tried: set[str] = set()
        while (candidate := self._dispatcher.next(self.taken(), tried)) is not None:
            if not has_room(self.queue.files.folder, ROOM_BYTES):
                raise MachineError(f"the disk of {self.queue.files.folder} is full", advice="free some space.")
            job, device = candidate
            if self._dispatcher.start(job, device):
                self._runs[job.id] = _Run(saved=self._clock.now())
            tried.add(device)

    def notify(self) -> None:
        """Send the notices of ended jobs with ``--on-done``, and record the results."""
        for number, delivered in self._notices.finished().items():
            job = self.queue.job(number)
            self.queue.move(number, job.state, job.status, notice="sent" if delivered else "failed")
            self._notices.forget(number)
        for job in self._cached("notice due", self.queue.notice_due):
            self._notices.start(job)

    # User requests.

    def cancel(self, number: int) -> Job:
        """Cancel a job. Its measurements stay in its study.

        Raises:
            UsageError: the job has already ended.
        """
        return self._request_stop(number, Cancelled(ended=timestamp()))

    def pause(self, number: int) -> Job:
        """Pause a job until `resume`.

        Raises:
            UsageError: the job has ended or is already paused.
        """
        if self.queue.job(number).state is JobState.PAUSED:
            raise UsageError(f"job {number} is paused already")
        return self._request_stop(number, Paused(since=timestamp(), why="somebody paused it"))

    def resume(self, number: int) -> Job:
        """Queue a paused job again.

        Raises:
            UsageError: the job is not paused.
        """
        self._dispatcher.clear_backoff(number)
        return self.queue.move(number, JobState.PAUSED, Queued(), faults=0)

    def retry(self, number: int, sources: dict[str, str]) -> Job:
        """Queue a failed or cancelled job again. It resumes its study.

        Args:
            sources: current hashes of the job's files, by path.

        Raises:
            UsageError: the job is in another state, or its files have changed and its study cannot be resumed.
        """
        job = self.queue.job(number)
        if sources != job.request.sources:
            raise UsageError(
                f"the files of job {number} have changed since it was submitted",
                advice="submit it as a new job, with a --study of its own.",
            )
        self._dispatcher.clear_backoff(number)
        states = (JobState.FAILED, JobState.CANCELLED)
        return self.queue.move(number, states, Queued(), faults=0, spent_s=0.0, notice="none")

    def let_go(self, number: int) -> Job:
        """Stop keeping a job's profile fresh. This applies to every job with the same profile slot.

        Raises:
            UsageError: the job's profile is not kept fresh.
        """
        job = self.queue.job(number)
        if not job.request.keep_fresh:
            raise UsageError(f"the profile of job {number} is not kept fresh")
        slot = getattr(job.status, "slot", None)
        for other in [job, *self.queue.kept_fresh()]:
            if other.id == number or (slot is not None and getattr(other.status, "slot", None) == slot):
                request = other.request.model_copy(update={"keep_fresh": False})
                self.queue.move(other.id, other.state, other.status, request=request)
        return self.queue.job(number)

    def stop(self, *, now: bool) -> None:
        """Start no more jobs and stop the running ones; ``now``: kill them without a grace period.

        These continue when a daemon is started again.
        """
        self.stopping = True
        for number, run in self._runs.items():
            if run.stop_since is None:
                run.stop_since = self._clock.now()
            if now:
                run.stop_since -= self._settings.grace_s
            elif self._runner.knows(number) and not run.terminated:
                run.terminated = True
                self._runner.terminate(number)

    def running(self) -> list[Job]:
        """Return the running jobs."""
        return self._cached("running", lambda: self.queue.jobs({JobState.RUNNING}))

    def taken(self) -> dict[str, Job]:
        """Return the running jobs, by device."""
        return {job.status.device: job for job in self.running() if isinstance(job.status, Running)}

    def waits_for(self, job: Job) -> str | None:
        """Return why a queued job does not run, as a clause; ``None`` if the job is not queued."""
        if job.state is not JobState.QUEUED:
            return None
        return self.trouble or self._dispatcher.obstacle(job, self.taken())

    def waiting(self) -> dict[int, str]:
        """Return why the first `EXPLAINED` queued jobs do not run, by id."""
        return {job.id: self.waits_for(job) or "" for job in self.queue.jobs({JobState.QUEUED}, limit=EXPLAINED)}

    def has_runs(self) -> bool:
        """Return whether processes of jobs may still be running."""
        return bool(self._runs)

    # Parts of the steps.

    def _update_devices(self) -> None:
        self.board.update(self._job_pids)
        self._devices_read_at = self._clock.now()

    def _job_pids(self) -> dict[str, frozenset[int] | None]:
        """Return the pids of each running job, by device; ``None`` for a job that is ending."""
        return {
            device: self._runner.pids(job.id) if self._runner.knows(job.id) else None
            for device, job in self.taken().items()
        }

    def _check(self, job: Job, run: _Run) -> None:
        """Stop a job's run if it must stop, and record its running time from time to time.

        Raises:
            MachineError: the queue cannot be written; the run is stopped nevertheless.
        """
        status, now = job.status, self._clock.now()
        assert isinstance(status, Running)
        spent_s = job.spent_s + now - run.saved
        run.then = status.then or run.then or self._reason_to_stop(job, status, spent_s)
        if run.then is not None and run.stop_since is None:
            run.stop_since = now
            log.info("job %d is asked to end: %s", job.id, getattr(run.then, "why", "it was cancelled"))
        decided = run.then is not None and status.then is None
        try:
            # Recorded before the run is stopped, but a full disk must not keep it from being stopped.
            if decided or now - run.saved >= SAVE_EVERY_S:
                status_then = status.model_copy(update={"then": run.then})
                self.queue.move(job.id, JobState.RUNNING, status_then, spent_s=spent_s)
                run.saved = now
        finally:
            if run.stop_since is not None and not run.terminated:
                run.terminated = True
                self._runner.terminate(job.id)
            if run.stop_since is not None and self._clock.now() - run.stop_since >= self._settings.grace_s:
                self._runner.kill(status.mark)

    def _reason_to_stop(self, job: Job, status: Running, spent_s: float) -> Queued | Failed | None:
        """Return the next state of a running job that must stop; ``None`` if it may continue."""
        state, spec = self.board.states.get(status.device), job.request.spec
        # A script may have any number of processes on a GPU.
        told = self.board.devices.tells_apart or spec.command is None
        if state is not None and state.foreign and told and not spec.allow_busy:
            pids = ", ".join(map(str, sorted(state.foreign)))
            return Queued(why=f"process {pids} came to its card")
        limit_s = job.request.max_s
        if limit_s is not None and spent_s >= limit_s:
            why = f"it ran for the {limit_s / 3600:.3g} h that it may run"
            return Failed(ended=timestamp(), exit_code=None, why=why)
        if job.request.window is not None and not within(job.request.window, self._dispatcher.minute()):
            return Queued(why="the time of day in which it may run is over")
        return None

    def _waiting(self) -> bool:
        return self._cached("counts", self.queue.counts)[JobState.QUEUED] > 0

    def _cached(self, name: str, query: Callable[[], _T]) -> _T:
        """Run a query, or return its last result if the queue has not changed since. This makes an idle tick cheap."""
        cached = self._cache.get(name)
        if cached is None or cached[0] != self.queue.changes:
            changes = self.queue.changes
            cached = self._cache[name] = (changes, query())
        return cached[1]  # type: ignore[return-value]

    def _apply_reboot_policy(self) -> None:
        """Apply ``--on-reboot`` to jobs that were requeued because the daemon was stopped by a shutdown."""
        for job in self.queue.stopped():
            status = job.status
            if isinstance(status, Queued) and status.boot_id != self._boot_id:
                paused = Paused(since=timestamp(), why="the machine was started anew while it ran")
                self._end(job, paused if job.request.on_reboot == "pause" else Queued(why=status.why))

    def _request_stop(self, number: int, then: Paused | Cancelled) -> Job:
        job = self.queue.job(number)
        if isinstance(job.status, Running):
            if isinstance(job.status.then, Cancelled | Failed):
                raise UsageError(f"job {number} is ending already")
            return self.queue.move(number, JobState.RUNNING, job.status.model_copy(update={"then": then}))
        return self._end(job, then, states=(JobState.QUEUED, JobState.PAUSED))

    def _settle(self, job: Job, ended: Ended, *, spent_s: float = 0.0) -> None:
        if not isinstance(job.status, Running):
            return
        self.board.claims.release(job.status.device)
        settled = next_state(job, ended, self._boot_id, stopping=self.stopping)
        if settled.backoff:
            self._dispatcher.back_off(job.id, settled.faults)
        elif job.status.then is not None and isinstance(settled.status, Queued):
            # A random delay keeps two daemons that preempt each other from restarting at the same time.
            self._dispatcher.delay(job.id, self._settings.quiet_s * self._jitter())
        spent_s += job.spent_s
        self._end(job, settled.status, states=(JobState.RUNNING,), spent_s=spent_s, faults=settled.faults)
        self.ended_runs[settled.status.state] += 1

    def _end(self, job: Job, to: Status, states: tuple[JobState, ...] | None = None, **changes: object) -> Job:
        """Move a job to a state that ends it, or ends its current run."""
        if isinstance(to, Done | Failed | Cancelled):
            changes["notice"] = "due" if job.request.on_done else "none"
        moved = self.queue.move(job.id, states or (job.state,), to, **changes)
        why = to.found if isinstance(to, Done) else getattr(to, "why", None)
        log.info("job %d is %s%s", job.id, moved.state.value, f": {why}" if why else "")
        return moved
