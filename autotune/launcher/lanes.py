"""Launches side by side: one lane for each device of a search, and one launch at a time in each lane.

The search itself has one thread. It begins launches, and takes their results as they end, in whatever order.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from autotune.base.clock import SystemClock, VirtualClock
from autotune.base.records import Beat, TrialResult, TrialSpec
from autotune.launcher import Launcher, ProcessLauncher
from autotune.launcher.fork_client import LOOK_S, STOPPED_S

OnBeat = Callable[[Beat], None]
Stop = Callable[[], bool]


class Lanes(ABC):
    """Several launchers, each for a device of its own. This is itself a `Launcher`: what `run` runs, it runs alone.

    All methods, and the functions passed to them, are called in the search's own thread.

    Attributes:
        count: number of lanes.
    """

    count: int
    #: Whether a launch's script could go on training after the launch; see `TrialSpec`.
    may_keep = False

    @property
    def keeps(self) -> bool:
        """Whether a script started by a launch trains on, for launches that may follow; see `TrialSpec`."""
        return False

    def let_go(self) -> None:
        """End the script that is kept, if one is."""
        return

    @abstractmethod
    def begin(self, lane: int, spec: TrialSpec, *, on_beat: OnBeat, stop: Stop) -> None:
        """Begin a launch in an idle lane, counted from 0."""

    @abstractmethod
    def end(self) -> tuple[int, TrialResult]:
        """Wait until a running launch ends; return its lane and its result. At least one must be running.

        Raises:
            MachineError: see `Launcher`. The other launches go on.
        """

    @abstractmethod
    def abandon(self) -> None:
        """End all running launches, and drop their results, which are in their folders."""

    @abstractmethod
    def close(self) -> None:
        """End all launches, and release what is kept between launches. May be called twice."""

    def run(self, spec: TrialSpec, *, on_beat: OnBeat, stop: Stop) -> TrialResult:
        """Run a launch in the first lane, while no other lane runs one."""
        try:
            self.begin(0, spec, on_beat=on_beat, stop=stop)
            return self.end()[1]
        except BaseException:
            self.abandon()
            raise


class OneLane(Lanes):
    """A launcher as the only lane: a launch has ended as soon as it has begun."""

    def __init__(self, launcher: Launcher) -> None:
        self.count = 1
        self._launcher = launcher
        self._ended: TrialResult | None = None
        self.may_keep = isinstance(launcher, ProcessLauncher)

    @property
    def keeps(self) -> bool:
        return isinstance(self._launcher, ProcessLauncher) and self._launcher.keeps

    def let_go(self) -> None:
        if isinstance(self._launcher, ProcessLauncher):
            self._launcher.let_go()

    def begin(self, lane: int, spec: TrialSpec, *, on_beat: OnBeat, stop: Stop) -> None:
        self._ended = self._launcher.run(spec, on_beat=on_beat, stop=stop)

    def end(self) -> tuple[int, TrialResult]:
        assert self._ended is not None
        ended, self._ended = self._ended, None
        return 0, ended

    def abandon(self) -> None:
        self._ended = None

    def close(self) -> None:
        self._launcher.close()


@dataclass
class _Running:
    result: Future[TrialResult]
    on_beat: OnBeat
    stop: Stop


class ThreadLanes(Lanes):
    """Lanes whose launchers run in threads.

    Each launcher has a dedicated thread, which lasts until `close`: the processes of a launcher die with the thread
    that started them. What launches report, and the sentences of the launchers, wait in a queue for the search's own
    thread. An event tells the threads that their launches are to end.

    Args:
        make: makes the launcher of a lane, given the function to call with its sentences.
        says: receives these sentences.
    """

    def __init__(
        self,
        make: Callable[[Callable[[str], None]], Launcher],
        count: int,
        clock: SystemClock,
        says: Callable[[str], None],
    ) -> None:
        self.count = count
        self._clock = clock
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._launchers = [make(lambda sentence: self._news.put(lambda: says(sentence))) for _ in range(count)]
        self._running: dict[int, _Running] = {}

    def begin(self, lane: int, spec: TrialSpec, *, on_beat: OnBeat, stop: Stop) -> None:
        def later(beat: Beat) -> None:
            self._news.put(lambda: on_beat(beat))

        if lane not in self._threads:
            # Its one thread lasts until it is shut down.
            self._threads[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"lane-{lane}")
        run = self._launchers[lane].run
        result = self._threads[lane].submit(run, spec, on_beat=later, stop=self._ending.is_set)
        self._running[lane] = _Running(result, on_beat, stop)

    def end(self) -> tuple[int, TrialResult]:
        while True:
            looked_s = self._clock.now()
            done, _ = wait([r.result for r in self._running.values()], LOOK_S, FIRST_COMPLETED)
            self._clock.skip_stop(looked_s, STOPPED_S)
            for news in self._arrived():
                news()
            for lane, running in self._running.items():
                if running.result in done:
                    del self._running[lane]
                    if not self._running:
                        self._ending.clear()
                    return lane, running.result.result()
            # A list, so that every `stop` is called.
            stops = [running.stop() for running in self._running.values()]
            if any(stops):
                self._ending.set()

    def abandon(self) -> None:
        self._ending.set()
        running, self._running = self._running, {}
        wait([launch.result for launch in running.values()])
        self._ending.clear()
        list(self._arrived())

    def close(self) -> None:
        self.abandon()
        while self._threads:
            lane, thread = self._threads.popitem()
            with thread:
                thread.submit(self._launchers[lane].close).result()

    def _arrived(self) -> Iterator[Callable[[], None]]:
        """Take what the threads have put into the queue."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._news.get_nowait()


class VirtualLanes(Lanes):
    """Lanes in virtual time: a launch runs to its end when it begins, and time is then set back to its beginning.

    Launches do not know of each other, so this is equivalent to running them at the same time, except that none can be
    stopped because of what another launch shows later.

    Args:
        launchers: one for each lane, which sleep on the clock. They may all be the same object.
    """

    def __init__(self, launchers: Sequence[Launcher], clock: VirtualClock) -> None:
        self.count = len(launchers)
        self._launchers = launchers
        self._clock = clock
        #: By lane: when its launch ends, and its result, or the error in its place.
        self._running: dict[int, tuple[float, TrialResult | Exception]] = {}

    def begin(self, lane: int, spec: TrialSpec, *, on_beat: OnBeat, stop: Stop) -> None:
        began_s = self._clock.now()
        result: TrialResult | Exception
        try:
            result = self._launchers[lane].run(spec, on_beat=on_beat, stop=stop)
        except Exception as error:
            result = error
        self._running[lane] = self._clock.now(), result
        self._clock.set(began_s)

    def end(self) -> tuple[int, TrialResult]:
        lane = min(self._running, key=lambda lane: (self._running[lane][0], lane))
        ended_s, result = self._running.pop(lane)
        self._clock.set(max(ended_s, self._clock.now()))
        if isinstance(result, Exception):
            raise result
        return lane, result

    def abandon(self) -> None:
        self._running.clear()

    def close(self) -> None:
        self.abandon()
        for launcher in self._launchers:
            launcher.close()
