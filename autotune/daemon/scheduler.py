"""What runs where and when: `Scheduler.tick`, a list of named steps."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from autotune.clock import Clock, timestamp
from autotune.daemon.devices import CPU, Board
from autotune.daemon.job.next_state import next_state
from autotune.daemon.job.runner import Ended, Runner
from autotune.daemon.notices import Notices
from autotune.daemon.queue import Queue
from autotune.daemon.settings import Settings
from autotune.daemon.starting import Starting, within
from autotune.errors import MachineError, UsageError
from autotune.files import has_room
from autotune.records import Cancelled, Done, Failed, Job, JobState, Paused, Queued, Running, Status

_T = TypeVar("_T")
log = logging.getLogger(__name__)

#: How often the devices are read: with a job on a card, with jobs that wait, with none.
LOOK_RUNNING_S = 1.0
LOOK_WAITING_S = 5.0
LOOK_IDLE_S = 15.0
#: How often the seconds that a job has run are written down.
NOTE_EVERY_S = 10.0
#: When the queue could not be written, nothing begins for so long.
RETRY_S = 5.0
#: Less room than this is none: some jobs' records, and a database's journal.
ROOM_BYTES = 64 * 2**10


@dataclass
class _Run:
    """A run that was started here.

    Attributes:
        noted: until when its seconds are in the job's record.
        asked: since when it is to end. told: it knows. then: what its job is to become.
    """

    noted: float
    asked: float | None = None
    told: bool = False
    then: Queued | Paused | Failed | Cancelled | None = None


class Scheduler:
    """Moves jobs through the queue. One per queue; for the main thread alone.

    Args:
        clock: for all durations and deadlines. wall_s: UNIX seconds, for what people give as a time of day.
        boot_id: of this start of the machine. jitter: a number between 0 and 1, another one each time.
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
        #: Why nothing is started at all; ``None``: nothing stands in the way.
        self.trouble: str | None = None
        self.stopping = False
        #: Runs that have ended, by what their job became.
        self.ended_runs: Counter[JobState] = Counter()
        self._runner = runner
        self._notices = notices
        self._settings = settings
        self._clock = clock
        self._boot_id = boot_id
        self._jitter = jitter
        self._starting = Starting(queue, runner, board, clock, wall_s, boot_id, look=self._look, end=self._end)
        self._runs: dict[int, _Run] = {}
        self._looked: float | None = None
        self._try_again = 0.0
        #: Runs that have ended and are not written down yet.
        self._ended: dict[int, Ended] = {}
        self._followed = False
        self._answers: dict[str, tuple[int, object]] = {}

    def tick(self) -> None:
        """Do everything that is due now. Never raises: what one step cannot do now it tries again later, and no step
        keeps another one from what it has to do."""
        steps = (self.reap, self.settle, self.look, self.bring_to_an_end, self.give_up, self.start, self.tell)
        troubles = [trouble for step in steps if (trouble := self._take(step)) is not None]
        if troubles:
            self._try_again = self._clock.now() + RETRY_S
        if troubles or self._clock.now() >= self._try_again:
            self.trouble = troubles[0] if troubles else None

    def _take(self, step: Callable[[], None]) -> str | None:
        """Take a step; returns what kept it from being done."""
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

    # The steps, in their order.

    def reap(self) -> None:
        """Jobs whose processes have ended get the state that follows from how."""
        # Kept until it is written down: a process is waited for once.
        self._ended |= {ended.job: ended for ended in self._runner.ended()}
        for number, ended in list(self._ended.items()):
            run = self._runs.get(number)
            self._settle(self.queue.job(number), ended, spent_s=self._clock.now() - run.noted if run else 0.0)
            self._runs.pop(number, None)
            del self._ended[number]

    def settle(self) -> None:
        """The same for jobs that an earlier daemon has left running; what still lives of these is killed first."""
        for job in self.running():
            status = job.status
            assert isinstance(status, Running)
            if self._runner.knows(job.id) or job.id in self._ended:
                continue
            # Of another start of the machine nothing lives.
            if status.boot_id == self._boot_id and self._runner.kill(status.mark):
                continue
            self._settle(job, Ended(job.id, None, self._runner.end_of(job.id, status.mark)))
        if not self._followed:
            self._follow_the_policy()
            self._followed = True

    def look(self) -> None:
        """Read the devices, as often as it matters."""
        on_cards = any(device != CPU for device in self.taken())
        every_s = LOOK_RUNNING_S if on_cards else LOOK_WAITING_S if self._waiting() else LOOK_IDLE_S
        # Who is satisfied with a short quiet wants it seen.
        every_s = min(every_s, max(LOOK_RUNNING_S, self._settings.quiet_s / 3))
        if self._looked is None or self._clock.now() - self._looked >= every_s:
            self._look()

    def bring_to_an_end(self) -> None:
        """Running jobs that have to make way are asked to end, and killed when they do not."""
        trouble = None
        for job in self.running():
            run = self._runs.get(job.id)
            if run is None or job.id in self._ended:
                continue
            try:
                self._make_way(job, run)
            except MachineError as error:
                # What one job's record cannot take keeps no other from making way.
                trouble = error
        if trouble is not None:
            raise trouble

    def give_up(self) -> None:
        """Jobs that wait for one that will never be done have failed."""
        for job in self._known("in vain", self.queue.in_vain):
            why = f"job {job.request.after}, which it waited for, was not done"
            self._end(job, Failed(ended=timestamp(), exit_code=None, why=why))

    def start(self) -> None:
        """Give quiet devices to the jobs whose turn it is."""
        if self.stopping or self._clock.now() < self._try_again:
            return
        taken = self.taken()
        free = [name for name in self.board.standings if self.board.obstacle(name, taken) is None]
        while free:
            found = self._starting.next(free)
            if found is None:
                break
            if not has_room(self.queue.files.folder, ROOM_BYTES):
                raise MachineError(f"the disk of {self.queue.files.folder} is full", advice="free some space.")
            job, device = found
            if self._starting.begin(job, device):
                self._runs[job.id] = _Run(noted=self._clock.now())
            taken = self.taken()
            free = [name for name in free if name != device and self.board.obstacle(name, taken) is None]

    def tell(self) -> None:
        """Who wants to know of a job's end is told."""
        for number, taken in self._notices.over().items():
            job = self.queue.job(number)
            self.queue.move(number, job.state, job.status, notice="sent" if taken else "failed")
            self._notices.forget(number)
        for job in self._known("unnoticed", self.queue.unnoticed):
            self._notices.begin(job)

    # What people ask for.

    def cancel(self, number: int) -> Job:
        """End a job for good; what was measured stays in its study.

        Raises:
            UsageError: it has ended already.
        """
        return self._ask(number, Cancelled(ended=timestamp()))

    def pause(self, number: int) -> Job:
        """Set a job aside until `resume`.

        Raises:
            UsageError: it has ended, or is paused already.
        """
        if self.queue.job(number).state is JobState.PAUSED:
            raise UsageError(f"job {number} is paused already")
        return self._ask(number, Paused(since=timestamp(), why="somebody paused it"))

    def resume(self, number: int) -> Job:
        """Let a paused job go on.

        Raises:
            UsageError: it is not paused.
        """
        self._starting.forget(number)
        return self.queue.move(number, JobState.PAUSED, Queued(), faults=0)

    def retry(self, number: int, sources: dict[str, str]) -> Job:
        """Queue a job again that failed or was cancelled. It goes on with its study.

        Args:
            sources: its files as they are now.

        Raises:
            UsageError: it did not end so; or its files are others now, so that nothing could go on.
        """
        job = self.queue.job(number)
        if sources != job.request.sources:
            raise UsageError(
                f"the files of job {number} have changed since it was submitted",
                advice="submit it as a new job, with a --study of its own.",
            )
        self._starting.forget(number)
        states = (JobState.FAILED, JobState.CANCELLED)
        return self.queue.move(number, states, Queued(), faults=0, spent_s=0.0, notice="none")

    def let_go(self, number: int) -> Job:
        """Do not keep a job's profile fresh any more, nor that of any other job of the same training.

        Raises:
            UsageError: it is not kept fresh.
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
        """Begin nothing more, and end what runs; it goes on when a daemon runs again.

        Args:
            now: without giving it time to end by itself.
        """
        self.stopping = True
        for number, run in self._runs.items():
            if run.asked is None:
                run.asked = self._clock.now()
            if now:
                run.asked -= self._settings.grace_s
            elif self._runner.knows(number) and not run.told:
                run.told = True
                self._runner.ask_to_end(number)

    def running(self) -> list[Job]:
        """Jobs that have a device."""
        return self._known("running", lambda: self.queue.jobs({JobState.RUNNING}))

    def taken(self) -> dict[str, Job]:
        """Devices with a job on them."""
        return {job.status.device: job for job in self.running() if isinstance(job.status, Running)}

    def waits_for(self, job: Job) -> str | None:
        """Why a queued job does not run, as a clause; ``None`` for one that is not queued."""
        return None if job.state is not JobState.QUEUED else self.trouble or self._starting.obstacle(job, self.taken())

    def has_runs(self) -> bool:
        """Whether processes of ours may still be there."""
        return bool(self._runs)

    # What the steps are made of.

    def _look(self) -> None:
        self.board.look(self._ours)
        self._looked = self._clock.now()

    def _ours(self) -> dict[str, frozenset[int] | None]:
        """The processes of each job, by its device; ``None`` for one that is ending."""
        return {
            device: self._runner.pids(job.id) if self._runner.knows(job.id) else None
            for device, job in self.taken().items()
        }

    def _waiting(self) -> bool:
        return self._known("counts", self.queue.counts)[JobState.QUEUED] > 0

    def _known(self, what: str, ask: Callable[[], _T]) -> _T:
        """What the queue says, asked again only when it has changed since: a tick that finds no news costs nothing."""
        seen = self._answers.get(what)
        if seen is None or seen[0] != self.queue.changes:
            changes = self.queue.changes
            seen = self._answers[what] = (changes, ask())
        return seen[1]  # type: ignore[return-value]

    def _follow_the_policy(self) -> None:
        """What was set aside when the machine was shut down: the daemon was told to stop, and has."""
        for job in self.queue.stopped():
            status = job.status
            if isinstance(status, Queued) and status.boot_id != self._boot_id:
                paused = Paused(since=timestamp(), why="the machine was started anew while it ran")
                self._end(job, paused if job.request.on_reboot == "pause" else Queued(why=status.why))

    def _make_way(self, job: Job, run: _Run) -> None:
        now, status = self._clock.now(), job.status
        assert isinstance(status, Running)
        run.then = status.then or run.then or self._reason_to_end(job, status, job.spent_s + now - run.noted)
        if run.then is not None and run.asked is None:
            run.asked = now
            log.info("job %d is asked to end: %s", job.id, getattr(run.then, "why", "it was cancelled"))
        decided = run.then is not None and status.then is None
        try:
            # Written down before it is asked, but a full disk does not keep it from being asked.
            if decided or now - run.noted >= NOTE_EVERY_S:
                self._note(job, run, status.model_copy(update={"then": run.then}))
        finally:
            self._end_run(job.id, run, status.mark)

    def _end_run(self, number: int, run: _Run, mark: str) -> None:
        """Ask a run to end, and kill it when it does not."""
        if run.asked is None:
            return
        if not run.told:
            run.told = True
            self._runner.ask_to_end(number)
        if self._clock.now() - run.asked >= self._settings.grace_s:
            self._runner.kill(mark)

    def _reason_to_end(self, job: Job, status: Running, spent_s: float) -> Queued | Failed | None:
        """What is to become of a running job that has to make way now."""
        standing = self.board.standings.get(status.device)
        if standing is not None and standing.foreign:
            pids = ", ".join(map(str, sorted(standing.foreign)))
            return Queued(why=f"process {pids} came to its card")
        limit_s = job.request.max_s
        if limit_s is not None and spent_s >= limit_s:
            why = f"it ran for the {limit_s / 3600:.3g} h that it may run"
            return Failed(ended=timestamp(), exit_code=None, why=why)
        if job.request.window is not None and not within(job.request.window, self._starting.minute()):
            return Queued(why="the time of day in which it may run is over")
        return None

    def _note(self, job: Job, run: _Run, status: Running) -> None:
        now = self._clock.now()
        self.queue.move(job.id, JobState.RUNNING, status, spent_s=job.spent_s + now - run.noted)
        run.noted = now

    def _ask(self, number: int, then: Paused | Cancelled) -> Job:
        job = self.queue.job(number)
        if isinstance(job.status, Running):
            if isinstance(job.status.then, Cancelled | Failed):
                raise UsageError(f"job {number} is ending already")
            return self.queue.move(number, JobState.RUNNING, job.status.model_copy(update={"then": then}))
        return self._end(job, then, states=(JobState.QUEUED, JobState.PAUSED))

    def _settle(self, job: Job, ended: Ended, *, spent_s: float = 0.0) -> None:
        if not isinstance(job.status, Running):
            return
        found = next_state(job, ended, self._boot_id, stopping=self.stopping)
        if found.again:
            self._starting.back_off(job.id, found.faults)
        elif job.status.then is not None and isinstance(found.status, Queued):
            # Two daemons that make way for each other must not come back in the same moment.
            self._starting.let_wait(job.id, self._settings.quiet_s * self._jitter())
        spent_s += job.spent_s
        self._end(job, found.status, states=(JobState.RUNNING,), spent_s=spent_s, faults=found.faults)
        self.ended_runs[found.status.state] += 1

    def _end(self, job: Job, to: Status, states: tuple[JobState, ...] | None = None, **changes: object) -> Job:
        """Let a job go into a state that ends it, or a run of it."""
        if isinstance(to, Done | Failed | Cancelled):
            changes["notice"] = "due" if job.request.on_done else "none"
        moved = self.queue.move(job.id, states or (job.state,), to, **changes)
        why = to.found if isinstance(to, Done) else getattr(to, "why", None)
        log.info("job %d is %s%s", job.id, moved.state.value, f": {why}" if why else "")
        return moved
