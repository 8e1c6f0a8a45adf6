"""Fakes of the daemon's runner and devices, and the contract of `autotune.daemon.runner.Runner`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from autotune.base.records import Child, End, Job
from autotune.daemon.devices import CPU, Reading
from autotune.daemon.runner import Ended, Runner


class ScriptedRunner:
    """A runner without processes. A run ends when the test calls `finish`, or when it is terminated or killed.

    Args:
        polite: a run that is terminated ends at once, with the exit code of an interrupted search.
    """

    def __init__(self, *, polite: bool = True) -> None:
        self.polite = polite
        #: ``(job, device, mark)`` of every run started, in order.
        self.started: list[tuple[int, str, str]] = []
        #: Jobs that were terminated, in order.
        self.terminated: list[int] = []
        #: Marks that were killed, in order.
        self.killed: list[str] = []
        #: Marks of runs of an earlier daemon that are still alive.
        self.survivors: set[str] = set()
        #: Marks of runs that no signal can end.
        self.stuck: set[str] = set()
        #: Error that `start` raises.
        self.start_error: OSError | None = None
        #: End records of runs of earlier daemons, by job and mark.
        self.ends: dict[tuple[int, str], End] = {}
        self._running: dict[int, str] = {}
        self._codes: dict[int, tuple[int | None, End | None]] = {}

    def finish(self, job: int, exit_code: int = 0, *, message: str | None = None, silent: bool = False) -> None:
        """End a run.

        Args:
            message: the message of its end record.
            silent: write no end record.
        """
        end = None if silent else End(mark=self._running[job], exit_code=exit_code, message=message)
        self._codes[job] = (exit_code, end)

    def start(self, job: Job, device: str, mark: str) -> Child:
        if self.start_error is not None:
            raise self.start_error
        self.started.append((job.id, device, mark))
        self._running[job.id] = mark
        return Child(pid=1_000_000 + len(self.started), started=0)

    def ended(self) -> list[Ended]:
        over = [n for n in self._codes if self._running[n] not in self.stuck]
        return [Ended(n, *self._pop(n)) for n in over]

    def knows(self, job: int) -> bool:
        return job in self._running

    def terminate(self, job: int) -> None:
        self.terminated.append(job)
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
        return self.ends.get((job, mark))

    def pids(self, job: int) -> frozenset[int] | None:
        return None if job in self._codes else frozenset((1_000_000 + job,))

    def _pop(self, job: int) -> tuple[int | None, End | None]:
        del self._running[job]
        return self._codes.pop(job)


class ScriptedDevices:
    """Devices with readings set by the test. By default there is only an idle CPU."""

    tells_apart = True

    def __init__(self, *readings: Reading) -> None:
        self.readings: dict[str, Reading] = {r.name: r for r in readings or (Reading(CPU, "CPU"),)}
        #: Number of calls of `read`.
        self.reads = 0
        #: Called at the start of each `read` with the number of reads, for example between a claim and its start.
        self.before_read: Callable[[int], None] = lambda reads: None

    def set(self, *readings: Reading) -> None:
        """Set the readings of some devices."""
        self.readings |= {r.name: r for r in readings}

    def read(self) -> list[Reading]:
        self.reads += 1
        self.before_read(self.reads)
        return list(self.readings.values())

    def foreign(self, reading: Reading, ours: frozenset[int]) -> frozenset[int]:
        return (reading.processes or frozenset()) - ours


class Behaviour(StrEnum):
    """The behaviour of a job's process."""

    #: Exits with 0 and an end record.
    WELL = "well"
    #: Exits with 4 and an end record with a message.
    BADLY = "badly"
    #: Kills itself with SIGKILL, without an end record.
    DIES = "dies"
    #: Runs until SIGTERM, then exits with 143 and an end record.
    WAITS = "waits"
    #: Ignores SIGTERM.
    DEAF = "deaf"


@dataclass(frozen=True)
class RunnerRig:
    """The runner under test.

    Attributes:
        job: makes a job with the given id and behaviour.
        ready: waits until a job's process has installed its signal handlers.
        until: waits until a condition holds.
    """

    runner: Runner
    job: Callable[[int, Behaviour], Job]
    ready: Callable[[int], None]
    until: Callable[[Callable[[], bool]], None]

    def over(self, count: int = 1) -> list[Ended]:
        """Wait until ``count`` runs have ended, and return them."""
        found: list[Ended] = []

        def enough() -> bool:
            found.extend(self.runner.ended())
            return len(found) >= count

        self.until(enough)
        return found


class RunnerContract:
    """The contract suite. Subclasses provide a fixture ``rig`` that returns a `RunnerRig`."""

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
