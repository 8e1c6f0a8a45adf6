"""Fakes of what the daemon's scheduler touches, and the contract that its real runner keeps too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from autotune.daemon.devices import CPU, Reading
from autotune.daemon.job.runner import Ended, Runner
from autotune.records import Child, End, Job


class ScriptedRunner:
    """A runner whose processes do what they are told, and nothing by themselves.

    Args:
        polite: a process that is asked to end does so, with the exit code of an interrupted search.
    """

    def __init__(self, *, polite: bool = True) -> None:
        self.polite = polite
        #: ``(job, device, mark)`` of every run that was started, in order.
        self.started: list[tuple[int, str, str]] = []
        #: Jobs that were asked to end, in order; marks that were killed, in order.
        self.asked: list[int] = []
        self.killed: list[str] = []
        #: Marks of runs that were left behind and live, and of those that no signal ends.
        self.survivors: set[str] = set()
        self.stuck: set[str] = set()
        #: What `start` raises.
        self.refuses: OSError | None = None
        #: Last words of runs by earlier daemons, by job and mark.
        self.left: dict[tuple[int, str], End] = {}
        self._running: dict[int, str] = {}
        self._codes: dict[int, tuple[int | None, End | None]] = {}

    def finish(self, job: int, exit_code: int = 0, *, message: str | None = None, silent: bool = False) -> None:
        """Let a running process end.

        Args:
            message: its last words' sentence. silent: it has no last words.
        """
        end = None if silent else End(mark=self._running[job], exit_code=exit_code, message=message)
        self._codes[job] = (exit_code, end)

    def start(self, job: Job, device: str, mark: str) -> Child:
        if self.refuses is not None:
            raise self.refuses
        self.started.append((job.id, device, mark))
        self._running[job.id] = mark
        return Child(pid=1_000_000 + len(self.started), started=0)

    def ended(self) -> list[Ended]:
        over = [n for n in self._codes if self._running[n] not in self.stuck]
        return [Ended(n, *self._pop(n)) for n in over]

    def knows(self, job: int) -> bool:
        return job in self._running

    def terminate(self, job: int) -> None:
        self.asked.append(job)
        if self.polite and job not in self._codes:
            self.finish(job, 143, message="interrupted")

    def kill(self, mark: str) -> bool:
        self.killed.append(mark)
        for job, running in self._running.items():
            if running == mark and job not in self._codes:
                self._codes[job] = (-9, None)
                return True
        lived = mark in self.survivors | self.stuck
        self.survivors.discard(mark)
        return lived

    def read_end(self, job: int, mark: str) -> End | None:
        return self.left.get((job, mark))

    def pids(self, job: int) -> frozenset[int] | None:
        return None if job in self._codes else frozenset((1_000_000 + job,))

    def _pop(self, job: int) -> tuple[int | None, End | None]:
        del self._running[job]
        return self._codes.pop(job)


class ScriptedDevices:
    """Devices that read as they are told. An idle processor, where nothing else is said."""

    def __init__(self, *readings: Reading) -> None:
        self.readings: dict[str, Reading] = {r.name: r for r in readings or (Reading(CPU, "CPU"),)}
        #: How often they were read.
        self.reads = 0
        #: Called before each reading: the moment between a claim and a start is one.
        self.before_read: Callable[[int], None] = lambda reads: None

    def say(self, *readings: Reading) -> None:
        """Let devices read so from now on."""
        self.readings |= {r.name: r for r in readings}

    def read(self) -> list[Reading]:
        self.reads += 1
        self.before_read(self.reads)
        return list(self.readings.values())

    def foreign(self, reading: Reading, ours: frozenset[int]) -> frozenset[int]:
        return (reading.processes or frozenset()) - ours


class Behaviour(StrEnum):
    """What a job's process is made to do."""

    #: Ends well, with a last word.
    WELL = "well"
    #: Ends with exit code 4, and says why.
    BADLY = "badly"
    #: Kills itself without a word.
    DIES = "dies"
    #: Ends when it is asked to, with exit code 143 and a last word.
    WAITS = "waits"
    #: Does not listen.
    DEAF = "deaf"


