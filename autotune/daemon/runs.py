"""The runs that this daemon has started: how long they have run, and how they are stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from autotune.base.clock import Clock, timestamp
from autotune.daemon.devices import Board
from autotune.daemon.dispatcher import within
from autotune.daemon.job.runner import Runner
from autotune.daemon.queue import Queue
from autotune.daemon.settings import Settings
from autotune.base.records import Cancelled, Failed, Job, JobState, Paused, Queued, Running

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


class Runs:
    """The runs of one daemon, by the number of their job.

    Args:
        minute: returns the minute of the day, local time.
    """

    def __init__(
        self,
        queue: Queue,
        runner: Runner,
        board: Board,
        settings: Settings,
        clock: Clock,
        minute: Callable[[], int],
    ) -> None:
        self._queue = queue
        self._runner = runner
        self._board = board
        self._settings = settings
        self._clock = clock
        self._minute = minute
        self._runs: dict[int, _Run] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __contains__(self, number: int) -> bool:
        return number in self._runs

    def begun(self, number: int) -> None:
        """Enter a run that has just started."""
        self._runs[number] = _Run(saved=self._clock.now())

    def ended(self, number: int) -> None:
        """Forget a run whose end is recorded."""
        self._runs.pop(number, None)

    def unsaved_s(self, number: int) -> float:
        """Seconds that a run has taken since its job's record was last written."""
        run = self._runs.get(number)
        return self._clock.now() - run.saved if run else 0.0

    def stop_all(self, *, now: bool) -> None:
        """Tell every run to stop.

        Args:
            now: kill them at the next check, without a grace period.
        """
        for number, run in self._runs.items():
            if run.stop_since is None:
                run.stop_since = self._clock.now()
            if now:
                run.stop_since -= self._settings.grace_s
            elif self._runner.knows(number) and not run.terminated:
                run.terminated = True
                self._runner.terminate(number)

    def check(self, job: Job) -> None:
        """Stop a job's run if it must stop, and write its running time down from time to time.

        Raises:
            MachineError: the queue cannot be written; the run is stopped all the same.
        """
        run, status, now = self._runs[job.id], job.status, self._clock.now()
        assert isinstance(status, Running)
        run.then = status.then or run.then or self._reason_to_stop(job, status, job.spent_s + now - run.saved)
        if run.then is not None and run.stop_since is None:
            run.stop_since = now
            log.info("job %d is asked to end: %s", job.id, getattr(run.then, "why", "it was cancelled"))
        decided = run.then is not None and status.then is None
        try:
            # Recorded before the run is stopped, but a full disk must not keep it from being stopped.
            if decided or now - run.saved >= SAVE_EVERY_S:
                self._save(job, run, status.model_copy(update={"then": run.then}))
        finally:
            self._stop(job.id, run, status.mark)

    def _stop(self, number: int, run: _Run, mark: str) -> None:
        """Terminate a run that must stop, and kill it after the grace period."""
        if run.stop_since is None:
            return
        if not run.terminated:
            run.terminated = True
            self._runner.terminate(number)
        if self._clock.now() - run.stop_since >= self._settings.grace_s:
            self._runner.kill(mark)

    def _reason_to_stop(self, job: Job, status: Running, spent_s: float) -> Queued | Failed | None:
        """Return the next state of a running job that must stop; ``None`` if it may continue."""
        state = self._board.states.get(status.device)
        if state is not None and state.foreign and not job.request.spec.allow_busy:
            pids = ", ".join(map(str, sorted(state.foreign)))
            return Queued(why=f"process {pids} came to its card")
        limit_s = job.request.max_s
        if limit_s is not None and spent_s >= limit_s:
            why = f"it ran for the {limit_s / 3600:.3g} h that it may run"
            return Failed(ended=timestamp(), exit_code=None, why=why)
        if job.request.window is not None and not within(job.request.window, self._minute()):
            return Queued(why="the time of day in which it may run is over")
        return None

    def _save(self, job: Job, run: _Run, status: Running) -> None:
        now = self._clock.now()
        self._queue.move(job.id, JobState.RUNNING, status, spent_s=job.spent_s + now - run.saved)
        run.saved = now
