"""The start of a search: configurations that won before, here or elsewhere, and the description before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.base.errors import UsageError
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import CommandRef, Finding, Heat, HeatEntrant, TrialSpec, TrialStatus
from autotune.search import Environment, fork, preview, resume, search
from autotune.search.setup import _is_alike
from autotune.space import key
from autotune.study.agenda import none_loads_faster, waits_as_long
from autotune.study.request import read_request
from autotune.study.tables import read_trials
from tests.support import Play, make_measurement, make_trial

from .world import World, plain


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


class Told(Observer):
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def says(self, sentence: str) -> None:
        self.sentences.append(sentence)


def told_by(env: Environment) -> tuple[Environment, Told]:
    told = Told()
    return Environment(told, env.clock, env.stop, env.launcher), told


class TestWonElsewhere:
    @pytest.mark.slow
    def test_the_winner_of_the_same_workload_is_tried_first(self, world: World) -> None:
        search(world.spec(), world.folder, world.env(plain))
        env, told = told_by(world.env(plain))
        files = search(world.spec(name="again", trials=3), world.folder, env).files
        trials = read_trials(files)
        assert key(trials[1].config) == key(world.outcome.best.config)
        assert "trying first what won in s" in told.sentences

    @pytest.mark.slow
    def test_on_other_hardware_only_the_same_workload_counts(self, world: World) -> None:
        search(world.spec(), world.folder, world.env(plain))
        env, told = told_by(world.env(plain, device_name="another", torch_version="2.12.0"))
        search(world.spec(name="there", trials=2), world.folder, env)
        assert any("won in s" in s for s in told.sentences)

    @pytest.mark.slow
    def test_another_training_and_what_is_only_likely_do_not_count(self, world: World) -> None:
        search(world.spec(), world.folder, world.env(plain))
        env, told = told_by(world.env(plain))
        search(world.spec(name="sibling", model="resnet34", trials=2), world.folder, env)
        assert not any("won in" in s for s in told.sentences)
        likely = world.outcome.model_copy(update={"finding": Finding.LIKELY, "evidence": "one launch of each"})
        world.files.outcome.write_text(likely.model_dump_json())
        env, told = told_by(world.env(plain))
        search(world.spec(name="again", trials=2), world.folder, env)
        assert not any("won in" in s for s in told.sentences)

    def test_of_scripts_the_command_tells_them_apart(self, world: World) -> None:
        command = CommandRef(words=("python", "train.py"), folder="/one")
        one = world.spec(command=command, model="train")
        assert _is_alike(one, one.model_copy(update={"name": "b", "budget_s": 5.0}))
        other = command.model_copy(update={"folder": "/two"})
        assert not _is_alike(one, one.model_copy(update={"command": other}))

    @pytest.mark.slow
    def test_a_configuration_is_not_tried_twice_nor_for_another_objective(self, world: World) -> None:
        search(world.spec(), world.folder, world.env(plain))
        search(world.spec(name="second"), world.folder, world.env(plain))
        env, told = told_by(world.env(plain))
        search(world.spec(name="third", trials=6), world.folder, env)
        tried = [key(t.config) for t in read_trials(StudyFiles(world.folder / "third"))]
        assert len(set(tried)) == len(tried)
        env, told = told_by(world.env(plain))
        search(world.spec(name="fourth", objective="first_epoch", trials=2), world.folder, env)
        assert not any("won in" in s for s in told.sentences)

    @pytest.mark.parametrize(
        ("waits", "workers", "left"),
        [(0.9, 0, True), (0.9, 8, False), (0.5, 0, False), (None, 0, False)],
    )
    def test_what_speeds_up_the_device_waits_until_the_loader_is_seen_to(
        self, waits: float | None, workers: int, left: bool
    ) -> None:
        measured = make_measurement(10.0, loader_wait_fraction=waits)
        baseline = make_trial(0, {"batch_size": 8, "num_workers": 0, "precision": "fp32"}, 10.0)
        baseline = baseline.model_copy(update={"result": baseline.result.model_copy(update={"measurement": measured})})
        config = {"batch_size": 16, "num_workers": workers, "precision": "bf16"}
        assert waits_as_long(config, baseline) is left
        assert not waits_as_long(config, None)

    @pytest.mark.slow
    def test_an_illegal_configuration_is_left_out(self, world: World) -> None:
        search(world.spec(), world.folder, world.env(plain))
        assert world.outcome.best.config["precision"] == "bf16"
        fixed = world.spec(name="fixed", fixed={"precision": "fp32"}, trials=4)
        files = search(fixed, world.folder, world.env(plain)).files
        assert {t.config["precision"] for t in read_trials(files)} == {"fp32"}

    @pytest.mark.slow
    def test_a_damaged_study_is_ignored(self, world: World) -> None:
        search(world.spec(), world.folder, world.env(plain))
        world.files.outcome.write_text("{}")
        env, told = told_by(world.env(plain))
        search(world.spec(name="again", trials=2), world.folder, env)
        assert not any("won in" in s for s in told.sentences)

    @pytest.mark.slow
    def test_a_resume_keeps_the_first_configurations(self, world: World) -> None:
        search(world.spec(), world.folder, world.env(plain))
        # Probe and baseline, then killed while the winner is tried.
        stop = {2: KeyboardInterrupt()}
        with pytest.raises(KeyboardInterrupt):
            search(world.spec(name="cut", trials=3), world.folder, world.env(plain, raise_at=stop))
        world.files.outcome.unlink()
        resume(StudyFiles(world.folder / "cut"), world.env(plain))
        trials = [t for t in read_trials(StudyFiles(world.folder / "cut")) if t.score is not None]
        assert trials[1].config["precision"] == "bf16"


class TestFork:
    @pytest.mark.slow
    def test_a_new_study_tries_the_best_first(self, world: World) -> None:
        def without_channels_last(spec: TrialSpec) -> Play:
            return plain(spec)

        # With one batch size, so that all certainly fit into memory.
        spec = world.spec(trials=5, fixed={"batch_size": "32"})
        with pytest.raises(KeyboardInterrupt):
            search(spec, world.folder, world.env(plain, raise_at={9: KeyboardInterrupt()}))
        before = read_trials(world.files)
        old = [t for t in before if t.score is not None]
        best = sorted(old[1:], key=lambda t: -(t.score or 0))[:2]
        files = fork(world.files, world.env(without_channels_last, torch_version="2.12.0")).files
        new = read_trials(files)
        assert files.name != world.files.name
        assert [key(t.config) for t in new[1:3]] == [key(t.config) for t in best]
        assert read_request(files).mark != read_request(world.files).mark
        # The old study is unchanged.
        assert read_trials(world.files) == before

    def test_a_study_without_trials_is_refused(self, world: World) -> None:
        with pytest.raises(KeyboardInterrupt):
            search(world.spec(), world.folder, world.env(plain, raise_at={1: KeyboardInterrupt()}))
        with pytest.raises(UsageError, match="nothing to start from"):
            fork(world.files, world.env(plain))


class TestPreview:
    def test_describes_the_first_trials_and_launches_only_the_probe(self, world: World) -> None:
        found = preview(world.spec(budget_s=600), world.env(plain), world.folder / "nothing")
        assert found.exact and found.size == sum(1 for _ in found.space.grid())
        assert found.search_s == pytest.approx(240)
        assert len(found.first) == 8 and len({key(p.config) for p in found.first}) == 8
        assert all(found.space.refusal(p.config) is None and p.predicted.rate_per_s > 0 for p in found.first)
        assert "bf16" in {p.config["precision"] for p in found.first[:3]}
        assert [s.kind for launcher in world.launchers for s in launcher.specs] == ["probe"]

    def test_random_search_has_no_description(self, world: World) -> None:
        assert preview(world.spec(sampler="random"), world.env(plain), world.folder / "nothing").first == ()


@pytest.mark.parametrize(
    ("others", "shown"),
    [
        ([(1.0, TrialStatus.COMPLETE), (0.9, TrialStatus.PRUNED)], True),
        ([(1.0, TrialStatus.COMPLETE), (1.3, TrialStatus.COMPLETE)], False),
        # It ended before eight workers had their turn.
        ([(1.0, TrialStatus.COMPLETE), (None, TrialStatus.INTERRUPTED)], False),
        ([(1.0, TrialStatus.COMPLETE), (None, TrialStatus.HOST_OOM)], True),
        ([(None, TrialStatus.HOST_OOM)], False),
    ],
)
def test_a_heat_of_loaders_shows_only_what_had_its_turn(
    others: list[tuple[float | None, TrialStatus]], shown: bool
) -> None:
    entrants = [HeatEntrant(config={"num_workers": 0}, ratio=1.0)]
    entrants += [
        HeatEntrant(config={"num_workers": i}, ratio=ratio, status=status)
        for i, (ratio, status) in enumerate(others, 1)
    ]
    heat = Heat(
        side="loader",
        entrants=tuple(entrants),
        noise_sd=0.01,
        startup_s=1.0,
        switch_s=1.0,
        measured_s=1.0,
        ended="time",
    )
    assert none_loads_faster(heat) is shown
