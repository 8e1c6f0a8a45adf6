"""Whole searches in virtual time: everything is real except the launches."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from autotune.base.errors import (
    InterruptedSearch,
    MachineError,
    NoVerdictError,
    ProfileError,
    ResumeRefusedError,
    WorkloadError,
)
from autotune.base.records import Config, TrialResult, TrialSpec, TrialStatus
from autotune.profile import read
from autotune.samplers import CostModel
from autotune.search import resume, search
from autotune.space import Lessons, key
from autotune.study.budget import GRACE_S
from autotune.study.tables import LaunchTables, read_heats, read_trials
from tests.support import Play, make_measurement

from .world import FIXED, World, plain, rate


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.slow
def test_a_search_finds_the_known_best_within_its_budget(world: World) -> None:
    began = world.clock.now()
    search(world.spec(budget_s=600), world.folder, world.env(plain))
    trials = read_trials(world.files)
    assert trials[0].number == 0 and key(trials[0].config) == key(world.outcome.baseline.config)
    assert len(trials) >= 4 and len(read_heats(world.files)) >= 2
    assert len({key(t.config) for t in trials}) == len(trials)
    assert world.clock.now() - began < 660
    assert world.outcome.best.verified and world.outcome.best.launches >= 2
    assert world.outcome.best.samples_per_second > 0.97 * 30 * 1.6 * 1.25 * 1.2 * 1.15
    assert world.outcome.best.speedup_ci95[0] > 1
    same = world.outcome.best_same_batch.config["batch_size"]
    assert same == world.outcome.baseline.config["batch_size"] == 32
    profile = read(world.files.profile)
    assert dict(profile.configuration) == world.outcome.best.config
    assert world.launchers[0].closed == 1


@pytest.mark.parametrize(("data", "state"), [("synthetic", None), ("generated", "unknown")])
def test_the_profile_says_whether_files_came_from_the_page_cache(world: World, data: str, state: str | None) -> None:
    """This workload does not ask for generated data, so it brings its own, of which nothing is known."""
    search(world.spec(budget_s=120, trials=2, data=data), world.folder, world.env(plain))
    assert read(world.files.profile).conditions.page_cache == world.outcome.page_cache == state


@pytest.mark.slow
def test_an_outcome_says_after_how_many_steps_compiling_pays(world: World) -> None:
    """40 s of compiling are made up at 100 samples/s instead of 50 after 4,000 of them: 125 steps of 32 samples."""

    def compiling(spec: TrialSpec) -> Play:
        compiled = spec.config["compile_mode"] == "default"
        rate_per_s = 100.0 if compiled else 50.0
        measurement = make_measurement(rate_per_s, compile_s=40.0 if compiled else 0.6)
        return Play(rate_per_s=rate_per_s, wall_s=50.0 if compiled else 10.0, measurement=measurement)

    fixed = {**FIXED, "precision": "fp32"}
    del fixed["compile_mode"]
    request = world.spec(fixed=fixed, narrowed={"compile_mode": ("off", "default")}, budget_s=900.0)
    search(request, world.folder, world.env(compiling))
    outcome = world.outcome
    assert outcome.best.config["compile_mode"] == "default" and outcome.break_even is not None
    assert outcome.break_even.steps == pytest.approx(125, rel=0.1)


@pytest.mark.slow
def test_the_winner_of_the_search_loses_if_it_cannot_be_reproduced(world: World) -> None:
    lucky: set[str] = set()

    def flattering(spec: TrialSpec) -> Play:
        # In the search one batch size looks far too good.
        if spec.config["batch_size"] == 128 and spec.launch.startswith(("0", "heat-")):
            lucky.add(key(spec.config))
            return Play(rate_per_s=200.0, wall_s=15.0)
        return Play(rate_per_s=rate(spec) * (0.5 if spec.config["batch_size"] == 128 else 1.0), wall_s=15.0)

    search(world.spec(), world.folder, world.env(flattering))
    assert lucky
    assert world.outcome.best.config["batch_size"] != 128


@pytest.mark.slow
def test_a_finalist_that_fails_when_launched_again_drops_out(world: World) -> None:
    failed: list[str] = []

    def brittle(spec: TrialSpec) -> Play:
        if spec.launch.startswith("verify") and spec.config["batch_size"] == 128:
            failed.append(spec.launch)
            return Play(status=TrialStatus.CRASHED, wall_s=3.0)
        return Play(rate_per_s=rate(spec), wall_s=15.0)

    search(world.spec(), world.folder, world.env(brittle))
    assert failed
    assert world.outcome.best.config["batch_size"] != 128


@pytest.mark.slow
def test_nothing_that_an_oom_rules_out_is_launched(world: World) -> None:
    def small(spec: TrialSpec) -> Play:
        if int(spec.config["batch_size"]) >= 64:
            return Play(status=TrialStatus.OOM, wall_s=2.0)
        return Play(rate_per_s=rate(spec), wall_s=5.0)

    # NumPy, which Optuna uses, takes seeds of 32 bits only.
    search(world.spec(sampler="random", budget_s=400, seed=2**40), world.folder, world.env(small))
    trials = read_trials(world.files)
    ooms = [t for t in trials if t.result.status is TrialStatus.OOM]
    assert ooms
    lessons = Lessons()
    for trial in trials:
        assert not lessons.rule_out(trial.config)
        lessons.learn(trial.result.status, trial.config)


def test_every_trial_is_learnt_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    taught: list[str] = []
    learn = CostModel.learn

    def counted(costs: CostModel, config: Config, result: TrialResult) -> None:
        taught.append(result.launch)
        learn(costs, config, result)

    monkeypatch.setattr(CostModel, "learn", counted)
    search(world.spec(sampler="auto", trials=5), world.folder, world.env(plain))
    assert sorted(taught) == [t.result.launch for t in read_trials(world.files)]


def test_a_slow_trial_is_pruned_and_never_wins(world: World) -> None:
    search(world.spec(sampler="random"), world.folder, world.env(plain))
    trials = read_trials(world.files)
    pruned = [t for t in trials if t.result.status is TrialStatus.PRUNED]
    assert pruned
    for trial in pruned:
        before = [t.rate_per_s or 0 for t in trials[: trial.number] if t.score is not None]
        assert trial.score is None and (trial.rate_per_s or 0) < max(before)


@pytest.mark.slow
def test_a_failing_baseline_stops_the_search(world: World) -> None:
    def broken(spec: TrialSpec) -> Play:
        return Play(status=TrialStatus.USER_ERROR, cause="KeyError: 'label' (mine.py:12)", wall_s=2.0)

    with pytest.raises(WorkloadError, match=r"mine\.py:12"):
        search(world.spec(), world.folder, world.env(broken))
    assert len(read_trials(world.files)) == 1
    with pytest.raises(WorkloadError, match=r"mine\.py:12"):
        resume(world.files, world.env(broken))
    assert len(read_trials(world.files)) == 1


def test_a_budget_too_small_for_the_baseline_is_reported(world: World) -> None:
    def slow(spec: TrialSpec) -> Play:
        return Play(rate_per_s=1.0, wall_s=500.0)

    began = world.clock.now()
    with pytest.raises(NoVerdictError, match="the budget is spent before the baseline was measured") as raised:
        search(world.spec(budget_s=30), world.folder, world.env(slow))
    (seconds,) = re.findall(r"--budget \+(\d+)s", str(raised.value.advice))
    # Cut short, but for what a budget may be exceeded by.
    assert world.clock.now() - began < 30 + GRACE_S + 2 and int(seconds) >= 5 * 30


def test_a_given_number_of_trials_is_respected(world: World) -> None:
    search(world.spec(trials=5), world.folder, world.env(plain))
    assert sum(world.outcome.trials.values()) == 5


def test_an_exhausted_space_ends_the_search(world: World) -> None:
    fixed = {"precision": "fp32", "compile_mode": "off", "memory_format": "contiguous", "optimizer_impl": "foreach"}
    narrow = {"batch_size": ("32", "64"), "num_workers": ("0",), "intra_op_threads": ("2", "4")}
    search(world.spec(fixed=fixed, narrowed=narrow, sampler="grid"), world.folder, world.env(plain))
    assert "tried" in world.outcome.stopped
    # Batch sizes times threads, and the baseline, whose optimizer is another.
    assert sum(world.outcome.trials.values()) == 5


@pytest.mark.slow
@pytest.mark.parametrize("launch", [0, 1, 2, 3, 5, 9, 14])
def test_a_kill_at_any_launch_leads_to_the_same_end(world: World, launch: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(world.spec(), world.folder, world.env(plain, raise_at={launch: KeyboardInterrupt()}))
    before = {t.number: t for t in read_trials(world.files)}
    resume(world.files, world.env(plain))
    now = {t.number: t for t in read_trials(world.files)}
    assert {n: now[n] for n in before} == before
    trials = read_trials(world.files)
    counted = [key(t.config) for t in trials if t.result.status is not TrialStatus.INTERRUPTED]
    assert len(set(counted)) == len(counted)
    interrupted = [t.number for t in trials if t.result.status is TrialStatus.INTERRUPTED]
    repeated = [t.repeats for t in trials if t.repeats is not None]
    # Near the end, a shorter trial may be worth more of the time that is left.
    assert repeated == interrupted or (repeated == [] and launch == 9)
    assert world.outcome.best.speedup > 2


@pytest.mark.stress
def test_kills_at_every_trial_do_not_change_the_result(tmp_path: Path) -> None:
    def ended(world: World) -> tuple[list[str], dict[str, object]]:
        complete = [key(t.config) for t in read_trials(world.files) if t.score is not None]
        return complete, world.outcome.best.config

    whole = World(tmp_path / "whole")
    # Ample time, so that the cost of a kill does not affect which trials fit.
    fixed = {"compile_mode": "off", "num_workers": "0", "optimizer_impl": "fused", "intra_op_threads": "4"}
    fixed["memory_format"] = "channels_last"
    few = {"budget_s": 3000, "fixed": fixed}
    search(whole.spec(**few), whole.folder, whole.env(plain))
    trials = len(read_trials(whole.files))
    assert "budget" not in whole.outcome.stopped and trials >= 6
    # Not after every trial: each takes two seconds, and the kills do the same.
    for number in range(0, trials, 2):
        cut = World(tmp_path / f"cut-{number}")
        with pytest.raises(KeyboardInterrupt):
            # The probe precedes the trials.
            search(cut.spec(**few), cut.folder, cut.env(plain, raise_at={number + 1: KeyboardInterrupt()}))
        resume(cut.files, cut.env(plain))
        assert ended(cut) == ended(whole), f"killed at trial {number}"


@pytest.mark.slow
def test_a_signal_ends_the_search_and_the_interrupted_trial_is_repeated(world: World) -> None:
    def script(spec: TrialSpec) -> Play:
        if spec.number == 3:
            world.signal = 15
        return plain(spec)

    with pytest.raises(InterruptedSearch) as caught:
        search(world.spec(), world.folder, world.env(script))
    assert caught.value.exit_code == 143 and "resume" in str(caught.value.advice)
    cut = read_trials(world.files)[-1]
    assert cut.number == 3 and cut.result.status is TrialStatus.INTERRUPTED
    world.signal = None
    resume(world.files, world.env(plain))
    again = [t for t in read_trials(world.files) if t.repeats == 3]
    assert len(again) == 1 and key(again[0].config) == key(cut.config)


def test_the_budget_continues_after_a_resume(world: World) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(world.spec(budget_s=300), world.folder, world.env(plain, raise_at={8: KeyboardInterrupt()}))
    began = world.clock.now()
    resume(world.files, world.env(plain))
    assert world.outcome.elapsed_s < 360
    assert world.clock.now() - began < 300


def test_a_finished_study_is_not_changed(world: World) -> None:
    search(world.spec(trials=3), world.folder, world.env(plain))
    before = world.files.profile.read_bytes()
    launchers = len(world.launchers)
    resume(world.files, world.env(plain))
    assert world.files.profile.read_bytes() == before and len(world.launchers) == launchers


def test_the_outcome_is_the_one_in_the_folder(world: World) -> None:
    found = search(world.spec(trials=3), world.folder, world.env(plain))
    assert found.files == world.files
    assert found.outcome == world.outcome and found.profile == read(world.files.profile)
    again = resume(world.files, world.env(plain))
    assert (again.files, again.outcome, again.profile) == (found.files, found.outcome, found.profile)


def test_a_finished_study_with_a_damaged_profile_still_has_its_outcome(world: World) -> None:
    found = search(world.spec(trials=3), world.folder, world.env(plain))
    world.files.profile.write_text("no profile")
    again = resume(world.files, world.env(plain))
    assert again.outcome == found.outcome
    with pytest.raises(ProfileError):
        _ = again.profile


def test_a_damaged_outcome_is_reported(world: World) -> None:
    search(world.spec(trials=3), world.folder, world.env(plain))
    world.files.outcome.write_text("{}")
    with pytest.raises(MachineError, match="cannot be read"):
        resume(world.files, world.env(plain))


def test_a_kill_between_profile_and_outcome_leads_to_another_export(world: World) -> None:
    search(world.spec(trials=3, fixed={"compile_mode": "off"}), world.folder, world.env(plain))
    figures = read(world.files.profile).gives
    world.files.outcome.unlink()
    resume(world.files, world.env(plain))
    assert read(world.files.profile).gives == figures
    # The verified launches of the first run were not repeated.
    assert not [s for s in world.launchers[-1].specs if s.launch.startswith("verify")]


def test_saved_weights_and_caches_go_when_no_resume_needs_them(world: World) -> None:
    killed_at = ""

    def weights() -> list[Path]:
        return list(world.files.checks.glob("*/start.pt"))

    def script(spec: TrialSpec) -> Play:
        if spec.launch == killed_at:
            raise KeyboardInterrupt
        if spec.check is not None and spec.check.reference:
            Path(spec.check.store).mkdir(parents=True, exist_ok=True)
            (Path(spec.check.store) / "start.pt").touch()
        elif spec.check is not None:
            assert [str(file.parent) for file in weights()] == [spec.check.store]
            if killed_at == "check":
                raise KeyboardInterrupt
        world.files.compile_cache.mkdir(parents=True, exist_ok=True)
        return plain(spec)

    killed_at = "check"
    with pytest.raises(KeyboardInterrupt):
        search(world.spec(fixed=FIXED), world.folder, world.env(script))
    assert weights()
    killed_at = "device-00000"
    with pytest.raises(KeyboardInterrupt):
        resume(world.files, world.env(script))
    assert world.files.compile_cache.exists()
    killed_at = ""
    resume(world.files, world.env(script))
    assert world.outcome.checks[0].passed
    assert not world.files.checks.exists() and not world.files.caches.exists()


def test_another_machine_is_refused_with_the_differences(world: World) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(world.spec(), world.folder, world.env(plain, raise_at={5: KeyboardInterrupt()}))
    with pytest.raises(ResumeRefusedError) as caught:
        resume(world.files, world.env(plain, torch_version="3.0.0"))
    assert ("torch", "2.9.0", "3.0.0") in caught.value.differences


def test_every_launch_has_a_row(world: World) -> None:
    search(world.spec(trials=4), world.folder, world.env(plain))
    with closing(sqlite3.connect(world.files.database)) as connection:
        rows = connection.execute("select launch from autotune_launches").fetchall()
    assert sorted(name for (name,) in rows) == sorted(s.launch for s in world.launchers[0].specs)
    tables = LaunchTables(world.files)
    measured_s = tables.measured_s()
    assert measured_s > 0
    # The folders contain the same.
    assert (tables.rebuild(), tables.measured_s()) == (len(rows), pytest.approx(measured_s))


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    """Also one with characters that mean something else in a URL."""
    folder = tmp_path / "why? 50%25 {1} ü#&"
    folder.mkdir()
    worlds = [World(folder), World(folder)]
    for i, world in enumerate(worlds):
        search(world.spec(name=f"s{i}", trials=2), folder, world.env(plain))
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("study.db")) == ["s0/study.db", "s1/study.db"]
