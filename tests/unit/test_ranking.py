"""Finished studies under other questions: nothing is launched, and the same measurements answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.base.errors import InfeasibleError, UsageError
from autotune.base.records import StudySpec, TrialSpec
from autotune.cli import main
from autotune.profile import dump, parse, read
from autotune.profile.export.format import heading
from autotune.search import load_outcome, search
from autotune.search.ranking import Ranking, pareto, profile_of_trial, rank
from autotune.space.requirements import figure_called
from tests.support import Play, make_measurement

from .world import FIXED, World, rate

GIB = 2**30


def compiling(spec: TrialSpec) -> Play:
    """Compiled, it is half as fast again and takes a minute to begin; bf16 takes less energy and half the memory."""
    compiled, bf16 = spec.config["compile_mode"] != "off", spec.config["precision"] == "bf16"
    per_s = rate(spec) * (1.5 if compiled else 1.0)
    # The cache is warm when a configuration is launched again.
    compile_s = (60.0 if spec.launch.isdigit() else 5.0) if compiled else 0.5
    made = make_measurement(
        per_s,
        batch_size=spec.batch_size,
        startup_s=2.0,
        compile_s=compile_s,
        energy_j=(10.0 if bf16 else 40.0) * 3.0,
        measured_s=3.0,
        peak_allocated_bytes=round(GIB * (1 if bf16 else 2) * (1.25 if compiled else 1.0)),
    )
    return Play(rate_per_s=per_s, wall_s=20.0 + compile_s, measurement=made)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A study of four configurations: precision and compile mode."""
    made = World(tmp_path_factory.mktemp("studies"))
    narrowed = {"compile_mode": ("off", "default"), "precision": ("fp32", "bf16")}
    fixed = {name: value for name, value in FIXED.items() if name not in narrowed}
    spec = made.spec(budget_s=3000.0, fixed=fixed, narrowed=narrowed, sampler="grid")
    search(spec, made.folder, made.env(compiling))
    return made


def ranked(world: World, **changes: object) -> Ranking:
    spec = StudySpec.model_validate({**world.spec().model_dump(), **changes})
    return rank(world.files, spec, load_outcome(world.files))


@pytest.mark.slow
def test_a_short_training_is_not_compiled_and_a_long_one_is_by_the_same_measurements(world: World) -> None:
    launched = [len(made.specs) for made in world.launchers]
    short, long = (ranked(world, objective="time_to_train", samples=n) for n in (1000, 10**6))
    assert short.best.config["compile_mode"] == "off"
    assert long.best.config["compile_mode"] == "default"
    # 48 samples/s eager and 72 compiled: a sample takes 1/144 s less, for 59.5 s more of compiling with a cold cache.
    step = next(row.overtakes_after for row in long.rows if row.config == long.best.config)
    assert step == pytest.approx(59.5 * 144 / 32, rel=0.02)
    assert [len(made.specs) for made in world.launchers] == launched


def test_energy_and_memory_rank_what_was_measured(world: World) -> None:
    energy = ranked(world, objective="energy")
    assert (energy.best.config["precision"], energy.best.config["compile_mode"]) == ("bf16", "default")
    assert energy.best.score == pytest.approx(72 / 10, rel=0.02)
    assert [row.trial for row in energy.rows][-1] == 0
    # Half as fast again is not about as fast.
    assert ranked(world, objective="lean").best.config == energy.best.config
    assert ranked(world, objective="memory_thrift").unit == "samples/s/GiB"


def test_a_requirement_takes_away_choices_and_is_named(world: World) -> None:
    found = ranked(world, require=("peak_memory<=1.1GiB",))
    assert (found.best.config["precision"], found.best.config["compile_mode"]) == ("bf16", "off")
    out = {row.trial: row.out for row in found.rows if row.out}
    assert len(out) == 3 and "its peak_memory is 2.00 GiB, and peak_memory<=1.1GiB is required" in out[0]


def test_what_nothing_meets_names_the_nearest(world: World) -> None:
    with pytest.raises(InfeasibleError, match=r"none of 4 configurations .* meets peak_memory<=900MiB") as raised:
        ranked(world, require=("peak_memory<=900MiB",))
    assert raised.value.exit_code == 3
    assert "bf16: its peak_memory is 1.00 GiB" in (raised.value.advice or "")


def test_an_objective_that_is_not_told_how_long_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="how long the training is was not stated"):
        ranked(world, objective="time_to_train")


def test_the_front_has_what_nothing_else_is_better_than_in_both(world: World) -> None:
    rows = ranked(world).rows
    front = pareto(rows, [figure_called("memory"), figure_called("throughput")])
    assert [(r.config["precision"], r.config["compile_mode"]) for r in front] == [("bf16", "off"), ("bf16", "default")]
    (alone,) = pareto(rows, [figure_called("energy")])
    assert alone.config == front[1].config
    with pytest.raises(UsageError, match="training_time is not known"):
        pareto(rows, [figure_called("training_time")])


