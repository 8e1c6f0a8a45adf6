"""Failing launches in a search, in virtual time: repeats, lessons, and ends of the search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest

from autotune.base.errors import InterruptedSearch, MachineError, NoVerdictError, WorkloadError
from autotune.base.observer import Observer
from autotune.base.records import Trial, TrialSpec, TrialStatus
from autotune.search import resume, search
from autotune.space import Lessons, key
from autotune.stats import PRIORS
from autotune.study.budget import search_share
from autotune.study.tables import read_trials
from tests.support import Play, make_measurement

from .world import World, plain, rate

PLAIN = {"compile_mode": "off", "optimizer_impl": "foreach"}
BASELINE = 0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


class Script:
    """Plays `plain`, except for the given trials, which play the next of their scripts at each launch."""

    def __init__(self, plays: Mapping[int, list[Play]]) -> None:
        self._plays = plays
        self._first: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def __call__(self, spec: TrialSpec) -> Play:
        if spec.number is None:
            return plain(spec)
        first = self._first.setdefault(key(spec.config), spec.number)
        again = self._seen[key(spec.config)] = self._seen.get(key(spec.config), -1) + 1
        plays = self._plays.get(first, [])
        return plays[again] if again < len(plays) else plain(spec)


def failing(status: TrialStatus, **changes: object) -> Play:
    return Play(status=status, wall_s=4.0, **changes)  # type: ignore[arg-type]


DISTURBED = failing(TrialStatus.INTERRUPTED, transient=True, cause="others used 1.8 cores all the time")
RAISED = failing(TrialStatus.USER_ERROR)
PASSING = [failing(status) for status in (TrialStatus.CRASHED, TrialStatus.KILLED, TrialStatus.LOADER_WORKER_DIED)]


def trials_of(world: World) -> list[Trial]:
    return read_trials(world.files)


class TestRetries:
    @pytest.mark.slow
    def test_a_transient_failure_is_repeated_at_once_and_twice_at_most(self, world: World) -> None:
        crashed, killed, worker_died = PASSING
        plays = {2: [crashed, killed], 5: [worker_died, DISTURBED], 8: [*PASSING, Play()], 11: [RAISED]}
        # By the seed 0 one of those that are repeated takes longer than its limit.
        search(world.spec(trials=6, seed=1), world.folder, world.env(Script(plays)))
        trials = trials_of(world)
        assert [t.repeats for t in trials] == [None, None, None, 2, 3, None, 5, 6, None, 8, 9, None]
        for retry in (t for t in trials if t.repeats is not None):
            assert key(retry.config) == key(trials[retry.repeats or 0].config)
        ends = [t.result.status.value for t in trials[2:]]
        assert ends[:5] == ["crashed", "killed", "complete", "loader_worker_died", "interrupted"]
        assert ends[5] in ("complete", "pruned")
        # Three failures are enough. An exception in the user's own code is not repeated, because it would recur.
        assert ends[6:] == ["crashed", "killed", "loader_worker_died", "user_error"]
        # Six configurations were requested, and six were tried.
        assert len({key(t.config) for t in trials}) == 6

    @pytest.mark.slow
    def test_a_resume_keeps_the_number_of_attempts(self, world: World) -> None:
        # Launches 0 to 5 are the probe, the baseline, a heat, trial 1, another heat and the first failure.
        script = Script({2: [*PASSING, Play()]})
        with pytest.raises(KeyboardInterrupt):
            search(world.spec(trials=6), world.folder, world.env(script, raise_at={6: KeyboardInterrupt()}))
        resume(world.files, world.env(script))
        tries = [t for t in trials_of(world) if key(t.config) == key(trials_of(world)[2].config)]
        counted = [t for t in tries if t.result.status is not TrialStatus.INTERRUPTED]
        # The kill used up one of the three scripts, but the interrupted launch did not count as an attempt.
        assert len(counted) == 3 and len(tries) == 4
        assert [t.repeats for t in tries[1:]] == [t.number for t in tries[:-1]]


class TestBaseline:
    def test_is_repeated_like_any_other(self, world: World) -> None:
        search(world.spec(trials=2), world.folder, world.env(Script({BASELINE: [DISTURBED, PASSING[0]]})))
        first = trials_of(world)[:3]
        assert {key(t.config) for t in first} == {key(world.outcome.baseline.config)}
        assert world.outcome.baseline.trial == 2

    def test_that_fails_three_times_stops_the_search(self, world: World) -> None:
        script = Script({BASELINE: [*PASSING, Play()]})
        for run in (lambda: search(world.spec(), world.folder, world.env(script)), lambda: again(world, script)):
            with pytest.raises(WorkloadError, match="3 times in a row: as scripted"):
                run()
            assert len(trials_of(world)) == 3

    @pytest.mark.slow
    def test_that_is_disturbed_by_others_is_a_machine_error(self, world: World) -> None:
        with pytest.raises(MachineError, match="too busy to measure: others used 1.8 cores") as caught:
            search(world.spec(), world.folder, world.env(Script({BASELINE: [DISTURBED] * 3})))
        assert caught.value.exit_code == 5 and "`autotune resume` launches the baseline again" in str(
            caught.value.advice
        )
        # On a machine that is still busy, each run tries anew, and none uses up the budget of the next.
        for _ in range(4):
            launched = len(trials_of(world))
            with pytest.raises(MachineError, match="too busy"):
                again(world, Script({launched: [DISTURBED] * 3}))
            assert len(trials_of(world)) == launched + 3
        # Once it is quiet, the search has all of its budget.
        again(world, plain)
        assert world.outcome.baseline.trial == 15 and world.outcome.best.speedup > 2
        assert trials_of(world)[15].repeats == 14

    @pytest.mark.slow
    def test_that_raises_stops_the_search_at_once(self, world: World) -> None:
        with pytest.raises(WorkloadError, match="user_error"):
            search(world.spec(), world.folder, world.env(Script({BASELINE: [RAISED]})))
        assert len(trials_of(world)) == 1


def again(world: World, script: Callable[[TrialSpec], Play]) -> None:
    resume(world.files, world.env(script))


class TestLessons:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("status", "when"),
        [
            (TrialStatus.SHM_EXHAUSTED, lambda c: int(c["num_workers"]) * int(c["batch_size"]) >= 128),
            (TrialStatus.COMPILE_FAILED, lambda c: c["compile_mode"] != "off"),
            (TrialStatus.DIVERGED, lambda c: c["precision"] == "bf16"),
        ],
        ids=lambda p: getattr(p, "value", ""),
    )
    def test_no_configuration_that_a_failure_rules_out_is_launched(
        self, world: World, status: TrialStatus, when: Callable[[Mapping[str, object]], bool]
    ) -> None:
        def script(spec: TrialSpec) -> Play:
            return failing(status) if when(spec.config) else Play(rate_per_s=rate(spec), wall_s=4.0)

        search(world.spec(sampler="random", trials=20, budget_s=1000), world.folder, world.env(script))
        lessons = Lessons()
        for trial in trials_of(world):
            assert not lessons.rule_out(trial.config)
            lessons.learn(trial.result.status, trial.config)
        assert status.value in world.outcome.trials

    @pytest.mark.slow
    def test_lessons_are_kept_on_a_resume(self, world: World) -> None:
        def script(spec: TrialSpec) -> Play:
            return failing(TrialStatus.COMPILE_FAILED) if spec.config["compile_mode"] != "off" else plain(spec)

        fixed = {"batch_size": "32", "precision": "fp32", "memory_format": "contiguous"}
        spec = world.spec(fixed=fixed, sampler="random", trials=12, budget_s=3000)
        with pytest.raises(KeyboardInterrupt):
            search(spec, world.folder, world.env(script, raise_at={8: KeyboardInterrupt()}))
        resume(world.files, world.env(script))
        assert world.outcome.trials["compile_failed"] == 1

    @pytest.mark.slow
    def test_a_machine_that_cannot_compile_is_found_out_once(self, world: World) -> None:
        """Even if the search ends in between. What the model's own code causes rules out less."""

        def script(spec: TrialSpec) -> Play:
            compiled = spec.config["compile_mode"] != "off"
            lacking = failing(TrialStatus.COMPILE_FAILED, cause="Python.h is missing", cannot_compile=True)
            return lacking if compiled else Play(rate_per_s=rate(spec), wall_s=4.0)

        said: list[str] = []

        class Listening(Observer):
            def says(self, sentence: str) -> None:
                said.append(sentence)

        spec = world.spec(sampler="random", trials=16, budget_s=1000)
        with pytest.raises(KeyboardInterrupt):
            search(
                spec, world.folder, replace(world.env(script, raise_at={8: KeyboardInterrupt()}), observer=Listening())
            )
        resume(world.files, replace(world.env(script), observer=Listening()))
        assert world.outcome.trials["compile_failed"] == 1
        assert [s for s in said if "compile_mode stays off" in s and "Python.h is missing" in s] == [said[0]]


