"""Replays recorded launches in virtual time, without starting a process: launches, heats, and whole searches."""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from autotune import stats
from autotune.base.clock import Clock, VirtualClock
from autotune.base.errors import InfeasibleError, UsageError
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import (
    SCHEMA_VERSION,
    Beat,
    Config,
    DataRef,
    HeatPlan,
    LaunchKind,
    Phase,
    Standing,
    StudyHeat,
    StudySpec,
    Trial,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Turn,
    WorkloadRef,
)
from autotune.knobs import spell
from autotune.knobs.compile_mode import compiles
from autotune.launcher.lanes import VirtualLanes
from autotune.launcher.watch import Watch
from autotune.search.proof import ProofContext
from autotune.search.proof.winner import race_winner
from autotune.search.replay import PARTS, Row, ShownEntrant, Surface
from autotune.space import Space, device_part, key
from autotune.space.requirements import ANYTHING, Requirements
from autotune.stats.racing import PRIORS, Contender, Rounds, is_contained
from autotune.study.budget import Budget
from autotune.study.database import in_memory
from autotune.study.history import History
from autotune.study.launches import LaunchConditions, Launches, Place
from autotune.study.loop import StudyLoop
from autotune.workload.catalog import find_objective
from autotune.workload.scoring import Scorer


class ReplayLauncher:
    """A `Launcher` that replays a surface.

    Each launch replays one recorded for its configuration and takes as long as that one did. Recorded launches are
    drawn without replacement, and reshuffled when all have been used. The measurement is the recorded one, whatever the
    spec's plan says about windows; pruning, limits and ``stop`` work as in a real launch. In a heat, the entrants race
    with their recorded turns (`replay_heat`). Compilation takes the recorded cold-cache time the first time a graph is
    compiled, and the warm-cache time after that. A search whose winner is only raced has no launches of other kinds, so
    they cannot be replayed.

    Args:
        clock: advanced by sleeping on it.
        seed: determines the order in which a configuration's launches are replayed.
    """

    def __init__(self, surface: Surface, clock: Clock, *, seed: int = 0) -> None:
        self._surface = surface
        self._clock = clock
        self._seed = seed
        self._left: dict[tuple[LaunchKind, str], list[Row]] = {}
        self._drawn: dict[tuple[LaunchKind, str], random.Random] = {}
        #: When each graph has been compiled: launches may run side by side.
        self._compiled_at: dict[str, float] = {}

    def run(self, spec: TrialSpec, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> TrialResult:
        """Replay one launch.

        Raises:
            LookupError: no matching launch was recorded.
        """
        began = self._clock.now()
        watch = Watch(spec, self._clock, on_beat, stop)
        if spec.heat is None:
            row = self._draw(spec)
            result = self._play(spec, row, watch)
            watch.finish()
            # The time after the last phase (teardown, a forced epoch turn) counts too.
            rest_s = row.wall_s - sum(row.phase_s.values())
            if result.status in (TrialStatus.COMPLETE, row.status) and rest_s > 0:
                self._clock.sleep(rest_s)
        else:
            result = self._replay_heat(spec, spec.heat, watch)
            watch.finish()
        times = {"phase_s": watch.phase_s, "began_s": began, "wall_s": self._clock.now() - began}
        return result.model_copy(update=times)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _draw(self, spec: TrialSpec) -> Row:
        launch_key = (spec.kind, key(spec.config))
        rows = self._surface.launches.get(launch_key[1], ()) if spec.kind is LaunchKind.MEASURE else ()
        if not rows:
            raise LookupError(f"{self._surface.heading.name} holds no {spec.kind} launch of {launch_key[1]}")
        if not self._left.get(launch_key):
            # Seeded by the key, so that launches with other keys do not change the order of these.
            rng = self._drawn.setdefault(launch_key, random.Random(f"{self._seed} {launch_key}"))
            self._left[launch_key] = rng.sample(rows, len(rows))
        return self._left[launch_key].pop()

    def _replay_heat(self, spec: TrialSpec, plan: HeatPlan, watch: Watch) -> TrialResult:
        failed = self._surface.failed
        parts = {key(PARTS[plan.side](config)) for config in plan.entrants} - failed.keys()
        rows = [row for row in self._surface.heats.get(plan.side, ()) if parts <= row.shown.keys()]
        if not rows:
            cause = f"no heat of the {plan.side} with all these entrants was recorded"
            return TrialResult(launch=spec.launch, status=TrialStatus.INTERRUPTED, cause=cause)
        rng = random.Random(f"{self._seed} {spec.launch}")
        return replay_heat(spec, plan, rng.choice(rows), watch, self._clock, rng, self._first_step_s, failed)

    def _play(self, spec: TrialSpec, row: Row, watch: Watch) -> TrialResult:
        for phase in Phase:
            if phase.value not in row.phase_s:
                continue
            watch.beat(Beat(phase=phase))
            if phase is Phase.MEASURE:
                pruned = self._measure(spec, row, watch)
                if pruned is not None:
                    return pruned
            else:
                seconds = row.phase_s[phase]
                if phase is Phase.COMPILE:
                    seconds = self._compiled_s(row.config, seconds, warm=row.cache_warm)
                self._clock.sleep(seconds)
            if watch.overdue():
                status = watch.ended or TrialStatus.INTERRUPTED
                return TrialResult(launch=spec.launch, status=status, phase=phase, cause=watch.cause, exit_code=-9)
        return TrialResult(
            launch=spec.launch,
            status=row.status,
            phase=row.phase,
            cause=row.cause,
            exit_code=0 if row.status is TrialStatus.COMPLETE else 1,
            peak_bytes=row.peak_bytes,
            measurement=row.measurement(),
        )

    def _first_step_s(self, entrant: ShownEntrant) -> float:
        """Return the duration in seconds of a heat entrant's first step. A recording begins with an empty cache."""
        return self._compiled_s(entrant.config, entrant.first_step_s or 0.0, warm=False)

    def _compiled_s(self, config: Config, recorded_s: float, *, warm: bool | None) -> float:
        """Return the duration in seconds of a first step: if the recorded cache state differs from the replayed one,
        the median of the launches of the same graph with the right cache state."""
        if not compiles(config):
            return recorded_s
        graph, now = key(device_part(config)), self._clock.now()
        now_warm = self._compiled_at.get(graph, math.inf) <= now
        matching_s = self._surface.compile_seconds.get((graph, now_warm), ())
        seconds = recorded_s if warm is None or now_warm == warm or not matching_s else median(matching_s)
        self._compiled_at[graph] = min(now + seconds, self._compiled_at.get(graph, math.inf))
        return seconds

    def _measure(self, spec: TrialSpec, row: Row, watch: Watch) -> TrialResult | None:
        """Replay the measure phase; return a result if the launch is pruned."""
        windows = row.timed
        elapsed_s = 0.0
        for count, window in enumerate(windows, 1):
            self._clock.sleep(window.seconds)
            elapsed_s += window.seconds
            rate = window.samples / window.seconds
            watch.beat(Beat(phase=Phase.MEASURE, step=count, rate_per_s=rate))
            below_per_s = spec.plan.prune_below_per_s
            if stats.surely_slow(spec.plan, windows[:count], count, rate, elapsed_s, below_per_s=below_per_s):
                rate_so_far = stats.rate_of(windows[:count])
                return TrialResult(
                    launch=spec.launch,
                    status=TrialStatus.PRUNED,
                    phase=Phase.MEASURE,
                    cause=f"ran at {rate_so_far.per_s:.4g} samples/s, and is too slow to be the best",
                    exit_code=0,
                    rate_seen_per_s=rate_so_far.per_s,
                    measurement=row.measurement(rate_so_far, windows[:count]) if count > 1 else None,
                )
        self._clock.sleep(max(0.0, row.phase_s[Phase.MEASURE] - elapsed_s))
        return None


#: A launch is ended at most this many seconds after its limit.
_TICK_S = 1.0


class _Over(Exception):
    """The heat's process has ended."""

    def __init__(self, result: TrialResult) -> None:
        super().__init__(result.cause)
        self.result = result


def replay_heat(
    spec: TrialSpec,
    plan: HeatPlan,
    row: Row,
    watch: Watch,
    clock: Clock,
    rng: random.Random,
    first_step_s: Callable[[ShownEntrant], float],
    failed: Mapping[str, Row],
) -> TrialResult:
    """Replay a heat with the turns of a recorded one.

    In each round, all entrants take their turns of the same recorded round, so that whatever slowed that round down
    slows all of them. The first round is the first recorded one; the recorded round from which the others continue is
    drawn at random. There are at most as many rounds as were recorded. The seconds before the first turn, and between
    two turns, are those of the recorded heat, whichever entrants take part.

    Args:
        row: a heat of that side with all entrants of the plan except those in `failed`.
        first_step_s: returns the seconds of an entrant's first step, including its compilation.
        failed: a failed launch of each device part that cannot be trained; no recorded heat has these.
    """
    began = clock.now()
    watch.beat(Beat(phase=Phase.LOAD))
    clock.sleep(row.startup_s or 0.0)
    as_entrants = {
        name: ShownEntrant(config=r.config, status=r.status, cause=r.cause, peak_bytes=r.peak_bytes)
        for name, r in failed.items()
    }
    by_part = {**as_entrants, **row.shown}
    entrants = [by_part[key(PARTS[plan.side](config))] for config in plan.entrants]
    plan = plan.model_copy(update={"max_rounds": max(2, min(plan.max_rounds, row.rounds))})
    turns = _Recorded(spec, plan, row, entrants, watch, clock, rng.randrange(1000), first_step_s)
    try:
        heat = Rounds(plan, turns, clock, rng).run(began)
    except _Over as over:
        return over.result
    if heat is None:
        cause = "other processes kept the machine too busy to compare anything"
        return TrialResult(launch=spec.launch, status=TrialStatus.INTERRUPTED, cause=cause, exit_code=1, transient=True)
    return TrialResult(launch=spec.launch, status=TrialStatus.COMPLETE, exit_code=0, heat=heat)


@dataclass
class _Recorded:
    spec: TrialSpec
    plan: HeatPlan
    row: Row
    entrants: Sequence[ShownEntrant]
    watch: Watch
    clock: Clock
    start: int
    first_step_s: Callable[[ShownEntrant], float]
    switch_s: float = 0.0

    def __post_init__(self) -> None:
        on_card = self.spec.devices[0].startswith("cuda") and self.plan.side == "device"
        self.prior = PRIORS["cuda" if on_card else "cpu"]

    def take(self, entrant: Contender) -> Turn | None:
        recorded = self.entrants[entrant.number]
        played = len(entrant.turns)
        steps_first = not played and self.plan.side == "device"
        phase = Phase.COMPILE if steps_first else Phase.WARMUP if self.plan.side == "loader" else Phase.MEASURE
        self.watch.beat(Beat(phase=phase, turn=entrant.number))
        self._sleep(self.row.between_each_s, entrant)
        self.switch_s += self.row.between_each_s
        if steps_first and recorded.first_step_s is not None:
            seconds = self.first_step_s(recorded)
            self._sleep(seconds, entrant)
            entrant.first_step_s = seconds
        entrant.peak_bytes = recorded.peak_bytes
        if recorded.status is not TrialStatus.COMPLETE:
            self._fail(entrant, recorded, phase)
            return None
        turn = recorded.turn(0 if not played else 1 + (self.start + played - 1) % max(1, len(recorded.turns) - 1))
        if turn is None:
            return None
        self.watch.beat(Beat(phase=Phase.MEASURE, turn=entrant.number, step=played + 1))
        self._sleep(turn.seconds, entrant)
        entrant.step_s = turn.seconds / turn.steps
        return turn

    def leave(self, entrant: Contender) -> None:
        """Do nothing: a recorded turn leaves nothing to clean up."""

    def _fail(self, entrant: Contender, recorded: ShownEntrant, phase: Phase) -> None:
        if entrant.number != 0 and is_contained(self.plan.side, self.spec.devices[0], recorded.status):
            entrant.status, entrant.phase, entrant.cause = recorded.status, phase, recorded.cause
            entrant.cannot_compile = recorded.cannot_compile
            return
        ended = self._ended(entrant, recorded.status, phase, recorded.cause, exit_code=1)
        raise _Over(ended.model_copy(update={"cannot_compile": recorded.cannot_compile}))

    def _sleep(self, seconds: float, entrant: Contender) -> None:
        while seconds > 0:
            self.clock.sleep(min(_TICK_S, seconds))
            seconds -= _TICK_S
            if self.watch.overdue():
                status = self.watch.ended or TrialStatus.INTERRUPTED
                raise _Over(self._ended(entrant, status, self.watch.phase, self.watch.cause, exit_code=-9))

    def _ended(
        self, entrant: Contender, status: TrialStatus, phase: Phase | None, cause: str | None, *, exit_code: int
    ) -> TrialResult:
        launch, turn = self.spec.launch, entrant.number
        return TrialResult(launch=launch, status=status, phase=phase, cause=cause, exit_code=exit_code, turn=turn)


# Searches a surface: the real loop, samplers, budget and race, on recorded launches and in virtual time.

#: A replay's files are not kept, so they are held in memory where possible.
_IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class ReplayedTrial:
    """One trial of a replayed search.

    Attributes:
        ended_s: when it ended, in virtual seconds since the search began.
        believed: the number of the trial that the search ranked first at that time; ``None`` if there was none yet.
    """

    trial: Trial
    ended_s: float
    believed: int | None


@dataclass(frozen=True)
class Replayed:
    """The result of a replayed search.

    Attributes:
        steps, heats: its trials and its heats, each in order.
        baseline, best: the baseline and the winner. finalists: all configurations that were launched again, in turns.
        searched_s, elapsed_s: duration in seconds without and with the race.
        stopped, raced: why the search and the race ended.
    """

    steps: tuple[ReplayedTrial, ...]
    heats: tuple[StudyHeat, ...]
    baseline: Standing
    best: Standing
    finalists: tuple[Standing, ...]
    searched_s: float
    elapsed_s: float
    stopped: str
    raced: str


def narrowed(space: Space, fixed: Mapping[str, str], wanted: Mapping[str, tuple[str, ...]]) -> Space:
    """Return a surface's space restricted to some of its values.

    Raises:
        UsageError: a knob or value was not recorded, or no combination of the remaining values was.
    """
    choices = dict(space.choices)
    for name, texts in [*((n, (t,)) for n, t in fixed.items()), *wanted.items()]:
        if name not in choices:
            raise UsageError(f"this surface has no knob {name!r}", advice=f"it has {', '.join(choices)}.")
        recorded = [spell(c.value) for c in choices[name]]
        missing = [text for text in texts if text not in recorded]
        if missing:
            raise UsageError(f"{name}={missing[0]} was not recorded", advice=f"it has {', '.join(recorded)}.")
        choices[name] = tuple(c for c in choices[name] if spell(c.value) in texts)
    subspace = replace(space, choices=choices)
    if next(subspace.grid(), None) is None:
        raise UsageError("no combination of the values left was recorded")
    return subspace


def replay(
    surface: Surface,
    scorer: Scorer,
    *,
    budget_s: float,
    sampler: str = "auto",
    seed: int = 0,
    trials: int | None = None,
    required: Requirements = ANYTHING,
    space: Space | None = None,
    devices: int = 1,
    observer: Observer | None = None,
    stop: Callable[[], int | None] = lambda: None,
) -> Replayed:
    """Search a surface.

    Args:
        devices: the number of identical devices on which trials run side by side; each launch behaves as if alone.
        required: what the winner must meet.
        space: the surface's own space, or a part of it.

    Raises:
        InfeasibleError: the search ended before it measured the baseline.
        AutotuneError: as a real search does.
    """
    observer, space = observer or Observer(), space or surface.space
    heading, clock = surface.heading, VirtualClock()
    by_rate, rate_within = scorer.facts.rate_within is not None, scorer.facts.rate_within or 0.0
    conditions = LaunchConditions(
        workload=WorkloadRef(name=heading.workload, module="recorded"),
        data=DataRef(kind="recorded"),
        device=heading.device,
        batch_size=heading.batch_size,
        image_size=heading.image_size,
        seed=seed,
        worker_start_method="fork",
        memory_limit_bytes=heading.memory_bytes,
        env={},
        beside=(Place((heading.device,)),) * (devices - 1),
    )
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None) as folder:
        files = StudyFiles(Path(folder))
        budget = Budget(files, budget_s, clock)
        lanes = VirtualLanes([ReplayLauncher(surface, clock, seed=seed)] * devices, clock)
        launches = Launches(files, conditions, budget, lanes, observer, lambda: stop() is not None, busy_cores=None)
        noting = _Noting(observer, budget)
        study = noting.study = StudyLoop(
            space,
            History(files, space, study=in_memory()),
            launches,
            scorer,
            noting,
            sampler=sampler,
            seed=seed,
            trials=trials,
            prune=by_rate,
            stop=stop,
            required=required,
            rate_within=rate_within,
            capacity_bytes=heading.memory_bytes,
            heats=surface.has_heats,
        )
        stopped = study.run()
        observer.says(stopped)
        if study.baseline is None:
            raise InfeasibleError(f"{stopped} before the baseline was measured", advice="give it a larger --budget.")
        searched_s = budget.spent_s
        context = ProofContext(space, launches, scorer, observer, stop, by_rate, rate_within, required)
        race, winner = race_winner(context, study.ranked, study.baseline, study.noise)
        compared = race.compared()
        again = (e for e in race.entrants if e.again and compared.in_turns(e, race.baseline))
        return Replayed(
            steps=tuple(noting.steps),
            heats=tuple(study.history.heats),
            baseline=compared.standing(race.baseline),
            best=compared.standing(winner),
            finalists=tuple(map(compared.standing, again)),
            searched_s=searched_s,
            elapsed_s=budget.spent_s,
            stopped=stopped,
            raced=race.ended,
        )


