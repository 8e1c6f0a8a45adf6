"""Whole searches for a winner that must meet something, in virtual time."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import optuna
import pytest

from autotune.base.errors import InfeasibleError, UsageError
from autotune.base.records import Finding, Hold, TrialSpec, TrialStatus
from autotune.report import headline_of
from autotune.report.sentences import required_line
from autotune.search import resume, search
from autotune.search.ranking import rank
from autotune.study.database import open_study
from autotune.study.tables import read_trials
from tests.support import Play, make_measurement

from .world import FIXED, World, rate

GIB = 2**30


#: Precision and batch can be chosen.
SMALL = {name: value for name, value in FIXED.items() if name not in ("precision", "batch_size")}


def peak_bytes(spec: TrialSpec) -> int:
    """Linear in the batch, and half of it in bf16."""
    return round(GIB * (1 + spec.batch_size / (32 if spec.config["precision"] == "fp32" else 64)))


def remembering(spec: TrialSpec) -> Play:
    per_s = rate(spec)
    return Play(
        rate_per_s=per_s,
        wall_s=15.0,
        measurement=make_measurement(per_s, batch_size=spec.batch_size, peak_allocated_bytes=peak_bytes(spec)),
    )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def searched(world: World, **changes: object):
    spec = world.spec(**{"budget_s": 900.0, "fixed": SMALL, **changes})
    return search(spec, world.folder, world.env(remembering))


@pytest.mark.slow
def test_the_winner_meets_what_is_required(world: World) -> None:
    # Without the requirement, the largest batch wins: 3.00 GiB in bf16.
    found = searched(world, require=("peak_memory<=1.6GiB",)).outcome
    assert found.found is Finding.FASTER
    assert found.best.peak_memory_bytes is not None and found.best.peak_memory_bytes <= 1.6 * GIB
    assert (found.best.config["precision"], found.best.config["batch_size"]) == ("bf16", 32)
    assert found.baseline_unmet == "its peak_memory is 2.00 GiB, and peak_memory<=1.6GiB is required"
    assert found.require == ("peak_memory<=1.6GiB",)
    # Optuna's view says the same.
    trials = open_study(world.files).get_trials()
    told = {t.number: max(t.constraints.values()) for t in trials if t.state is optuna.trial.TrialState.COMPLETE}
    for trial in trials:
        if trial.number in told:
            peak = 1 + trial.params["batch_size"] / (32 if trial.params["precision"] == "fp32" else 64)
            assert (told[trial.number] > 0) == (peak > 1.6)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["auto", "tpe"])
def test_what_nothing_meets_ends_with_the_nearest(world: World, sampler: str) -> None:
    with pytest.raises(InfeasibleError, match=r"none of .* meets peak_memory<=1\.2GiB") as raised:
        searched(
            world, require=("peak_memory<=1.2GiB",), sampler=sampler, trials=12, narrowed={"batch_size": ("32", "64")}
        )
    assert raised.value.exit_code == 3
    assert "bf16" in (raised.value.advice or "")
    assert "its peak_memory is 1.50 GiB" in (raised.value.advice or "")
    # Nothing is lost, and nothing is launched to say it again.
    world.launchers.clear()
    with pytest.raises(InfeasibleError, match="its peak_memory|meets"):
        resume(world.files, world.env(remembering))
    assert [spec for made in world.launchers for spec in made.specs if spec.launch.isdigit()] == []


def test_what_nothing_meets_is_searched_for_longer_as_it_advises(world: World) -> None:
    more = {"require": ("peak_memory<=1.2GiB",), "narrowed": {"batch_size": ("32", "64", "128")}}
    with pytest.raises(InfeasibleError, match="Search longer|meets"):
        searched(world, budget_s=60.0, **more)
    world.launchers.clear()
    with pytest.raises(InfeasibleError):
        resume(world.files, world.env(remembering), lambda before_s: 600.0)
    assert [spec for made in world.launchers for spec in made.specs if spec.launch.isdigit()]


def test_a_winner_that_is_slower_than_a_baseline_that_does_not_meet_it(world: World) -> None:
    # Only a small batch meets it.
    found = searched(
        world,
        require=("peak_memory<=1.6GiB",),
        fixed={**SMALL, "precision": "fp32"},
        narrowed={"batch_size": ("16", "32", "64")},
    ).outcome
    assert found.best.config["batch_size"] == 16 and found.found is Finding.FASTER
    assert found.baseline_unmet is not None
    said = headline_of(found)
    assert said.startswith("Meets peak_memory<=1.6GiB, which the baseline does not, at ")
    assert "its peak_memory is 2.00 GiB" in (required_line(found) or "")


@pytest.mark.slow
def test_the_leanest_of_the_fastest_is_handed_over(world: World) -> None:
    # 1.1 and 1.15 times as fast with batches of 64 and 128: within 6 % of each other.
    objective = world.folder / "thrifty.py"
    objective.write_text((Path("objectives/lean.py")).read_text().replace("RATE_WITHIN = 0.02", "RATE_WITHIN = 0.06"))
    found = searched(world, objective=str(objective), narrowed={"batch_size": ("32", "64", "128")}).outcome
    assert found.best.config["batch_size"] == 64
    assert found.best.config["precision"] == "bf16"


def test_an_objective_that_lacks_what_it_needs_ends_before_anything_is_launched(world: World) -> None:
    with pytest.raises(UsageError, match="how long the training is was not stated"):
        searched(world, objective="time_to_train")
    assert not any(made.specs for made in world.launchers)
    assert not world.files.folder.exists()


@pytest.mark.slow
def test_a_short_training_is_not_compiled_and_a_long_one_is(world: World) -> None:
    def compiling(spec: TrialSpec) -> Play:
        compiled = spec.config["compile_mode"] != "off"
        per_s = rate(spec) * (1.5 if compiled else 1.0)
        made = make_measurement(per_s, batch_size=spec.batch_size, compile_s=60.0 if compiled else 0.5)
        return Play(rate_per_s=per_s, wall_s=80.0 if compiled else 15.0, measurement=made)

    fixed = {"precision": "fp32", "batch_size": "32", "num_workers": "0", "memory_format": "contiguous"}
    for name, samples, mode in (("short", 600, "off"), ("long", 10**6, "default")):
        spec = world.spec(name=name, objective="time_to_train", samples=samples, fixed=fixed, budget_s=2400.0)
        found = search(spec, world.folder, world.env(compiling)).outcome
        assert found.best.config["compile_mode"] == mode, name
        assert found.trials[TrialStatus.COMPLETE.value] > 1


@pytest.mark.slow
def test_several_objectives_are_a_multi_objective_study_of_optuna(world: World) -> None:
    def burning(spec: TrialSpec) -> Play:
        # A larger batch is faster and takes more energy for a sample.
        per_s = rate(spec)
        watts = per_s * (1.0 + spec.batch_size / 64)
        made = make_measurement(per_s, batch_size=spec.batch_size, energy_j=watts * 3.0, measured_s=3.0)
        return Play(rate_per_s=per_s, wall_s=15.0, measurement=made)

    spec = world.spec(
        objective="throughput,energy",
        fixed=SMALL,
        narrowed={"batch_size": ("16", "32", "64")},
        budget_s=900.0,
        trials=6,
    )
    found = search(spec, world.folder, world.env(burning)).outcome
    study = open_study(world.files)
    assert len(study.directions) == 2
    front = {(t.params["precision"], t.params["batch_size"]) for t in study.best_trials}
    # Of all six, the fastest is bf16 at 64; with 16, each sample takes the least energy.
    assert {("bf16", 64), ("bf16", 16)} <= front
    # The first of them chooses the winner, and both rank what was measured.
    assert found.best.config["batch_size"] == 64
    energy = rank(world.files, spec.model_copy(update={"objective": "energy"}), found)
    assert energy.best.config["batch_size"] == 16
    # A resume knows both, and finds nothing to do.
    assert resume(world.files, world.env(burning)).outcome.best == found.best


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "throughput,energy", "sampler": "gp"}, "takes one objective"),
        ({"objective": "energy,beauty"}, "beauty"),
    ],
)
def test_objectives_that_cannot_be_searched_together_are_refused(
    world: World, changes: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        searched(world, **changes)


def test_a_longer_training_must_meet_it_too(world: World) -> None:
    """With an evaluation, bf16 takes more than is allowed; fp32 does not."""

    def growing(spec: TrialSpec) -> Play:
        peak = peak_bytes(spec) + (2 * GIB if spec.config["precision"] == "bf16" else 0)
        hold = Hold(steps=40, seconds=6.0, settled=True, peak_bytes=peak, capacity_bytes=64 * GIB)
        return dataclasses.replace(remembering(spec), hold=hold)

    spec = world.spec(
        budget_s=900.0, fixed=SMALL, require=("peak_memory<=2.5GiB",), narrowed={"batch_size": ("16", "32", "64")}
    )
    found = search(spec, world.folder, world.env(growing)).outcome
    assert found.best.config["precision"] == "fp32"
    assert any("in a longer training with an evaluation" in why for why in found.dropped.values())


def test_later_launches_that_break_it_take_the_proof_back(world: World) -> None:
    rng = random.Random(3)

    def late(spec: TrialSpec) -> Play:
        """On a noisy machine, whose winner needs more launches, in which it takes more memory."""
        per_s = rate(spec) * rng.gauss(1, 0.06)
        grown = spec.launch.startswith(("narrow", "ablate")) and spec.config["precision"] == "bf16"
        peak = peak_bytes(spec) + (GIB if grown else 0)
        made = make_measurement(per_s, batch_size=spec.batch_size, peak_allocated_bytes=peak)
        return Play(rate_per_s=per_s, wall_s=15.0, measurement=made)

    spec = world.spec(
        budget_s=1500.0, fixed=SMALL, require=("peak_memory<=2.5GiB",), narrowed={"batch_size": ("32", "64")}
    )
    found = search(spec, world.folder, world.env(late)).outcome
    launched = [s for made in world.launchers for s in made.specs if s.launch.startswith(("narrow", "ablate"))]
    assert any(s.config["precision"] == "bf16" for s in launched)
    assert found.best.peak_memory_bytes is not None and found.best.peak_memory_bytes <= 2.5 * GIB


def test_a_launch_that_cannot_be_scored_is_left_out_and_the_search_goes_on(world: World) -> None:
    def hiccup(spec: TrialSpec) -> Play:
        per_s = rate(spec)
        energy = None if spec.launch == "00002" else per_s * 3.0
        made = make_measurement(per_s, batch_size=spec.batch_size, energy_j=energy, measured_s=3.0)
        return Play(rate_per_s=per_s, wall_s=15.0, measurement=made)

    spec = world.spec(objective="energy", fixed=SMALL, narrowed={"batch_size": ("32", "64")}, budget_s=900.0, trials=4)
    found = search(spec, world.folder, world.env(hiccup)).outcome
    scores = {t.number: t.score for t in read_trials(world.files)}
    assert scores[2] is None and sum(score is not None for score in scores.values()) == 3
    assert found.trials[TrialStatus.COMPLETE.value] == 4
