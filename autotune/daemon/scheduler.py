"""What runs where and when: `Scheduler.tick`, a list of named steps."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from autotune.catalog import source_hash
from autotune.clock import Clock, timestamp
from autotune.daemon.devices import CPU, Board
from autotune.daemon.notices import Notices
from autotune.daemon.runner import Ended, Runner
from autotune.daemon.settings import Settings
from autotune.errors import AutotuneError, MachineError, UsageError
from autotune.files import has_room
from autotune.queue import Queue
from autotune.records import ATTEMPTS, Cancelled, Done, End, Failed, Job, JobState, Paused, Queued, Running, Status

log = logging.getLogger(__name__)

#: How often the devices are read: with a job on a card, with jobs that wait, with none.
LOOK_RUNNING_S = 1.0
LOOK_WAITING_S = 5.0
LOOK_IDLE_S = 15.0
#: How often the seconds that a job has run are written down.
NOTE_EVERY_S = 60.0
#: After a run that ended badly its job waits so long, and twice as long after each further one.
BACK_OFF_S = 60.0
#: When the queue could not be written, nothing begins for so long.
RETRY_S = 5.0
#: Less room than this is none: some jobs' records, and a database's journal.
ROOM_BYTES = 64 * 2**10
#: Exit codes of a search that another time may go better: the environment, a fault of autotune's own, a signal.
_AGAIN = frozenset({5, 70, 129, 130, 143})
_STOPPED = "the daemon was stopped"


@dataclass
class _Run:
    """A run that was started here.

    Attributes:
        noted: until when its seconds are in the job's record. asked: when it was asked to end.
    """

    began: float
    noted: float
    asked: float | None = None


class Scheduler:
    """Moves jobs through the queue. One per queue; for the main thread alone.

    Args:
        clock: for all durations and deadlines. wall_s: UNIX seconds, for what people give as a time of day.
        boot_id: of this start of the machine.
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
        self._wall_s = wall_s
        self._boot_id = boot_id
        self._runs: dict[int, _Run] = {}
        self._looked: float | None = None
        self._try_again = 0.0
        #: After which moment a job that ended badly may be started again.
        self._held_back: dict[int, float] = {}

    def tick(self) -> None:
        """Do everything that is due now. Never raises for what the machine refuses: that is tried again later."""
        if self._clock.now() < self._try_again:
            return
        try:
            for step in (self.reap, self.settle, self.look, self.bring_to_an_end, self.give_up, self.start, self.tell):
                step()
        except MachineError as error:
            if self.trouble != str(error):
                log.error("%s", error)
            self.trouble, self._try_again = str(error), self._clock.now() + RETRY_S

    # The steps, in their order.

    def reap(self) -> None:
        """Jobs whose processes have ended get the state that follows from how."""
        for ended in self._runner.ended():
            run = self._runs.pop(ended.job, None)
            spent_s = 0.0 if run is None else self._clock.now() - run.noted
            self._settle(self.queue.job(ended.job), ended, spent_s=spent_s)

    def settle(self) -> None:
        """The same for jobs that an earlier daemon has left running; what still lives of these is killed first."""
        for job in self.running():
            status = job.status
            assert isinstance(status, Running)
            if self._runner.knows(job.id):
                continue
            same_boot = status.boot_id == self._boot_id
            if same_boot and self._runner.kill(status.mark):
                continue
            self._settle(job, Ended(job.id, None, self._runner.end_of(job.id, status.mark)), rebooted=not same_boot)

    def look(self) -> None:
        """Read the devices, as often as it matters."""
        running = self.running()
        on_cards = any(job.status.device != CPU for job in running if isinstance(job.status, Running))
        every_s = LOOK_RUNNING_S if on_cards else LOOK_WAITING_S if self._waiting() else LOOK_IDLE_S
        # Who is satisfied with a short quiet wants it seen.
        every_s = min(every_s, max(LOOK_RUNNING_S, self._settings.quiet_s / 3))
        if self._looked is None or self._clock.now() - self._looked >= every_s:
            self._look(running)

    def bring_to_an_end(self) -> None:
        """Running jobs that have to make way are asked to end, and killed when they do not."""
        now = self._clock.now()
        for job in self.running():
            run, status = self._runs.get(job.id), job.status
            if run is None or not isinstance(status, Running):
                continue
            then = status.then or self._reason_to_end(job, status, job.spent_s + now - run.noted)
            if then is not None and status.then is None:
                self._note(job, run, status.model_copy(update={"then": then}))
                log.info("job %d is asked to end: %s", job.id, getattr(then, "why", "it was cancelled"))
            elif now - run.noted >= NOTE_EVERY_S:
                self._note(job, run, status)
            if then is not None and run.asked is None:
                run.asked = now
                self._runner.ask_to_end(job.id)
            if run.asked is not None and now - run.asked >= self._settings.grace_s:
                self._runner.kill(status.mark)

    def give_up(self) -> None:
        """Jobs that wait for one that will never be done have failed."""
        for job in self.queue.in_vain():
            why = f"job {job.request.after}, which it waited for, was not done"
            self._end(job, Failed(ended=timestamp(), exit_code=None, why=why))

    def start(self) -> None:
        """Give quiet devices to the jobs whose turn it is."""
        if self.stopping:
            return
        taken = self.taken()
        free = [name for name in self.board.standings if self.board.obstacle(name, taken) is None]
        while free:
            found = self._next(free)
            if found is None:
                break
            if not has_room(self.queue.files.folder, ROOM_BYTES):
                raise MachineError(f"the disk of {self.queue.files.folder} is full", advice="free some space.")
            job, device = found
            self._start(job, device)
            taken = self.taken()
            free = [name for name in free if name != device and self.board.obstacle(name, taken) is None]
        self.trouble = None

    def tell(self) -> None:
        """Who wants to know of a job's end is told."""
        for number, sent in self._notices.ended():
            job = self.queue.job(number)
            self.queue.move(number, job.state, job.status, notice="sent" if sent else "failed")
        for job in self.queue.unnoticed():
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
        self._held_back.pop(number, None)
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
                f"the files of job {number} have changed since it was submitted", advice="submit it as a new job."
            )
        self._held_back.pop(number, None)
        states = (JobState.FAILED, JobState.CANCELLED)
        return self.queue.move(number, states, Queued(), faults=0, spent_s=0.0, notice="none")

    def stop(self, *, now: bool) -> None:
        """Begin nothing more, and end what runs; it goes on when a daemon runs again.

        Args:
            now: without giving it time to end by itself.
        """
        self.stopping = True
        for number, run in self._runs.items():
            if run.asked is None:
                run.asked = self._clock.now()
                self._runner.ask_to_end(number)
            if now:
                run.asked -= self._settings.grace_s

    def running(self) -> list[Job]:
        """Jobs that have a device."""
        return self.queue.jobs({JobState.RUNNING})

    def taken(self) -> dict[str, Job]:
        """Devices with a job on them."""
        return {job.status.device: job for job in self.running() if isinstance(job.status, Running)}

    def has_runs(self) -> bool:
        """Whether processes of ours may still be there."""
        return bool(self._runs)

    # What the steps are made of.

    def _look(self, running: list[Job]) -> None:
        ours = {
            job.status.device: self._runner.pids(job.id) if self._runner.knows(job.id) else frozenset[int]()
            for job in running
            if isinstance(job.status, Running)
        }
        self.board.look(ours)
        self._looked = self._clock.now()

    def _waiting(self) -> bool:
        return self.queue.counts()[JobState.QUEUED] > 0

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
        if job.request.window is not None and not within(job.request.window, self._minute()):
            return Queued(why="the time of day in which it may run is over")
        return None

    def _minute(self) -> int:
        local = datetime.fromtimestamp(self._wall_s())
        return 60 * local.hour + local.minute

    def _next(self, free: list[str]) -> tuple[Job, str] | None:
        """The job whose turn it is on one of these devices."""
        now = self._clock.now()
        found = self.queue.startable(self._wall_s(), self._minute())
        try:
            for job in found:
                if self._held_back.get(job.id, 0.0) > now:
                    continue
                device = next((name for name in free if self.board.fits(name, job)), None)
                if device is not None:
                    return job, device
        finally:
            found.close()  # type: ignore[attr-defined]
        return None

    def _start(self, job: Job, device: str) -> None:
        changed = changed_sources(job)
        if changed is not None:
            why = f"{changed} is not as it was when the job was submitted"
            self._end(job, Failed(ended=timestamp(), exit_code=UsageError.exit_code, why=why))
            return
        mark = uuid.uuid4().hex
        status = Running(since=timestamp(), device=device, boot_id=self._boot_id, mark=mark)
        claimed = self.queue.move(job.id, JobState.QUEUED, status, placed=job.placed or device, runs=job.runs + 1)
        # Somebody may have come while that was written down.
        self._look(self.running())
        trouble = self.board.standings[device].reading.trouble
        if trouble is not None:
            self.queue.move(job.id, JobState.RUNNING, Queued(why=trouble), placed=job.placed, runs=job.runs)
            return
        try:
            child = self._runner.start(claimed, device, mark)
        except OSError as error:
            why = f"its process cannot be started: {error.strerror or error}"
            self._end(claimed, Failed(ended=timestamp(), exit_code=MachineError.exit_code, why=why))
            return
        now = self._clock.now()
        self._runs[job.id] = _Run(began=now, noted=now)
        self.queue.move(job.id, JobState.RUNNING, status.model_copy(update={"child": child}))
        log.info("job %d (%s) runs on %s, process %d", job.id, job.request.spec.name, device, child.pid)

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

    def _settle(self, job: Job, ended: Ended, *, spent_s: float = 0.0, rebooted: bool = False) -> None:
        status = job.status
        assert isinstance(status, Running)
        to, faults = self._verdict(job, status, ended, rebooted=rebooted)
        self.ended_runs[to.state] += 1
        self._end(job, to, states=(JobState.RUNNING,), spent_s=job.spent_s + spent_s, faults=faults)

    def _verdict(self, job: Job, status: Running, ended: Ended, *, rebooted: bool) -> tuple[Status, int]:
        """What a job whose processes have ended becomes, and how many bad ends in a row that makes."""
        # What it said itself comes first: a process that dies while it is torn down has done its work.
        code = ended.end.exit_code if ended.end is not None else ended.exit_code
        if code == 0 and ended.end is not None:
            return Done(ended=timestamp(), found=ended.end.found, slot=ended.end.slot), 0
        if status.then is not None:
            # When it was decided is not when it has ended.
            if isinstance(status.then, Failed | Cancelled):
                return status.then.model_copy(update={"ended": timestamp()}), job.faults
            return status.then, job.faults
        if self.stopping:
            return Queued(why=_STOPPED), job.faults
        if code is None:
            if rebooted and job.request.on_reboot == "pause":
                return Paused(since=timestamp(), why="the machine was started anew while it ran"), job.faults
            return Queued(
                why="the machine was started anew" if rebooted else "the daemon was ended while it ran"
            ), job.faults
        why = what_went_wrong(code, ended.end)
        # No last word: it did not come to an end of its own, whatever its exit code says.
        if code in _AGAIN or code < 0 or ended.end is None:
            faults = job.faults + 1
            if faults < ATTEMPTS:
                self._held_back[job.id] = self._clock.now() + BACK_OFF_S * 2 ** (faults - 1)
                return Queued(why=why), faults
            return Failed(ended=timestamp(), exit_code=max(code, 1), why=f"{why}; {faults} times in a row"), faults
        return Failed(ended=timestamp(), exit_code=code, why=why), job.faults

    def _end(self, job: Job, to: Status, states: tuple[JobState, ...] | None = None, **changes: object) -> Job:
        """Let a job go into a state that ends it, or a run of it."""
        if isinstance(to, Done | Failed | Cancelled):
            changes["notice"] = "due" if job.request.on_done else "none"
        moved = self.queue.move(job.id, states or (job.state,), to, **changes)
        why = to.found if isinstance(to, Done) else getattr(to, "why", None)
        log.info("job %d is %s%s", job.id, moved.state.value, f": {why}" if why else "")
        return moved


def within(window: tuple[int, int], minute: int) -> bool:
    """Whether a minute of the day lies in a window, which may go over midnight."""
    opens, closes = window
    return opens <= minute < closes if opens < closes else minute >= opens or minute < closes


def changed_sources(job: Job) -> str | None:
    """The first of a job's files that is not as it was when the job was submitted."""
    for path, submitted in job.request.sources.items():
        try:
            if source_hash(Path(path)) != submitted:
                return path
        except AutotuneError:
            return path
    return None


def what_went_wrong(code: int, end: End | None) -> str:
    """How a run ended, in its own words where it had some."""
    if end is not None and end.message:
        return end.message if not end.advice else f"{end.message.rstrip('.')}; {end.advice}"
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
