"""A search whose finalists all lose goes on, in virtual time: real verification, scripted launches."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.base.records import Finding, LaunchKind, Outcome, TrainCheck, TrialSpec
from autotune.search import resume, search
from autotune.space import key, maths_part
from autotune.study.budget import GRACE
from autotune.study.tables import read_trials
from tests.support import Play, make_measurement

from .world import FIXED, World

#: All of them can be chosen; there are more configurations with bf16 than a search tries.
NARROWED = {
    "precision": ("fp32", "bf16"),
    "memory_format": ("contiguous", "channels_last"),
    "optimizer_impl": ("for-loop", "foreach", "fused"),
    "batch_size": ("32", "48", "64"),
}


def script_of(bf16: float, channels_last: float, *, wrong: bool, seed: int = 1) -> Callable[[TrialSpec], Play]:
    """Script launches with known gains.

    Args:
        wrong: with bf16 nothing is learnt.
    """
    noise = random.Random(seed)

    def script(spec: TrialSpec) -> Play:
        lower = spec.config["precision"] == "bf16"
        gain = (bf16 if lower else 1.0) * (channels_last if spec.config["memory_format"] == "channels_last" else 1.0)
        rate = 100.0 * gain * math.exp(noise.gauss(0, 0.005))
        flat = TrainCheck(losses=(2.3,) * (spec.check.steps if spec.check else 1), finite=True, changed=0.0)
        return Play(
            rate_per_s=rate,
            wall_s=6.0,
            check=flat if wrong and lower else None,
            measurement=make_measurement(rate, batch_size=spec.batch_size, loader_wait_fraction=0.02),
        )

    return script


def run(
    world: World,
    script: Callable[[TrialSpec], Play],
    raise_at: dict[int, BaseException] | None = None,
    budget_s: float = 300.0,
) -> Outcome:
    fixed = {name: value for name, value in FIXED.items() if name not in NARROWED}
    search(world.spec(fixed=fixed, narrowed=NARROWED, budget_s=budget_s), world.folder, world.env(script, raise_at))
    return world.outcome


def launches(world: World) -> list[TrialSpec]:
    return [spec for launcher in world.launchers for spec in launcher.specs]


@pytest.mark.slow
def test_a_search_goes_on_when_the_check_rejects_every_finalist(tmp_path: Path) -> None:
    world = World(tmp_path)
    outcome = run(world, script_of(2.0, 1.3, wrong=True))
    assert outcome.dropped and all(why.startswith("fast but wrong") for why in outcome.dropped.values())
    assert outcome.best.config["precision"] == "fp32" and outcome.best.config["memory_format"] == "channels_last"
    assert outcome.best.speedup_ci95[0] > 1.2
    specs = launches(world)
    rejected = next(i for i, s in enumerate(specs) if s.kind is LaunchKind.TRAIN_CHECK and not s.check.reference)
    later = [s for s in specs[rejected + 1 :] if s.number is not None or s.heat is not None]
    configs = [c for s in later for c in (s.heat.entrants if s.heat else [s.config])]
    wrong = maths_part(specs[rejected].config)
    assert configs and wrong not in map(maths_part, configs), "what trains wrongly is not tried again"
    references = [s for s in specs if s.check is not None and s.check.reference]
    assert len(references) == 1, "eager fp32 is run once for all checks"
    assert outcome.elapsed_s <= 300 * (1 + GRACE)


def test_a_race_that_shows_nothing_gives_its_time_to_those_left_out(tmp_path: Path) -> None:
    """The trials with bf16 seem faster than they are, and nothing else is worth a trial."""
    world = World(tmp_path)
    # By most seeds either all that seem faster fit into one race, or none of those left out fits into the rest.
    honest = script_of(1.0, 1.0, wrong=False, seed=8)

    def script(spec: TrialSpec) -> Play:
        found = honest(spec)
        if spec.number is None or spec.config["precision"] == "fp32":
            return found
        rate = 1.2 * found.rate_per_s
        return Play(rate_per_s=rate, wall_s=6.0, measurement=make_measurement(rate, batch_size=spec.batch_size))

    outcome = run(world, script, budget_s=240.0)
    assert key(outcome.best.config) == key(outcome.baseline.config)
    assert outcome.found is Finding.KEEP and outcome.elapsed_s < 240
    rounds = [s.launch for s in launches(world) if s.launch.startswith("verify-")]
    assert len(set(rounds)) == len(rounds)
    first = {name.split("-")[1] for name in rounds if name.endswith("-1")}
    # Those for whom there was no time among the more promising ones have their turn.
    assert len({name.split("-")[1] for name in rounds}) > len(first) > 2


@pytest.mark.slow
@pytest.mark.parametrize("at", ["the trial after it", "the second race"])
def test_a_search_that_went_on_is_resumed_where_it_was(tmp_path: Path, at: str) -> None:
    whole = World(tmp_path / "whole")
    run(whole, script_of(2.0, 1.3, wrong=True))
    names = [s.launch for s in launches(whole)]
    check = next(i for i, s in enumerate(launches(whole)) if s.check is not None and not s.check.reference)
    if at == "the second race":
        cut = next(i for i, name in enumerate(names) if name.startswith("verify-") and name.endswith("-2"))
    else:
        cut = next(i for i, s in enumerate(launches(whole)) if i > check and s.number is not None)
    world = World(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        run(world, script_of(2.0, 1.3, wrong=True), {cut: KeyboardInterrupt()})
    resume(world.files, world.env(script_of(2.0, 1.3, wrong=True, seed=2)))
    first, second = ([s.launch for s in launcher.specs] for launcher in world.launchers)
    assert not set(first) & set(second) - {"probe-1", "probe-2", names[cut]}
    # Equals may win in turns.
    best, other = world.outcome.best.config, whole.outcome.best.config
    assert {n: v for n, v in best.items() if n != "optimizer_impl"} == {
        n: v for n, v in other.items() if n != "optimizer_impl"
    }
    # What the first contest has found is still said.
    assert any(c.passed is False for c in world.outcome.checks) and world.outcome.dropped
    assert len(read_trials(world.files)) == sum(world.outcome.trials.values())
