"""Searches a surface: the real loop, samplers, budget and race on recorded launches in virtual time."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from autotune.workload.catalog import find_objective
from autotune.base.clock import VirtualClock
from autotune.base.errors import InfeasibleError, UsageError
from autotune.knobs import spell
from autotune.launcher.lanes import VirtualLanes
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer, Silent
from autotune.base.records import SCHEMA_VERSION, DataRef, Standing, StudyHeat, StudySpec, Trial, WorkloadRef
from autotune.search.replay import ReplayLauncher, Surface
from autotune.space.requirements import ANYTHING, Requirements
from autotune.workload.scoring import Scorer
from autotune.space import Space, key
from autotune.study.budget import Budget
from autotune.study.database import in_memory
from autotune.study.history import History
from autotune.study.launches import LaunchConditions, Launches
from autotune.study.loop import StudyLoop
from autotune.study.running import Place
from autotune.search.verify import Final, race_winner

#: A replay's files are not kept, so they are put in memory where possible.
_IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class ReplayedTrial:
    """One trial of a replayed search.

    Attributes:
        ended_s: when it ended, in virtual seconds since the search began.
        believed: number of the trial the search ranked first at that time; ``None`` before there was one.
    """

    trial: Trial
    ended_s: float
    believed: int | None


@dataclass(frozen=True)
class Replayed:
    """The result of a replayed search.

    Attributes:
        steps, heats: its trials and its heats, each in order.
        baseline, best: the baseline and the winner. finalists: all configurations that were launched again in turns.
        searched_s, elapsed_s: seconds without and with the race.
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
        known = [spell(c.value) for c in choices[name]]
        missing = [text for text in texts if text not in known]
        if missing:
            raise UsageError(f"{name}={missing[0]} was not recorded", advice=f"it has {', '.join(known)}.")
        kept = tuple(c for c in choices[name] if spell(c.value) in texts)
        choices[name] = kept
    found = replace(space, choices=choices)
    if next(found.grid(), None) is None:
        raise UsageError("no combination of the values left was recorded")
    return found


def replay(
    surface: Surface,
    scorer: Scorer,
    *,
    budget_s: float,
    sampler: str = "auto",
    seed: int = 0,
    trials: int | None = None,
    by_rate: bool = True,
    rate_within: float = 0.0,
    required: Requirements = ANYTHING,
    space: Space | None = None,
    devices: int = 1,
    observer: Observer | None = None,
    stop: Callable[[], int | None] = lambda: None,
) -> Replayed:
    """Search a surface.

    Args:
        devices: number of equal ones, on which trials run side by side; each launch is as it was alone.
        scorer: scores measurements. by_rate, rate_within, required: see `Final`.
        space: the surface's own space, or a part of it.

    Raises:
        AutotuneError: as a real search does.
    """
    observer = observer or Silent()
    space = space or surface.space
    clock = VirtualClock()
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None) as folder:
        files = StudyFiles(Path(folder))
        budget = Budget(files, budget_s, clock)
        launches = Launches(
            files,
            _conditions(surface, seed, devices),
            budget,
            VirtualLanes([ReplayLauncher(surface, clock, seed=seed)] * devices, clock),
            observer,
            lambda: stop() is not None,
            busy_cores=None,
        )
        noting = _Noting(observer, budget)
        study = StudyLoop(
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
            capacity_bytes=surface.heading.memory_bytes,
            heats=surface.has_heats,
        )
        noting.study = study
        stopped = study.run()
        observer.says(stopped)
        final = Final(space, launches, scorer, observer, stop, by_rate, rate_within, required)
        return _race(study, final, noting, stopped)


def _conditions(surface: Surface, seed: int, devices: int) -> LaunchConditions:
    heading = surface.heading
    return LaunchConditions(
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


def _race(study: StudyLoop, final: Final, noted: _Noting, stopped: str) -> Replayed:
    """Race the best of a search that has ended, and return the result of the replay.

    Raises:
        InfeasibleError: the search ended before it measured the baseline.
    """
    baseline = study.baseline
    if baseline is None:
        raise InfeasibleError(f"{stopped} before the baseline was measured", advice="give it a larger --budget.")
    budget = final.launches.budget
    searched_s = budget.spent_s
    race, winner = race_winner(final, study.ranked, baseline, study.noise)
    compared = race.compared()
    return Replayed(
        steps=tuple(noted.steps),
        heats=tuple(noted.heats),
        baseline=compared.standing(race.baseline),
        best=compared.standing(winner),
        finalists=tuple(compared.standing(e) for e in race.entrants if e.again and compared.in_turns(e, race.baseline)),
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
    """Search a surface as requested; return the part of its space that was searched, and the result.

    Raises:
        AutotuneError: as a real search does.
    """
    space = narrowed(surface.space, spec.fixed, spec.narrowed)
    if len(spec.objectives) > 1:
        raise UsageError("a replay is by one objective", advice="name one.")
    scorer = Scorer(find_objective(spec.objectives[0]), goal=spec.goal)
    try:
        scorer.check()
        within = scorer.facts.rate_within
        return space, replay(
            surface,
            scorer,
            budget_s=spec.budget_s,
            sampler=spec.sampler,
            seed=spec.seed,
            trials=spec.trials,
            by_rate=within is not None,
            rate_within=within or 0.0,
            required=Requirements.parsed(spec.require, spec.goal),
            space=space,
            observer=observer,
            stop=stop,
        )
    finally:
        scorer.close()


def recorded_best(surface: Surface, space: Space) -> float:
    """Return the highest mean rate of any recorded configuration in ``space``."""
    some = (surface.launches.get(key(config), ()) for config in space.grid())
    return max(fmean(r.rate_per_s or 0.0 for r in rows) for rows in some if rows)


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
    return {
        "config": one.config,
        "trial": one.trial,
        "launches": one.launches,
        "verified": one.verified,
        "samples_per_second": one.samples_per_second,
        "ci95": one.ci95,
        "speedup": one.speedup,
        "speedup_ci95": one.speedup_ci95,
    }


class _Noting(Silent):
    """Forwards events to an observer and records the end of each trial."""

    def __init__(self, observer: Observer, budget: Budget) -> None:
        self.steps: list[ReplayedTrial] = []
        self.heats: list[StudyHeat] = []
        self.study: StudyLoop | None = None
        self._observer = observer
        self._budget = budget

    def says(self, sentence: str) -> None:
        self._observer.says(sentence)

    def heat_ends(self, heat: StudyHeat) -> None:
        self.heats.append(heat)
        self._observer.heat_ends(heat)

    def trial_ends(self, trial: Trial) -> None:
        assert self.study is not None
        ranked = self.study.ranked
        believed = ranked[0].number if ranked else None
        self.steps.append(ReplayedTrial(trial, self._budget.spent_s, believed))
        self._observer.trial_ends(trial)