class TestEarlyEnd:
    @pytest.mark.slow
    def test_a_trial_is_compared_with_the_best_of_its_kind(self, world: World) -> None:
        search(
            world.spec(trials=12, fixed=PLAIN, baseline={"optimizer_impl": "foreach"}), world.folder, world.env(plain)
        )
        asked = {s.number: s.plan.prune_below_per_s for s in world.launchers[0].specs if s.number is not None}
        margin = 2 * sqrt(2) * PRIORS["cpu"].sd
        trials = trials_of(world)
        assert asked[0] == 0.0
        for trial in trials[1:]:
            done = [t for t in trials[: trial.number] if t.score is not None]
            same = [t for t in done if t.config["batch_size"] == 32]
            rivals = same if trial.config["batch_size"] == 32 else done
            best = max(t.rate_per_s or 0.0 for t in rivals)
            assert asked[trial.number] == pytest.approx(best * (1 - margin))
        thresholds = {trial.config["batch_size"] == 32: asked[trial.number] for trial in trials[1:]}
        assert len(thresholds) == 2, "both kinds were tried"

    @pytest.mark.slow
    def test_the_clock_at_which_the_best_was_seen_is_told(self, world: World) -> None:
        rates = {0: 300.0, 1: 600.0, 2: 400.0}
        plays = {
            n: [Play(rate_per_s=r, measurement=make_measurement(r, sm_clock_mhz=1000.0 + n), wall_s=4.0)]
            for n, r in rates.items()
        }
        search(world.spec(trials=4, fixed=PLAIN), world.folder, world.env(Script(plays)))
        plans = {s.number: s.plan for s in world.launchers[0].specs if s.number is not None}
        assert plans[0].prune_clock_mhz is None
        trials = trials_of(world)
        for trial in trials[1:]:
            margin = plans[trial.number].prune_below_per_s / (1 - 2 * sqrt(2) * PRIORS["cpu"].sd)
            (seen,) = (t for t in trials[: trial.number] if t.rate_per_s == pytest.approx(margin))
            assert plans[trial.number].prune_clock_mhz == 1000.0 + seen.number

    @pytest.mark.slow
    def test_another_objective_never_ends_a_trial_early(self, world: World) -> None:
        search(world.spec(trials=3, objective="memory_thrift"), world.folder, world.env(plain))
        assert {s.plan.prune_below_per_s for s in world.launchers[0].specs if s.number is not None} == {0.0}

    @pytest.mark.slow
    def test_the_measurement_of_a_pruned_trial_is_kept_but_is_no_candidate(self, world: World) -> None:
        fast = Play(status=TrialStatus.PRUNED, rate_per_s=500.0, measurement=make_measurement(500.0), wall_s=4.0)
        search(world.spec(trials=6, fixed=PLAIN), world.folder, world.env(Script({3: [fast]})))
        pruned = trials_of(world)[3]
        assert (pruned.result.status, pruned.score) == (TrialStatus.PRUNED, None)
        assert pruned.rate_per_s == pytest.approx(500.0)
        assert world.outcome.best.trial != 3 and world.outcome.best.samples_per_second < 400
        # Nor is it a standard for others.
        later = [s.plan.prune_below_per_s for s in world.launchers[0].specs if (s.number or 0) > 3]
        assert later and max(later) < 400


