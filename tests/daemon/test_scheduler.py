"""The scheduler with a fake clock, scripted devices and a scripted runner, on a real queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autotune.base.errors import MachineError, UsageError
from autotune.base.layout import QueueFiles
from autotune.base.records import CommandRef, Done, End, Failed, Job, JobState, Paused, Queued, Running
from autotune.daemon.devices import BACKOFF_S, CPU, Board, Reading, Settings
from autotune.daemon.notices import Notices
from autotune.daemon.queue import Queue, open_queue
from autotune.daemon.scheduler import RETRY_S, Scheduler
from autotune.workload.catalog import source_hash
from tests.support import FakeClock, ScriptedDevices, ScriptedRunner, make_job_request, make_study_spec

DAY_S = 86_400.0
A, B = "GPU-aaaa", "GPU-bbbb"


def card(name: str, **told: object) -> Reading:
    """Make the reading of a GPU, idle by default."""
    return Reading(name, "NVIDIA H200", **{"processes": frozenset(), **told})  # type: ignore[arg-type]


def on_it(name: str, *pids: int) -> Reading:
    return card(name, processes=frozenset(pids), trouble=f"process {pids[0]} is on it")


@dataclass
class World:
    """A scheduler with its dependencies."""

    folder: Path
    devices: ScriptedDevices = field(default_factory=ScriptedDevices)
    settings: Settings = field(default_factory=lambda: Settings(quiet_s=60.0, grace_s=5.0))
    boot_id: str = "boot-1"
    jitter: float = 0.0

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.wall_s = 1_800_000_000.0
        self.runner = ScriptedRunner()
        self.queue: Queue = open_queue(QueueFiles(self.folder)).queue
        self.scheduler = self.new_daemon()

    def new_daemon(self) -> Scheduler:
        board = Board(self.devices, self.clock, self.settings.quiet_s)
        notices = Notices(self.clock)
        self.scheduler = Scheduler(
            self.queue,
            self.runner,
            board,
            notices,
            self.settings,
            self.clock,
            lambda: self.wall_s,
            self.boot_id,
            jitter=lambda: self.jitter,
        )
        return self.scheduler

    def crash(self) -> None:
        """Replace the daemon by a new one, as after SIGKILL. The old one's runs are not its children."""
        left, self.runner = self.runner, ScriptedRunner()
        self.runner.survivors = {mark for job, _, mark in left.started if left.knows(job)}
        self.queue.close()
        self.new_daemon()

    def submit(self, study: str = "net", **changes: object) -> Job:
        return self.queue.submit(make_job_request(study, **changes))

    def pass_(self, seconds: float, step_s: float = 1.0) -> None:
        """Advance the clock, with a tick after every step."""
        for _ in range(round(seconds / step_s)):
            self.scheduler.tick()
            self.clock.advance(step_s)
            self.wall_s += step_s
        self.scheduler.tick()

    def state(self, number: int) -> JobState:
        return self.queue.job(number).state

    def why(self, number: int) -> str:
        return str(getattr(self.queue.job(number).status, "why", None))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.queue.close()


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[World]:
    """A world with two quiet GPUs and the CPU."""
    found = World(tmp_path, ScriptedDevices(card(A), card(B), Reading(CPU, "CPU")))
    yield found
    found.queue.close()


