"""Workers of a search elsewhere, without machines: their launches follow a script, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from autotune.base.clock import VirtualClock
from autotune.base.records import Beat
from autotune.launcher import Launcher
from autotune.launcher.remote import Arrived, Errand, Gone, News, Reported, Returned, WorkerFacts, Workers, Workplace
from tests.support.makers import make_host


class ScriptedWorkers(Workers):
    """Workers that arrive and are lost when a test says so. Each runs its errands in the order in which it got them.

    Args:
        folder: in which workers have theirs.
        launcher: makes the launcher of a worker.

    Attributes:
        sent: name of the worker and of the launch, of every errand. dismissed: who is not used any more.
    """

    what = "the workers of this test"

    def __init__(self, folder: Path, clock: VirtualClock, launcher: Callable[[str], Launcher], count: int = 1) -> None:
        self.count = count
        self.sent: list[tuple[str, str]] = []
        self.dismissed: list[str] = []
        self._folder = folder
        self._clock = clock
        self._launcher = launcher
        self._places: dict[str, Workplace] = {}
        self._news: deque[News] = deque()
        self._waiting: deque[tuple[str, Errand]] = deque()
        self._recalled: set[str] = set()

    def arrive(self, name: str, facts: WorkerFacts | None = None) -> None:
        """Let a worker come."""
        facts = facts or WorkerFacts(where=name, host=make_host())
        self._places[name] = Workplace(self._folder / name, facts, self._launcher(name), self._clock)
        self._news.append(Arrived(name, facts))

    def lose(self, name: str) -> None:
        """Lose a worker with its errand."""
        self._forget(name)
        self._news.append(Gone(name, "its node died"))

    def news(self, wait_s: float) -> list[News]:
        if not self._news and self._waiting:
            self._run(*self._waiting.popleft())
        if not self._news:
            self._clock.advance(wait_s)
        found = list(self._news)
        self._news.clear()
        return found

    def send(self, worker: str, errand: Errand) -> None:
        self.sent.append((worker, errand.spec.launch))
        # It may have been lost, which is news that waits.
        if worker not in self._places:
            return
        # As if it had been sent.
        self._waiting.append((worker, Errand.model_validate_json(errand.model_dump_json())))

    def recall(self, worker: str) -> None:
        self._recalled.add(worker)

    def dismiss(self, worker: str, *, keep_away: bool) -> None:
        self._forget(worker)
        self.dismissed.append(worker)

    def close(self) -> None:
        for name in list(self._places):
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._places.pop(name).close()
        self._waiting = deque((worker, errand) for worker, errand in self._waiting if worker != name)
        self._recalled.discard(name)

    def _run(self, worker: str, errand: Errand) -> None:
        def report(beat: Beat) -> None:
            self._news.append(Reported(worker, errand.name, beat))

        end = self._places[worker].run(errand, on_beat=report, stop=lambda: worker in self._recalled)
        self._recalled.discard(worker)
        self._news.append(Returned(worker, end))