def test_the_command_says_it_to_people_and_to_programs(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    study = str(world.files.folder)
    assert main.run(["rank", study, "--objective", "time_to_train", "--samples", "1000"]) == 0
    said = capsys.readouterr().out
    assert "training time" in said and "By time_to_train; nothing was launched." in said
    assert "ahead of eager" in said and "autotune export" in said
    assert main.run(["rank", study, "--pareto", "memory,throughput", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"schema_version", "study", "objective", "unit", "best", "rows", "unscored"} == told.keys()
    assert [row["config"]["compile_mode"] for row in told["rows"]] == ["off", "default"]
    assert main.run(["rank", study, "--require", "memory<=1MiB"]) == 3
    assert "none of 4 configurations" in capsys.readouterr().err
    assert main.run(["rank", study, "--pareto", "beauty"]) == 2
    assert "unknown figure 'beauty'" in capsys.readouterr().err
    assert main.run(["rank", study, "--epochs", "2", "--samples", "3"]) == 2


@pytest.mark.slow
def test_a_front_is_drawn_and_written_as_text(world: World, tmp_path: Path) -> None:
    study = str(world.files.folder)
    for name in ("front.html", "front.md", "front.txt"):
        assert main.run(["rank", study, "--pareto", "memory,throughput", "-o", str(tmp_path / name)]) == 0
    page = (tmp_path / "front.html").read_text()
    # Both axes have their units, and the figures are in the alternative text.
    assert "<svg" in page and "peak memory (GiB)" in page and "throughput (samples/s)" in page
    assert "1.25 GiB" in page
    for name in ("front.md", "front.txt"):
        assert "1.25 GiB" in (tmp_path / name).read_text()
    assert main.run(["rank", study, "-o", str(tmp_path / "front.pdf")]) == 2
    assert not (tmp_path / "front.pdf").exists()


def test_a_study_in_which_nothing_was_measured_says_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    from autotune.study.request import write_request

    world.files.folder.mkdir()
    write_request(world.files, world.spec())
    with pytest.raises(UsageError, match="has no measured trial yet"):
        ranked(world)


def test_the_profile_of_another_trial_promises_what_was_measured_of_it(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ranked(world).rows
    outcome = load_outcome(world.files)
    assert outcome is not None
    for row in rows:
        file = tmp_path / f"{row.trial}.yaml"
        assert main.run(["export", str(world.files.folder), "--trial", str(row.trial), "-o", str(file)]) == 0
        made = read(file)
        assert dict(made.configuration) == row.config and made.provenance.trial == row.trial
        assert made.gives.samples_per_second == pytest.approx(row.samples_per_s, rel=0.02)
        standing = next((s for s in outcome.finalists if s.trial == row.trial), None)
        assert made.gives.launches == (1 if standing is None else standing.launches)
        assert (made.gives.speedup is None) == (standing is None)
    capsys.readouterr()
    assert main.run(["export", str(world.files.folder), "--trial", "99"]) == 2
    assert "has no trial 99" in capsys.readouterr().err


def test_a_trial_that_was_launched_once_promises_no_speedup(world: World) -> None:
    outcome, profile = load_outcome(world.files), read(world.files.profile)
    assert outcome is not None
    alone = outcome.model_copy(update={"finalists": ()})
    made = profile_of_trial(world.files, profile, alone, 0)
    assert made.gives.speedup is None and made.gives.launches == 1
    assert "not launched in turns" in "\n".join(heading(made))
    # It is written and read like any other.
    assert parse(dump(made), "profile.yaml") == made


def test_a_trial_that_the_proof_dropped_is_not_handed_over(world: World) -> None:
    outcome, profile = load_outcome(world.files), read(world.files.profile)
    assert outcome is not None
    other = next(row.trial for row in ranked(world).rows if row.config != outcome.best.config)
    dropped = outcome.model_copy(update={"dropped": {other: "fast but wrong: its loss is 30 % off"}})
    with pytest.raises(UsageError, match=f"trial {other} is out: fast but wrong"):
        profile_of_trial(world.files, profile, dropped, other)
    # Nor is it a choice.
    out = {row.trial: row.out for row in rank(world.files, world.spec(), dropped).rows}
    assert out[other] == "fast but wrong: its loss is 30 % off"


@pytest.mark.slow
def test_launches_without_a_figure_spoil_neither_the_search_nor_its_ranking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = World(tmp_path)

    def play(spec: TrialSpec) -> Play:
        """The counter does not answer in the compiled fp32, nor in one launch of the best in the proof."""
        played, bf16 = compiling(spec), spec.config["precision"] == "bf16"
        compiled = spec.config["compile_mode"] != "off"
        if (compiled and not bf16) or (spec.launch.startswith("verify") and spec.launch.endswith("-2") and bf16):
            assert played.measurement is not None
            played = replace(played, measurement=played.measurement.model_copy(update={"energy_j": None}))
        return played

    narrowed = {"compile_mode": ("off", "default"), "precision": ("fp32", "bf16")}
    fixed = {name: value for name, value in FIXED.items() if name not in narrowed}
    spec = made.spec(budget_s=3000.0, fixed=fixed, narrowed=narrowed, sampler="grid", objective="energy")
    outcome = search(spec, made.folder, made.env(play)).outcome
    assert outcome.best.config["precision"] == "bf16"
    found = rank(made.files, spec, outcome)
    (silent,) = found.unscored
    assert silent not in {row.trial for row in found.rows}
    assert main.run(["rank", str(made.files.folder), "--objective", "energy"]) == 0
    assert f"trial {silent} has no score by energy" in capsys.readouterr().err
