"""A week of a fleet in virtual time: cards, trainings, searches, preemptions, and profiles that become stale."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from autotune.search.replay import read_surface
from autotune.search.replay.run import replay
from benchmarks.search import throughput_scorer

_RECORDED = Path(__file__).parent / "recorded"
SURFACES = (*sorted(_RECORDED.glob("*.jsonl")), *sorted((_RECORDED / "held-out").glob("*.jsonl")))
WEEK_S = 7 * 86400.0
HOUR_S = 3600.0


def _asked(help_: str, default: Any) -> Any:
    return field(default=default, metadata={"help": help_})


@dataclass(frozen=True)
class Assumptions:
    """What is assumed, in seconds where nothing else is said."""

    kinds: str = _asked("kinds of cards: name=cards@speed,…", "A=100@2,B=400@1.5,C=300@1,D=200@0.6")
    trainings: int = _asked("trainings", 200)
    runs: int = _asked("runs of each training", 40)
    length: float = _asked("median of a run at its baseline, on a card of speed 1", 4 * HOUR_S)
    spread: float = _asked("standard deviation of its logarithm, between trainings", 0.5)
    preemption: float = _asked("mean time of a job on a card until it is preempted", 1800.0)
    fixed: bool = _asked("preempt after exactly that time, not after an exponential one", False)
    requeue: float = _asked("how long a preempted job is held back: Slurm's default", 120.0)
    start: float = _asked("from the start of a run until it trains again", 60.0)
    search_start: float = _asked("the same of a search: imports and a probe", 10.0)
    checkpoint: float = _asked("between two checkpoints of a run", 600.0)
    unreplayed: float = _asked("part of a search that is not replayed: probe, checks, hold, ceilings, ablation", 0.4)
    unreplayed_launches: int = _asked("launches in that part", 11)
    code_changes: float = _asked("changes of a training's code a week that make its profiles stale", 0.5)
    driver_changes: float = _asked("new drivers a week, for each kind of card", 0.125)
    torch_changes: float = _asked("new versions of torch a week, for all", 0.08)
    stale_gain: float = _asked("part of a profile's gain that is left when it is stale", 0.5)

    @property
    def cards(self) -> list[tuple[str, int, float]]:
        """Name, number and speed of each kind, the fastest first."""
        parts = [kind.replace("@", "=").split("=") for kind in self.kinds.split(",")]
        return sorted(((name, int(number), float(speed)) for name, number, speed in parts), key=lambda k: -k[2])


@dataclass(frozen=True)
class Policy:
    """Who searches.

    Attributes:
        searches: nobody; each run for itself; or once for each training and kind of card, for all runs.
        resumes: a preempted search goes on. fresh: a profile that has become stale is searched for again.
    """

    name: str
    searches: str
    resumes: bool = True
    fresh: bool = False


POLICIES = (
    Policy("nobody searches", "never"),
    Policy("each run for itself, begun anew when preempted", "each", resumes=False),
    Policy("each run for itself, resumed", "each"),
    Policy("one search for all, begun anew when preempted", "once", resumes=False),
    Policy("one search for all, resumed", "once"),
    Policy("one search for all, resumed, and again when stale", "once", fresh=True),
)


@dataclass(frozen=True)
class Search:
    """A replayed search: seconds of its launches, in order, and its speedup."""

    launches: tuple[float, ...]
    speedup: float


#: Searches by surface.
Library = Mapping[str, Sequence[Search]]


def replayed(path: Path, seed: int, asked: Assumptions) -> Search:
    """Replay a search, and add the launches that no replay has: a probe before, and the checks behind."""
    found = replay(read_surface(path), throughput_scorer(), budget_s=600.0, seed=seed)
    seconds: list[float] = []
    for number in range(len(found.steps) + 1):
        seconds += [heat.wall_s for heat in found.heats if heat.after == number]
        seconds += [step.trial.result.wall_s for step in found.steps[number : number + 1]]
    races = max(1, sum(standing.launches for standing in found.finalists) - len(found.finalists))
    seconds += [(found.elapsed_s - found.searched_s) / races] * races
    more = found.elapsed_s * asked.unreplayed / (1 - asked.unreplayed) / asked.unreplayed_launches
    return Search((more, *seconds, *[more] * (asked.unreplayed_launches - 1)), found.best.speedup)


@dataclass
class Study:
    """One search as far as it has come: its launches, and how many of them are done."""

    search: Search
    done: int = 0


@dataclass
class Job:
    """A run of a training, or a search for all runs of it on one kind of card.

    Attributes:
        left_s: of a run, at its baseline on a card of speed 1. kind: of the cards that a search needs; ``None``: a run.
        studies: a run's own searches, by kind.
    """

    training: int
    left_s: float = 0.0
    kind: int | None = None
    studies: dict[int, Study] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """What became of one simulated week.

    Attributes:
        makespan_s: until all runs had ended.
        searching_s, lost_search_s, lost_training_s: of all cards together; the second is a part of the first.
        searches: that were finished. fresh: part of all pairs of training and kind with a profile that holds.
        launches: of searches. starts: of jobs on cards until the makespan. most_searching: searches at the same time.
    """

    makespan_s: float
    searching_s: float
    lost_search_s: float
    lost_training_s: float
    searches: int
    fresh: float
    launches: int
    starts: int
    most_searching: int


class Fleet:
    """A week of a fleet under one policy."""

    def __init__(self, asked: Assumptions, policy: Policy, library: Library, seed: int) -> None:
        self._asked = asked
        self._policy = policy
        self._speeds = [speed for _, _, speed in asked.cards]
        self._free = [number for _, number, _ in asked.cards]
        #: What is drawn is the same for all policies, but for the preemptions.
        rng = random.Random(seed)
        self._draw = random.Random(f"{seed} {policy.name}")
        kinds = range(len(self._free))
        own = [rng.choice(list(library.values())) for _ in range(asked.trainings)]
        self._searches = {(t, k): rng.choice(own[t]) for t in range(asked.trainings) for k in kinds}
        lengths = [asked.length * math.exp(rng.gauss(0, asked.spread)) for _ in range(asked.trainings)]
        runs = [Job(t, lengths[t]) for t in range(asked.trainings) for _ in range(asked.runs)]
        rng.shuffle(runs)
        self._runs = deque(runs)
        self._to_search: list[deque[Job]] = [deque() for _ in kinds]
        #: Profiles by pair, and whether they still hold. Pairs with a search that waits or runs.
        self._known: dict[tuple[int, int], bool] = {}
        self._pending: dict[tuple[int, int], Job] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = self._makespan = 0.0
        self._left = len(runs)
        self._seen = dict.fromkeys(("searching", "lost_search", "lost_training"), 0.0)
        self._searching = self._most = self._done = self._launches = self._starts = 0
        self._changes(rng)
        if policy.searches == "once":
            for pair in self._searches:
                self._search(pair)

    def week(self) -> Seen:
        """Let the week pass, and the time that the runs need beyond it."""
        self._dispatch()
        fresh = None
        while self._events and (self._left or self._events[0][0] <= WEEK_S):
            at, _, event = heapq.heappop(self._events)
            if at > WEEK_S and fresh is None:
                fresh = self._fresh()
            self._now = at
            event()
            self._dispatch()
        return Seen(
            self._makespan,
            self._seen["searching"],
            self._seen["lost_search"],
            self._seen["lost_training"],
            self._done,
            self._fresh() if fresh is None else fresh,
            self._launches,
            self._starts,
            self._most,
        )

    def _fresh(self) -> float:
        return sum(self._known.values()) / len(self._searches)

    def _at(self, after_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + after_s, next(self._order), event))

    def _changes(self, rng: random.Random) -> None:
        """Let code, drivers and torch change: Poisson processes until the end of the week."""
        asked, pairs = self._asked, list(self._searches)
        sources = [(asked.code_changes, [p for p in pairs if p[0] == t]) for t in range(asked.trainings)]
        sources += [(asked.driver_changes, [p for p in pairs if p[1] == k]) for k in range(len(self._free))]
        for rate, changed in [*sources, (asked.torch_changes, pairs)]:
            at = 0.0
            while rate > 0 and (at := at + rng.expovariate(rate) * WEEK_S) < WEEK_S:
                self._at(at, partial(self._changed, changed))

    def _changed(self, pairs: Sequence[tuple[int, int]]) -> None:
        for pair in pairs:
            if pair in self._known:
                self._known[pair] = False
                if self._policy.fresh:
                    self._search(pair)

    def _search(self, pair: tuple[int, int]) -> None:
        if pair not in self._pending:
            training, kind = pair
            self._pending[pair] = Job(training, kind=kind, studies={kind: Study(self._searches[pair])})
            self._to_search[kind].append(self._pending[pair])

    def _dispatch(self) -> None:
        """Give the free cards to jobs: searches first, runs in the order in which they came."""
        for kind, waiting in enumerate(self._to_search):
            while self._free[kind] and (waiting or self._runs):
                self._free[kind] -= 1
                self._start(waiting.popleft() if waiting else self._runs.popleft(), kind)

    def _start(self, job: Job, kind: int) -> None:
        """Let a job have a card until it ends or is preempted, and note what came of it then."""
        asked = self._asked
        self._starts += self._left > 0
        has_s = asked.preemption if asked.fixed else self._draw.expovariate(1 / asked.preemption)
        study = job.studies.get(kind)
        if study is None and job.kind is None and self._policy.searches == "each":
            study = job.studies[kind] = Study(self._searches[job.training, kind])
        took_s = 0.0
        if study is not None and study.done < len(study.search.launches):
            self._searching += 1
            self._most = max(self._most, self._searching)
            took_s = asked.search_start + sum(study.search.launches[study.done :])
            if has_s < took_s or job.kind is not None:
                self._at(min(has_s, took_s), partial(self._searched, job, study, kind, has_s, took_s))
                return
        speed = self._speeds[kind] * self._gain(job, kind)
        needs_s = took_s + asked.start + job.left_s / speed
        self._at(min(has_s, needs_s), partial(self._trained, job, study, kind, has_s, took_s, needs_s, speed))

    def _gain(self, job: Job, kind: int) -> float:
        pair = (job.training, kind)
        if self._policy.searches == "each":
            return self._searches[pair].speedup
        if pair not in self._known:
            return 1.0
        part = 1.0 if self._known[pair] else self._asked.stale_gain
        return 1 + part * (self._searches[pair].speedup - 1)

    def _searched(self, job: Job, study: Study, kind: int, has_s: float, took_s: float) -> None:
        """A card is given back in or after a search."""
        self._free[kind] += 1
        self._note_search(job, study, kind, has_s, took_s)
        pair = (job.training, kind)
        if has_s >= took_s:
            del self._pending[pair]
        else:
            self._requeue(job)

    def _note_search(self, job: Job, study: Study, kind: int, has_s: float, took_s: float) -> None:
        self._searching -= 1
        self._seen["searching"] += min(has_s, took_s)
        if has_s >= took_s:
            self._launches += len(study.search.launches) - study.done
            study.done = len(study.search.launches)
            self._known[job.training, kind] = True
            self._done += 1
            return
        at_s, launches = self._asked.search_start, study.search.launches
        done = study.done
        while at_s + launches[done] <= has_s:
            at_s += launches[done]
            done += 1
        self._launches += done - study.done + (has_s > at_s)
        if self._policy.resumes:
            self._seen["lost_search"] += max(0.0, has_s - at_s) + min(has_s, self._asked.search_start)
            study.done = done
        else:
            self._seen["lost_search"] += has_s

    def _trained(
        self, job: Job, study: Study | None, kind: int, has_s: float, took_s: float, needs_s: float, speed: float
    ) -> None:
        """A card is given back by a run, which may have searched before."""
        self._free[kind] += 1
        if took_s and study is not None:
            self._note_search(job, study, kind, took_s, took_s)
        if has_s >= needs_s:
            self._left -= 1
            self._makespan = self._now
            return
        trained_s = max(0.0, has_s - took_s - self._asked.start)
        lost_s = trained_s % self._asked.checkpoint
        self._seen["lost_training"] += lost_s
        job.left_s -= (trained_s - lost_s) * speed
        self._requeue(job)

    def _requeue(self, job: Job) -> None:
        queue = self._runs if job.kind is None else self._to_search[job.kind]
        self._at(self._asked.requeue, partial(queue.append, job))