class TestBudget:
    @pytest.mark.slow
    @pytest.mark.parametrize("budget_s", [90.0, 300.0])
    def test_what_the_proof_needs_is_reserved_for_it(self, world: World, budget_s: float) -> None:
        spent: list[float] = []
        began = world.clock.now()

        def script(spec: TrialSpec) -> Play:
            # The best at the user's own batch size may take time from the proof.
            if spec.number is not None and spec.config["batch_size"] != 32:
                spent.append(world.clock.now() - began)
            return Play(rate_per_s=rate(spec), wall_s=6.0)

        search(world.spec(budget_s=budget_s), world.folder, world.env(script))
        assert spent
        # There was time to start the last trial, but not another one.
        # A fifth of a scripted launch is its first step, most of which the proof is spared.
        usual_s = 6.0 - 0.7 * 1.2
        assert spent[-1] <= search_share(budget_s, usual_s) * budget_s - 6.0 < spent[-1] + 12.0
        assert world.outcome.best.verified and world.outcome.baseline.verified

    @pytest.mark.slow
    def test_while_there_is_nothing_to_prove_the_search_goes_on(self, world: World) -> None:
        spent: list[float] = []
        began = world.clock.now()

        def script(spec: TrialSpec) -> Play:
            spent.append(world.clock.now() - began)
            return replace(RAISED, wall_s=1.0) if spec.number else Play(rate_per_s=rate(spec), wall_s=6.0)

        with pytest.raises(NoVerdictError):
            search(world.spec(budget_s=100.0), world.folder, world.env(script))
        assert spent[-1] > 85.0

    @pytest.mark.slow
    def test_waiting_for_a_card_does_not_count(self, world: World) -> None:
        """A launch that is still waiting has not used any of its time, however long others keep the card."""

        def script(spec: TrialSpec) -> Play:
            return Play(rate_per_s=rate(spec), wall_s=6.0, waited_s=500.0 if spec.number == 1 else 0.0)

        search(world.spec(budget_s=60.0), world.folder, world.env(script))
        first, second, *_ = trials_of(world)
        assert second.result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)
        assert second.result.waited_s == 500.0 and first.result.waited_s == 0.0
        assert len(trials_of(world)) >= 3 and world.outcome.best.verified
        assert world.outcome.wait_s == 500.0 and world.outcome.elapsed_s < 80.0

    def test_a_signal_ends_waiting(self, world: World) -> None:
        def script(spec: TrialSpec) -> Play:
            world.signal = 2 if spec.number == 1 else None
            return Play(rate_per_s=rate(spec), wall_s=6.0, waited_s=500.0 if spec.number == 1 else 0.0)

        began = world.clock.now()
        with pytest.raises(InterruptedSearch):
            search(world.spec(budget_s=60.0), world.folder, world.env(script))
        assert world.clock.now() - began < 100.0
        waiting = trials_of(world)[1].result
        assert (waiting.status, waiting.phase, waiting.transient) == (TrialStatus.INTERRUPTED, None, False)


class TestFullDisk:
    @pytest.mark.slow
    def test_a_launch_without_disk_space_stops_the_search_and_nothing_is_lost(self, world: World) -> None:
        full = MachineError("the disk is full", advice="free some space.")
        with pytest.raises(MachineError, match="the disk is full"):
            search(world.spec(trials=8, budget_s=3000), world.folder, world.env(plain, raise_at={7: full}))
        before = trials_of(world)
        done = len(before)
        assert done >= 2
        resume(world.files, world.env(plain))
        trials = trials_of(world)
        assert trials[:done] == before
        # A launch cut short by a full disk is not a failure of its configuration.
        assert trials[done].result.status is TrialStatus.INTERRUPTED and trials[done + 1].repeats == done
        assert len({key(t.config) for t in trials}) == 8