def replay_request(
    surface: Surface,
    spec: StudySpec,
    *,
    observer: Observer | None = None,
    stop: Callable[[], int | None] = lambda: None,
) -> tuple[Space, Replayed]:
    """Search a surface as requested; return the part of its space that was searched and the result.

    Raises:
        AutotuneError: as a real search does.
    """
    space = narrowed(surface.space, spec.fixed, spec.narrowed)
    if len(spec.objectives) > 1:
        raise UsageError("a replay is by one objective", advice="name one.")
    with closing(Scorer(find_objective(spec.objectives[0]), goal=spec.goal)) as scorer:
        scorer.check()
        return space, replay(
            surface,
            scorer,
            budget_s=spec.budget_s,
            sampler=spec.sampler,
            seed=spec.seed,
            trials=spec.trials,
            required=Requirements.parsed(spec.require, spec.goal),
            space=space,
            observer=observer,
            stop=stop,
        )


def recorded_best(surface: Surface, space: Space) -> float:
    """Return the highest mean rate of any recorded configuration in ``space``."""
    launches = (surface.launches.get(key(config), ()) for config in space.grid())
    return max(fmean(r.rate_per_s or 0.0 for r in rows) for rows in launches if rows)


def replayed_json(path: Path, surface: Surface, space: Space, found: Replayed) -> dict[str, object]:
    """Return the object that ``autotune search --replay SURFACE --json`` prints."""
    best_per_s = recorded_best(surface, space)
    return {
        "schema_version": SCHEMA_VERSION,
        "replay": str(path),
        "made": surface.heading.made,
        "workload": surface.heading.workload,
        "machine": surface.heading.machine,
        "baseline": _standing_json(found.baseline),
        "best": _standing_json(found.best),
        "finalists": [_standing_json(s) for s in found.finalists],
        "recorded_best_samples_per_second": best_per_s,
        "heats": len(found.heats),
        "trials": dict(Counter(s.trial.result.status.value for s in found.steps)),
        "searched_s": found.searched_s,
        "elapsed_s": found.elapsed_s,
        "stopped": found.stopped,
        "raced": found.raced,
    }


def _standing_json(one: Standing) -> dict[str, object]:
    names = ("config", "trial", "launches", "verified", "samples_per_second", "ci95", "speedup", "speedup_ci95")
    return {name: getattr(one, name) for name in names}


class _Noting(Observer):
    """Forwards events to an observer, and records each trial when it ends."""

    def __init__(self, observer: Observer, budget: Budget) -> None:
        self.steps: list[ReplayedTrial] = []
        self.study: StudyLoop | None = None
        self._observer = observer
        self._budget = budget

    def says(self, sentence: str) -> None:
        self._observer.says(sentence)

    def heat_ends(self, heat: StudyHeat) -> None:
        self._observer.heat_ends(heat)

    def trial_ends(self, trial: Trial) -> None:
        assert self.study is not None
        ranked = self.study.ranked
        believed = ranked[0].number if ranked else None
        self.steps.append(ReplayedTrial(trial, self._budget.spent_s, believed))
        self._observer.trial_ends(trial)