def source_hash_of(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return source_hash(folder / "mine.py")


class TestWhoRuns:
    def test_one_after_the_other_by_priority_and_then_by_age(self, world: World) -> None:
        for name, priority in (("a", 0), ("b", 5), ("c", 5)):
            world.submit(name, priority=priority)
        world.pass_(60)
        order = []
        for _ in range(3):
            (running,) = world.scheduler.running()
            order.append(running.id)
            world.runner.finish(running.id)
            world.pass_(1)
        assert order == [2, 3, 1]
        assert [world.state(n) for n in (1, 2, 3)] == [JobState.DONE] * 3
        assert [job.runs for job in world.queue.jobs()] == [1, 1, 1]

    def test_not_before_the_machine_has_been_quiet_for_long_enough(self, world: World) -> None:
        world.submit()
        world.pass_(30)
        world.devices.set(Reading(CPU, "CPU", "others use 1.5 of 2 cores"))
        world.pass_(10)
        world.devices.set(Reading(CPU, "CPU"))
        world.pass_(59)
        assert world.runner.started == []
        world.pass_(6)
        assert len(world.runner.started) == 1

    def test_each_card_gets_a_job_and_none_gets_two(self, cards: World) -> None:
        for name in "abc":
            cards.submit(name)
        cards.pass_(70)
        assert [(job, device) for job, device, _ in cards.runner.started] == [(1, A), (2, B)]
        assert cards.state(3) is JobState.QUEUED

    def test_a_search_on_the_processor_goes_beside_nothing_else(self, cards: World) -> None:
        cards.submit("a")
        cards.submit(spec=make_study_spec("b", device="cpu"))
        cards.pass_(70)
        assert [device for _, device, _ in cards.runner.started] == [A]
        cards.runner.finish(1)
        cards.pass_(5)
        cards.submit("c")
        cards.pass_(70)
        assert [(job, device) for job, device, _ in cards.runner.started] == [(1, A), (2, CPU)]

    @pytest.mark.parametrize(("asked", "device"), [(B, B), ("h200", A), ("A100", None)])
    def test_a_job_gets_the_card_that_it_asks_for(self, cards: World, asked: str, device: str | None) -> None:
        cards.submit(gpu=asked)
        cards.pass_(70)
        assert [d for _, d, _ in cards.runner.started] == ([device] if device else [])

    def test_it_goes_on_where_it_began(self, cards: World) -> None:
        cards.submit(gpu="any")
        cards.pass_(70)
        cards.devices.set(on_it(A, 77))
        cards.pass_(20)
        # The other GPU is free, but its measurements would not be comparable.
        assert cards.state(1) is JobState.QUEUED and len(cards.runner.started) == 1
        cards.devices.set(card(A))
        cards.pass_(70)
        assert [d for _, d, _ in cards.runner.started] == [A, A]

    def test_it_waits_for_the_other_job(self, world: World) -> None:
        world.submit("first")
        world.submit("second", after=1, priority=9)
        world.pass_(70)
        assert [j for j, _, _ in world.runner.started] == [1]
        world.runner.finish(1)
        world.pass_(2)
        assert [j for j, _, _ in world.runner.started] == [1, 2]

    def test_what_waits_for_one_that_failed_fails(self, world: World) -> None:
        world.submit("first")
        world.submit("second", after=1)
        world.submit("third", after=2)
        world.pass_(70)
        world.runner.finish(1, 4, message="no such data")
        world.pass_(3)
        assert [world.state(n) for n in (1, 2, 3)] == [JobState.FAILED] * 3
        assert world.why(2) == "job 1, which it waited for, was not done"

    def test_somebody_may_come_between_the_claim_and_the_start(self, cards: World) -> None:
        cards.submit(gpu=A)
        cards.pass_(55)
        cards.devices.before_read = lambda reads: cards.devices.set(on_it(A, 77)) if cards.scheduler.running() else None
        cards.pass_(20)
        assert cards.runner.started == []
        assert (cards.state(1), cards.queue.job(1).runs, cards.queue.job(1).placed) == (JobState.QUEUED, 0, None)
        assert "process 77" in cards.why(1)


class TestAfterOneOfOurOwn:
    """No quiet minute is asked for after a job: nobody else has used the device meanwhile."""

    @pytest.mark.parametrize(
        "left",
        [
            card(A, trouble="it is 40 % busy"),
            card(A, trouble="5000 MiB are in use, and nobody is there", held=True),
            on_it(A, 1_000_001),
        ],
        ids=["use", "memory", "a pid that is gone"],
    )
    def test_what_the_driver_still_shows_of_it_is_ours(self, cards: World, left: Reading) -> None:
        cards.submit("a", gpu=A)
        cards.submit("b", gpu=A)
        cards.pass_(70)
        cards.devices.set(on_it(A, 1_000_001))
        cards.pass_(30)
        cards.devices.set(left)
        cards.runner.finish(1)
        cards.pass_(5)
        assert [job for job, _, _ in cards.runner.started] == [1], "not as long as the card is busy"
        cards.devices.set(card(A))
        cards.pass_(6)
        assert [job for job, _, _ in cards.runner.started] == [1, 2]

    def test_the_cores_too_even_if_nothing_waits_at_its_end(self, world: World) -> None:
        world.submit("a")
        world.pass_(70)
        world.devices.set(Reading(CPU, "CPU", "others use 0.7 of 2 cores"))
        world.runner.finish(1)
        world.pass_(16)
        world.devices.set(Reading(CPU, "CPU"))
        world.submit("b")
        world.pass_(6)
        assert [job for job, _, _ in world.runner.started] == [1, 2]

    @pytest.mark.parametrize("after_s", [3, 40])
    def test_somebody_else_is_waited_for(self, cards: World, after_s: int) -> None:
        cards.submit("a", gpu=A)
        cards.pass_(70)
        cards.runner.finish(1)
        cards.pass_(after_s)
        cards.devices.set(on_it(A, 77))
        cards.submit("b", gpu=A)
        cards.pass_(5)
        cards.devices.set(card(A))
        cards.pass_(50)
        assert len(cards.runner.started) == 1
        cards.pass_(15)
        assert len(cards.runner.started) == 2


class TestAllowBusy:
    BUSY = make_study_spec("busy", mark="busy", allow_busy=True)

    def test_it_starts_beside_others_and_stays(self, cards: World) -> None:
        cards.devices.set(on_it(A, 77), on_it(B, 78))
        cards.submit("patient")
        cards.submit(spec=self.BUSY)
        cards.pass_(2)
        assert [(job, device) for job, device, _ in cards.runner.started] == [(2, A)]
        cards.devices.set(on_it(A, 77, 79, 1_000_001))
        cards.pass_(30)
        assert cards.state(2) is JobState.RUNNING and cards.runner.terminated == []
        assert "process 78 is on it" in str(cards.scheduler.waits_for(cards.queue.job(1)))

    def test_on_the_cores_it_waits_for_no_quiet(self, world: World) -> None:
        world.devices.set(Reading(CPU, "CPU", "others use 1.5 of 2 cores"))
        world.submit(spec=self.BUSY)
        world.pass_(2)
        assert len(world.runner.started) == 1

    @pytest.mark.parametrize(
        "told",
        [{"known": False, "trouble": "Unknown Error", "processes": None}, {"usable": False, "trouble": "it is split"}],
    )
    def test_but_not_on_a_card_that_tells_nothing_or_is_split(self, tmp_path: Path, told: dict[str, object]) -> None:
        world = World(tmp_path, ScriptedDevices(card(A, **told), Reading(CPU, "CPU")))
        world.submit(spec=self.BUSY.model_copy(update={"device": "cuda"}))
        world.pass_(70)
        assert world.runner.started == []
        assert str(told["trouble"]) in str(world.scheduler.waits_for(world.queue.job(1)))
        world.queue.close()

    def test_two_of_our_own_never_share_a_device(self, world: World) -> None:
        world.submit(spec=self.BUSY)
        world.submit(spec=self.BUSY.model_copy(update={"name": "more", "mark": "more"}))
        world.pass_(70)
        assert [job for job, _, _ in world.runner.started] == [1]


class TestUnknownIsNeverIdle:
    def test_a_driver_that_does_not_answer_is_waited_for(self, cards: World) -> None:
        unknown = {"known": False, "trouble": "NVML fails with: Unknown Error", "processes": None}
        cards.devices.set(card(A, **unknown), card(B, **unknown))
        cards.submit()
        cards.pass_(300)
        assert cards.runner.started == []
        cards.devices.set(card(A))
        cards.pass_(50)
        assert cards.runner.started == []
        cards.pass_(20)
        assert [d for _, d, _ in cards.runner.started] == [A]

    def test_a_driver_that_falls_silent_does_not_end_what_runs(self, cards: World) -> None:
        cards.submit()
        cards.pass_(70)
        cards.devices.set(card(A, known=False, trouble="Unknown Error", processes=None))
        cards.pass_(30)
        assert cards.state(1) is JobState.RUNNING and cards.runner.terminated == []

    def test_memory_that_stays_keeps_the_card_from_everybody(self, cards: World) -> None:
        cards.submit("a", gpu=A)
        cards.submit("b", gpu=A)
        cards.pass_(70)
        cards.devices.set(card(A, trouble="5000 MiB are in use and nobody is there", held=True))
        cards.runner.finish(1)
        cards.pass_(120)
        assert cards.scheduler.board.states[A].label == "quarantined"
        assert len(cards.runner.started) == 1
        cards.devices.set(card(A))
        cards.pass_(70)
        assert len(cards.runner.started) == 2


class TestNeighbours:
    @pytest.mark.parametrize("of_script", [False, True])
    def test_a_scripts_own_processes_are_not_taken_for_others_in_a_container(
        self, cards: World, of_script: bool
    ) -> None:
        """There, the driver's pids are not ours, and a script may have any number of processes on a card."""
        cards.devices.tells_apart = False
        command = CommandRef(words=("python", "train.py"), folder="/nowhere") if of_script else None
        cards.submit(gpu=A, spec=make_study_spec("net", mark="mark", command=command))
        cards.pass_(70)
        cards.devices.set(on_it(A, 501, 502))
        cards.pass_(30)
        assert cards.runner.terminated == ([] if of_script else [1])

    def test_a_job_makes_way_within_ten_seconds_and_goes_on_later(self, cards: World) -> None:
        cards.submit(gpu=A)
        cards.pass_(70)
        ours = 1_000_001
        cards.devices.set(on_it(A, ours))
        cards.pass_(30)
        assert cards.runner.terminated == []
        cards.devices.set(on_it(A, ours, 77))
        cards.pass_(3)
        assert cards.runner.terminated == [1]
        assert (cards.state(1), cards.why(1)) == (JobState.QUEUED, "process 77 came to its card")
        cards.devices.set(on_it(A, 77))
        cards.pass_(300)
        assert len(cards.runner.started) == 1
        cards.devices.set(card(A))
        cards.pass_(70)
        assert len(cards.runner.started) == 2 and cards.queue.job(1).faults == 0

    def test_one_that_does_not_end_is_killed_in_time(self, cards: World) -> None:
        cards.runner.polite = False
        cards.submit(gpu=A)
        cards.pass_(70)
        cards.devices.set(on_it(A, 1_000_001, 77))
        cards.pass_(9)
        assert cards.runner.killed[-1:] == [cards.runner.started[0][2]]
        assert cards.state(1) is JobState.QUEUED

    def test_two_that_make_way_for_each_other_do_not_come_back_together(self, cards: World) -> None:
        cards.jitter = 0.5
        cards.submit(gpu=A)
        cards.pass_(70)
        cards.devices.set(on_it(A, 1_000_001, 77))
        cards.pass_(2)
        cards.devices.set(card(A))
        cards.pass_(20)
        assert len(cards.runner.started) == 1
        cards.scheduler.board.quiet_s = 1.0
        cards.pass_(5)
        # The GPU has been quiet for long enough, but the job still waits for half of the quiet time.
        assert len(cards.runner.started) == 1
        cards.pass_(10)
        assert len(cards.runner.started) == 2

    def test_one_that_is_ending_by_itself_is_not_judged_by_who_is_on_its_card(self, cards: World) -> None:
        cards.submit(gpu=A)
        cards.pass_(70)
        cards.devices.before_read = lambda reads: (
            cards.devices.set(on_it(A, 1_000_002)),
            cards.runner._codes.setdefault(1, (-11, None)),
        )
        cards.pass_(3)
        assert cards.runner.terminated == [] and cards.queue.job(1).faults == 1

    def test_how_it_ends_then_is_no_fault_of_its_own(self, cards: World) -> None:
        """The search may succeed or fail at the moment when it is stopped."""
        cards.runner.polite = False
        cards.submit("a", gpu=A)
        cards.submit("b", gpu=B)
        cards.pass_(70)
        cards.devices.set(on_it(A, 77), on_it(B, 77))
        cards.pass_(2)
        cards.runner.finish(1)
        cards.runner.finish(2, 5, message="others were too busy")
        cards.pass_(2)
        assert (cards.state(1), cards.state(2), cards.queue.job(2).faults) == (JobState.DONE, JobState.QUEUED, 0)


class TestTime:
    def test_the_window_opens_and_closes(self, world: World) -> None:
        now = world.scheduler._dispatcher.minute()
        world.submit(window=((now + 10) % 1440, (now + 20) % 1440))
        world.pass_(9 * 60, 30)
        assert world.runner.started == []
        world.pass_(2 * 60, 30)
        assert len(world.runner.started) == 1
        world.pass_(11 * 60, 30)
        assert (world.state(1), world.runner.terminated) == (JobState.QUEUED, [1])
        assert "time of day" in world.why(1)

    @pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
    def test_a_clock_that_jumps_by_a_day_lets_nothing_expire(self, world: World, jump_s: float) -> None:
        world.submit("running", max_s=3600.0)
        world.submit("waiting", window=None)
        world.pass_(70)
        world.wall_s += jump_s
        world.pass_(120)
        assert (world.state(1), world.state(2)) == (JobState.RUNNING, JobState.QUEUED)
        assert world.runner.terminated == []
        world.runner.finish(1)
        world.pass_(5)
        assert world.state(2) is JobState.RUNNING
        assert 115 <= world.queue.job(1).spent_s <= 130

    def test_a_job_is_ended_when_it_has_run_for_long_enough(self, world: World) -> None:
        world.submit(max_s=100.0)
        world.pass_(70)
        world.pass_(50)
        # The time of a run that ended in a crash counts too, except for the seconds since the last save.
        world.pass_(20)
        world.crash()
        world.pass_(75)
        assert world.state(1) is JobState.RUNNING
        world.pass_(50)
        assert world.state(1) is JobState.FAILED and "it may run" in world.why(1)

    def test_not_before(self, world: World) -> None:
        world.submit(not_before=world.wall_s + 500)
        world.pass_(499)
        assert world.runner.started == []
        world.pass_(7)
        assert len(world.runner.started) == 1


class TestEnds:
    @pytest.mark.parametrize("code", [2, 3, 4, 6])
    def test_what_another_time_would_not_mend_fails_at_once(self, world: World, code: int) -> None:
        world.submit()
        world.pass_(70)
        world.runner.finish(1, code, message="so it is")
        world.pass_(2)
        status = world.queue.job(1).status
        assert isinstance(status, Failed) and (status.exit_code, status.why) == (code, "so it is")

    @pytest.mark.parametrize(("code", "silent"), [(5, False), (-9, True), (-11, True), (0, True), (1, True)])
    def test_what_may_go_better_is_tried_three_times(self, world: World, code: int, silent: bool) -> None:
        world.submit()
        world.pass_(70)
        for attempt in (1, 2):
            world.runner.finish(1, code, message="no luck", silent=silent)
            world.pass_(BACKOFF_S * attempt - 5)
            assert (world.state(1), len(world.runner.started)) == (JobState.QUEUED, attempt)
            world.pass_(10)
            assert (world.state(1), len(world.runner.started)) == (JobState.RUNNING, attempt + 1)
        world.runner.finish(1, code, message="no luck", silent=silent)
        world.pass_(2)
        assert world.state(1) is JobState.FAILED and world.why(1).endswith("3 times in a row")

    def test_two_daemons_that_disturb_each_other_do_not_meet_for_ever(self, world: World) -> None:
        world.jitter = 0.5
        world.submit()
        world.pass_(70)
        world.runner.finish(1, 5, message="other processes kept using the cores")
        world.pass_(1.5 * BACKOFF_S - 5)
        assert len(world.runner.started) == 1
        world.pass_(10)
        assert len(world.runner.started) == 2

    def test_one_that_dies_while_it_is_torn_down_has_done_its_work(self, world: World) -> None:
        world.submit()
        world.pass_(70)
        world.runner._codes[1] = (-11, End(mark=world.runner.started[0][2], exit_code=0))
        world.pass_(2)
        assert world.state(1) is JobState.DONE

    def test_one_whose_interpreter_is_gone_waits_for_it_for_hours_and_not_for_ever(self, world: World) -> None:
        """The interpreter's disk may be mounted after the daemon is started."""
        world.runner.start_error = FileNotFoundError(2, "No such file or directory")
        world.submit("a")
        world.submit("b")
        world.pass_(70)
        assert (world.state(1), world.queue.job(1).runs) == (JobState.QUEUED, 0)
        assert world.why(1) == "its process cannot be started: No such file or directory"
        world.runner.start_error = None
        world.pass_(130)
        assert world.state(1) is JobState.RUNNING
        world.runner.finish(1)
        world.runner.start_error = FileNotFoundError(2, "No such file or directory")
        world.pass_(10 * 3600, 60.0)
        assert world.state(2) is JobState.FAILED

    def test_waiting_for_its_interpreter_is_no_failed_run(self, world: World) -> None:
        world.runner.start_error = FileNotFoundError(2, "No such file or directory")
        world.submit()
        world.pass_(900)
        assert (world.state(1), world.queue.job(1).faults) == (JobState.QUEUED, 0)
        world.runner.start_error = None
        world.pass_(3600, 10.0)
        world.runner.finish(1, 5, message="other processes kept using the cores")
        world.pass_(2)
        assert (world.state(1), world.queue.job(1).faults) == (JobState.QUEUED, 1)

    def test_what_the_machine_lacks_now_fails_nobody(self, world: World) -> None:
        world.runner.start_error = BlockingIOError(11, "Resource temporarily unavailable")
        for name in "abc":
            world.submit(name)
        world.pass_(300)
        assert {world.state(n) for n in (1, 2, 3)} == {JobState.QUEUED}
        assert "temporarily unavailable" in str(world.scheduler.trouble)
        world.runner.start_error = None
        world.pass_(10)
        assert (world.state(1), world.queue.job(1).faults, world.scheduler.trouble) == (JobState.RUNNING, 0, None)

    def test_a_text_that_no_system_call_takes_fails_its_job_alone(self, world: World) -> None:
        world.runner.start_error = ValueError("embedded null byte")  # type: ignore[assignment]
        world.submit("a")
        world.pass_(70)
        assert world.state(1) is JobState.FAILED and world.scheduler.trouble is None

    def test_a_file_that_cannot_be_read_now_is_waited_for(self, world: World, tmp_path: Path) -> None:
        file = tmp_path / "mounted-later" / "mine.py"
        world.submit(sources={str(file): source_hash_of(tmp_path, "A = 1\n")})
        world.pass_(70)
        assert world.state(1) is JobState.QUEUED and "cannot be read" in world.why(1)
        file.parent.mkdir()
        file.write_text("A = 1\n")
        world.pass_(130)
        assert world.state(1) is JobState.RUNNING

    def test_a_file_that_has_changed_is_not_run(self, world: World, tmp_path: Path) -> None:
        file = tmp_path / "mine.py"
        file.write_text("A = 1\n")
        world.submit(sources={str(file): "another sum"})
        world.pass_(70)
        assert world.runner.started == []
        assert world.state(1) is JobState.FAILED and "is not as it was" in world.why(1)


class TestWishes:
    def test_cancel_and_pause_while_it_waits(self, world: World) -> None:
        world.submit("a")
        world.submit("b")
        world.scheduler.cancel(1)
        world.scheduler.pause(2)
        assert (world.state(1), world.state(2)) == (JobState.CANCELLED, JobState.PAUSED)
        world.pass_(70)
        assert world.runner.started == []
        world.scheduler.resume(2)
        world.pass_(5)
        assert [j for j, _, _ in world.runner.started] == [2]

    @pytest.mark.parametrize(("wish", "state"), [("cancel", JobState.CANCELLED), ("pause", JobState.PAUSED)])
    def test_cancel_and_pause_while_it_runs(self, world: World, wish: str, state: JobState) -> None:
        world.submit()
        world.pass_(70)
        status = getattr(world.scheduler, wish)(1).status
        assert isinstance(status, Running) and status.then is not None
        world.pass_(2)
        assert (world.state(1), world.runner.terminated) == (state, [1])

    def test_a_wish_survives_a_crash(self, world: World) -> None:
        """The daemon is killed after it acknowledged the request and before it acted on it."""
        world.submit()
        world.pass_(70)
        world.scheduler.cancel(1)
        world.crash()
        world.pass_(2)
        assert world.state(1) is JobState.CANCELLED

    def test_what_cannot_be_wished(self, world: World) -> None:
        world.submit()
        with pytest.raises(UsageError, match="job 1 is queued"):
            world.scheduler.resume(1)
        with pytest.raises(UsageError, match="job 1 is queued"):
            world.scheduler.retry(1, {})
        world.scheduler.cancel(1)
        for wish in (world.scheduler.cancel, world.scheduler.pause, world.scheduler.resume):
            with pytest.raises(UsageError, match="job 1 is cancelled"):
                wish(1)

    def test_retry(self, world: World) -> None:
        world.submit(sources={"/mine.py": "sum"})
        world.scheduler.cancel(1)
        with pytest.raises(UsageError, match="have changed"):
            world.scheduler.retry(1, {"/mine.py": "another"})
        assert world.scheduler.retry(1, {"/mine.py": "sum"}).state is JobState.QUEUED

    def test_stop_ends_what_runs_and_begins_nothing(self, world: World) -> None:
        world.submit("a")
        world.submit("b")
        world.pass_(70)
        world.scheduler.stop(now=False)
        world.pass_(2)
        assert not world.scheduler.has_runs()
        assert (world.why(1), len(world.runner.started)) == ("the daemon was stopped", 1)
        world.crash()
        world.pass_(70)
        assert (world.state(1), world.queue.job(1).faults) == (JobState.RUNNING, 0)

    def test_stop_now_kills(self, world: World) -> None:
        world.runner.polite = False
        world.submit()
        world.pass_(70)
        world.scheduler.stop(now=True)
        world.scheduler.tick()
        world.scheduler.tick()
        assert not world.scheduler.has_runs() and world.state(1) is JobState.QUEUED


class TestRecovery:
    def test_what_survived_is_ended_before_anything_begins(self, world: World) -> None:
        world.submit("a")
        world.submit("b")
        world.pass_(70)
        mark = world.runner.started[0][2]
        world.crash()
        world.runner.stuck = {mark}
        world.pass_(100)
        # The run does not end, so its device is not free, even if it reads as idle.
        assert world.runner.started == [] and set(world.runner.killed) == {mark}
        world.runner.stuck = set()
        world.runner.survivors = set()
        world.pass_(5)
        assert [j for j, _, _ in world.runner.started] == [1]
        assert (world.queue.job(1).runs, world.queue.job(1).faults) == (2, 0)

    def test_one_that_ended_while_nobody_looked_is_believed(self, world: World) -> None:
        world.submit("a")
        world.submit("b")
        world.pass_(70)
        mark = world.runner.started[0][2]
        world.crash()
        world.runner.survivors = set()
        world.runner.ends = {(1, mark): End(mark=mark, exit_code=0)}
        world.pass_(2)
        assert world.state(1) is JobState.DONE

    @pytest.mark.parametrize(("policy", "state"), [("resume", JobState.RUNNING), ("pause", JobState.PAUSED)])
    def test_after_a_reboot_the_policy_is_followed(self, world: World, policy: str, state: JobState) -> None:
        world.submit(on_reboot=policy)
        world.pass_(70)
        world.boot_id = "boot-2"
        world.crash()
        world.pass_(70)
        # No process survives a reboot, so nothing is killed.
        assert world.runner.killed == []
        assert world.state(1) is state

    def test_a_machine_that_goes_down_with_it_again_and_again_is_spared(self, world: World) -> None:
        world.submit()
        for number in range(2, 5):
            world.pass_(70)
            assert world.state(1) is JobState.RUNNING
            world.boot_id = f"boot-{number}"
            world.crash()
        world.pass_(5)
        assert world.state(1) is JobState.PAUSED and world.why(1) == "the machine went down 3 times while it ran"

    @pytest.mark.parametrize(("policy", "state"), [("resume", JobState.RUNNING), ("pause", JobState.PAUSED)])
    def test_a_machine_that_is_shut_down_in_order(self, world: World, policy: str, state: JobState) -> None:
        """The shutdown stops the daemon first. The reboot policy applies as after a crash."""
        world.submit(on_reboot=policy)
        world.pass_(70)
        world.scheduler.stop(now=False)
        world.pass_(2)
        assert world.state(1) is JobState.QUEUED
        world.boot_id = "boot-2"
        world.crash()
        world.pass_(70)
        assert (world.state(1), world.queue.job(1).faults) == (state, 0)

    def test_a_daemon_that_is_only_started_anew_goes_on(self, world: World) -> None:
        world.submit(on_reboot="pause")
        world.pass_(70)
        world.scheduler.stop(now=False)
        world.pass_(2)
        world.crash()
        world.pass_(70)
        assert world.state(1) is JobState.RUNNING

    def test_a_claim_without_a_process_is_given_back(self, world: World) -> None:
        world.submit()
        status = Running(since="", device=CPU, boot_id="boot-1", mark="never started")
        world.queue.move(1, JobState.QUEUED, status, runs=1)
        world.crash()
        world.pass_(70)
        assert [j for j, _, _ in world.runner.started] == [1]


class TestTrouble:
    def test_a_queue_that_cannot_be_written_is_waited_for(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        world.submit("a")
        world.submit("b")
        world.pass_(70)
        real = world.queue.move
        broken = MachineError("queue.db: the disk is full")

        def move(*args: object, **changes: object) -> Job:
            raise broken

        monkeypatch.setattr(world.queue, "move", move)
        world.runner.finish(1)
        mark = world.runner.started[0][2]
        world.runner.ends = {(1, mark): End(mark=mark, exit_code=0)}
        world.pass_(30)
        assert world.scheduler.trouble == "queue.db: the disk is full"
        assert world.state(1) is JobState.RUNNING and len(world.runner.started) == 1
        monkeypatch.setattr(world.queue, "move", real)
        world.pass_(RETRY_S + 1)
        assert (world.state(1), world.state(2)) == (JobState.DONE, JobState.RUNNING)
        assert world.scheduler.trouble is None

    def test_a_full_disk_keeps_nobody_from_making_way(self, cards: World, monkeypatch: pytest.MonkeyPatch) -> None:
        cards.runner.polite = False
        cards.submit(gpu=A)
        cards.pass_(70)

        def move(*args: object, **changes: object) -> Job:
            raise MachineError("queue.db: the disk is full")

        real = cards.queue.move
        monkeypatch.setattr(cards.queue, "move", move)
        cards.devices.set(on_it(A, 1_000_001, 77))
        cards.pass_(9)
        assert cards.runner.terminated == [1] and cards.runner.killed[-1:] == [cards.runner.started[0][2]]
        monkeypatch.setattr(cards.queue, "move", real)
        cards.pass_(RETRY_S + 1)
        # The result was kept until the queue could be written.
        assert cards.state(1) is JobState.QUEUED and cards.scheduler.trouble is None

    def test_how_runs_ended_is_kept_until_it_can_be_written(
        self, cards: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in "ab":
            cards.submit(name)
        cards.pass_(70)

        def move(*args: object, **changes: object) -> Job:
            raise MachineError("queue.db: the disk is full")

        real = cards.queue.move
        monkeypatch.setattr(cards.queue, "move", move)
        cards.runner.finish(1, 4, message="no such data")
        cards.runner.finish(2, 0)
        cards.pass_(20)
        cards.scheduler.stop(now=False)
        monkeypatch.setattr(cards.queue, "move", real)
        cards.pass_(RETRY_S + 1)
        assert (cards.state(1), cards.why(1)) == (JobState.FAILED, "no such data")
        assert cards.state(2) is JobState.DONE and not cards.scheduler.has_runs()

    def test_a_fault_in_one_step_keeps_no_other_from_its_work(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world.submit()
        world.pass_(70)
        monkeypatch.setattr(world.scheduler.board, "update", lambda ours: 1 / 0)
        world.scheduler.cancel(1)
        world.pass_(20)
        assert world.state(1) is JobState.CANCELLED
        assert "ZeroDivisionError" in str(world.scheduler.trouble)

    def test_nothing_is_started_without_room_for_what_it_will_say(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("autotune.daemon.scheduler.has_room", lambda folder, size: False)
        world.submit()
        world.pass_(70)
        assert world.runner.started == [] and "is full" in str(world.scheduler.trouble)
        monkeypatch.undo()
        world.pass_(RETRY_S + 1)
        assert len(world.runner.started) == 1 and world.scheduler.trouble is None

    def test_states_hold_only_what_exists_in_them(self) -> None:
        for status, fields in (
            (Queued(), {"state", "why", "boot_id"}),
            (Done(ended=""), {"state", "ended", "found", "open", "slot"}),
            (Paused(since="", why=""), {"state", "since", "why"}),
        ):
            assert set(type(status).model_fields) == fields
