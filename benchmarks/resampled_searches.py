"""Searches in virtual time, with launches drawn from a recording of equal launches and a planted slowdown.

The verification is autotune's own (`autotune.search.proof.winner.prove`). A search uses launches that were recorded
consecutively (a block bootstrap: Künsch, "The jackknife and the bootstrap for general stationary observations", Annals
of Statistics 17, 1989), so that drift and slow periods are preserved.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autotune import stats
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import DataRef, Goal, LaunchKind, Measurement, Trial, TrialSpec, WorkloadRef
from autotune.search.proof import ProofContext
from autotune.search.proof.winner import Contest, Proof, prove
from autotune.space import Space, SpaceRequest, build_space
from autotune.study.budget import Budget
from autotune.study.launches import LaunchConditions, Launches, once
from autotune.workload.catalog import find_objective
from autotune.workload.scoring import Scorer, load, score
from benchmarks.launching import plain_config
from benchmarks.recording import RecordedLaunch
from tests.support import FakeClock, Play, ScriptedLauncher, make_host, make_probe

#: Launches per budget: one launch takes this fraction of a search's budget, as in `autotune.study.launches.plan_for`.
LAUNCHES_A_BUDGET = 40
#: Numbers of recorded launches to advance between two launches of a search; varied so that no two searches are alike.
STEPS = (1, 1, 2)
KNOB = "workload.variant"
_MEASURING = (LaunchKind.MEASURE, LaunchKind.DEVICE_ONLY, LaunchKind.LOADER_ONLY)


class InProcess(Scorer):
    """The built-in objective, called in this process instead of a child."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._objective = load(path)

    def score(self, measurement: Measurement) -> float:
        return score(self._objective, measurement, Goal())


class Replay:
    """Plays the recording from some point, forward or backward in time, reversing at its ends."""

    def __init__(self, launches: Sequence[RecordedLaunch], rng: random.Random) -> None:
        self._launches = launches
        self._rng = rng
        self._at = rng.randrange(len(launches))
        self._direction = rng.choice((1, -1))

    def next(self) -> RecordedLaunch:
        """Return the launch at the current point, and advance."""
        found = self._launches[self._at]
        step = self._direction * self._rng.choice(STEPS)
        if not 0 <= self._at + step < len(self._launches):
            self._direction, step = -self._direction, -step
        self._at += step
        return found


@dataclass(frozen=True)
class Setting:
    """The common settings of all searches.

    Attributes:
        slowdown: a step of a slow variant takes ``1 + slowdown`` times as long.
        slow_baseline: the baseline is slow and the candidates are not; otherwise the reverse.
    """

    slowdown: float
    slow_baseline: bool
    candidates: int = 1

    def slow(self, variant: int) -> bool:
        """Return whether a variant is slow; 0 is the baseline."""
        return (variant == 0) == self.slow_baseline


class Searches:
    """Runs searches over one recording.

    Args:
        budget_s: virtual seconds each may use.
        folder: holds the searches' files while they run.
    """

    def __init__(self, launches: Sequence[RecordedLaunch], budget_s: float | None, folder: Path, seed: int) -> None:
        self._launches = launches
        self._wall_s = median(one.wall_s for one in launches)
        self.budget_s = budget_s or LAUNCHES_A_BUDGET * self._wall_s
        self._folder = folder
        self._rng = random.Random(seed)
        self._scorer = InProcess(find_objective("throughput"))
        self._made = 0

    def run(self, setting: Setting) -> Proof:
        """Run one search: try the baseline and every candidate once, then verify the best."""
        self._made += 1
        folder = self._folder / f"search-{self._made}"
        try:
            return self._run(setting, StudyFiles(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, setting: Setting, files: StudyFiles) -> Proof:
        files.folder.mkdir(parents=True)
        space = space_of(setting.candidates)
        clock = FakeClock()
        launches = Launches(
            files,
            _conditions(),
            Budget(files, self.budget_s, clock),
            ScriptedLauncher(self._script(setting), clock),
            Observer(),
            lambda: False,
            busy_cores=None,
        )
        trials = []
        for number in range(setting.candidates + 1):
            config = {**space.baseline, KNOB: number}
            spec = launches.spec(LaunchKind.MEASURE, launches.files.trial(number), config, number=number)
            result = launches.running.alone(f"trial {number}", once(spec))
            assert result.measurement is not None, result.cause
            score = self._scorer.score(result.measurement)
            trials.append(Trial(number=number, config=config, result=result, score=score))
        best_first = sorted(trials, key=lambda t: -(t.score or 0.0))
        context = ProofContext(space, launches, self._scorer, Observer(), stop=lambda: None)
        contest, noise = Contest(context, trials[0]), stats.PRIORS["cpu"]
        contest.race_finalists(context, contest.choose(best_first, noise), trials[-1].number)
        return prove(contest, noise)

    def _script(self, setting: Setting) -> Callable[[TrialSpec], Play]:
        replay = Replay(self._launches, self._rng)

        def script(spec: TrialSpec) -> Play:
            if spec.kind not in _MEASURING:
                return Play(wall_s=self._wall_s)
            one = replay.next()
            slowdown = setting.slowdown if setting.slow(int(spec.config[KNOB])) else 0.0
            measurement = one.measurement(slowdown)
            return Play(rate_per_s=measurement.samples_per_s, wall_s=one.wall_s, measurement=measurement)

        return script


def space_of(candidates: int) -> Space:
    """Return a space of the baseline and ``candidates`` variants that differ in one knob of the workload."""
    probe = make_probe(workload_knobs={"variant": tuple(range(candidates + 1))})
    fixed = plain_config(probe.default_batch_size, probe.cores)
    return build_space(probe, make_host(), SpaceRequest(fixed=fixed))


def _conditions() -> LaunchConditions:
    return LaunchConditions(
        workload=WorkloadRef(name="recorded", module="recorded"),
        data=DataRef(kind="none"),
        device="cpu",
        batch_size=make_probe().default_batch_size,
        image_size=None,
        seed=0,
        worker_start_method="fork",
        memory_limit_bytes=None,
        env={},
    )