@dataclass(frozen=True)
class RunnerRig:
    """What the suite is run on.

    Attributes:
        job: makes a job, with a number of its own, whose process behaves so.
        ready: waits until a job's process behaves as it is to; before that a signal may end it.
        until: waits until a condition holds.
    """

    runner: Runner
    job: Callable[[int, Behaviour], Job]
    ready: Callable[[int], None]
    until: Callable[[Callable[[], bool]], None]

    def over(self, count: int = 1) -> list[Ended]:
        """The runs that end next."""
        found: list[Ended] = []

        def enough() -> bool:
            found.extend(self.runner.ended())
            return len(found) >= count

        self.until(enough)
        return found


class RunnerContract:
    """The suite. Needs a fixture ``rig`` that gives a `RunnerRig`."""

    def test_a_run_that_ends_is_told_of_once_with_its_last_word(self, rig: RunnerRig) -> None:
        child = rig.runner.start(rig.job(1, Behaviour.WELL), CPU, "mark-1")
        assert child.pid > 0 and rig.runner.knows(1)
        assert rig.over() == [Ended(1, 0, End(mark="mark-1", exit_code=0))]
        assert rig.runner.ended() == [] and not rig.runner.knows(1)

    def test_one_that_fails_says_why(self, rig: RunnerRig) -> None:
        rig.runner.start(rig.job(1, Behaviour.BADLY), CPU, "mark-1")
        (ended,) = rig.over()
        assert ended.exit_code == 4
        assert ended.end is not None and ended.end.message == "no such data"

    def test_one_that_dies_says_nothing(self, rig: RunnerRig) -> None:
        rig.runner.start(rig.job(1, Behaviour.DIES), CPU, "mark-1")
        assert rig.over() == [Ended(1, -9, None)]

    def test_one_that_is_asked_to_end_does(self, rig: RunnerRig) -> None:
        rig.runner.start(rig.job(1, Behaviour.WAITS), CPU, "mark-1")
        rig.ready(1)
        assert rig.runner.pids(1)
        rig.runner.terminate(1)
        (ended,) = rig.over()
        assert (ended.exit_code, ended.end is not None) == (143, True)

    def test_one_that_does_not_listen_is_killed(self, rig: RunnerRig) -> None:
        rig.runner.start(rig.job(1, Behaviour.DEAF), CPU, "mark-1")
        rig.ready(1)
        rig.runner.terminate(1)
        assert rig.runner.kill("mark-1")
        assert rig.over() == [Ended(1, -9, None)]
        assert not rig.runner.kill("mark-1")

    def test_several_at_once_are_kept_apart(self, rig: RunnerRig) -> None:
        for number in (1, 2, 3):
            rig.runner.start(rig.job(number, Behaviour.DEAF), CPU, f"mark-{number}")
        assert rig.runner.kill("mark-2")
        assert rig.over() == [Ended(2, -9, None)]
        assert rig.runner.knows(1) and rig.runner.knows(3)
        assert all(rig.runner.kill(f"mark-{number}") for number in (1, 3))
        assert {ended.job for ended in rig.over(2)} == {1, 3}

    def test_an_earlier_runs_last_word_is_not_this_ones(self, rig: RunnerRig) -> None:
        rig.runner.start(rig.job(1, Behaviour.WELL), CPU, "mark-1")
        rig.over()
        assert rig.runner.read_end(1, "mark-2") is None
        rig.runner.start(rig.job(1, Behaviour.DIES), CPU, "mark-2")
        assert rig.over() == [Ended(1, -9, None)]

    def test_nobody_else_is_killed(self, rig: RunnerRig) -> None:
        assert not rig.runner.kill("a mark that nobody carries")
