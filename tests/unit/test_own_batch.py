"""Every search tries its best configuration with the user's own batch size, too."""

from __future__ import annotations

from collections import Counter

import pytest

from autotune.base.records import Config, TrialStatus, Value
from autotune.knobs.compile_mode import eager
from autotune.samplers import Experience
from autotune.search.replay import Surface, read_surface
from autotune.search.replay.run import replay
from autotune.space import Choice, Space, canonical, key
from autotune.study.agenda import owed
from autotune.workload.scoring import Scorer
from tests.support import PLAIN, make_trial, write_surface

KNOBS: dict[str, tuple[Value, ...]] = {
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "compile_mode": ("off", "default"),
    "batch_size": (16, 32, 64, 128, 256),
    "memory_format": ("contiguous", "channels_last"),
    "num_workers": (0, 2, 4),
    "prefetch_factor": (2,),
    "persistent_workers": (True,),
}


def rate(config: Config) -> float:
    """A device that only large batches keep busy."""
    gain = {"fp32": 1.0, "tf32": 1.3, "bf16": 1.6, "fp16": 1.55}[str(config["precision"])]
    gain *= 1.25 if config["memory_format"] == "channels_last" else 1.0
    gain *= 1.3 if config["compile_mode"] == "default" else 1.0
    return 50 * gain * (int(config["batch_size"]) / 32) ** 0.7


@pytest.fixture(scope="module")
def surface(tmp_path_factory: pytest.TempPathFactory) -> Surface:
    path = tmp_path_factory.mktemp("surface") / "large-batches.jsonl"
    write_surface(path, KNOBS, PLAIN, rate, lambda config: 2**28)
    return read_surface(path)


@pytest.mark.parametrize("limit", [{"budget_s": 150.0}, {"budget_s": 300.0}, {"budget_s": 900.0, "trials": 5}])
@pytest.mark.parametrize("sampler", ["auto", "tpe", "random"])
def test_the_best_eager_configuration_at_the_own_batch_gets_its_trial(
    surface: Surface, scorer: Scorer, sampler: str, limit: dict[str, float]
) -> None:
    for seed in range(4):
        found = replay(surface, scorer, sampler=sampler, seed=seed, **limit)  # type: ignore[arg-type]
        trials = [s.trial for s in found.steps]
        best = max((t for t in trials if t.result.status is TrialStatus.COMPLETE), key=lambda t: t.score or 0.0)
        assert best.number > 0
        assert key(eager({**best.config, "batch_size": 32})) in {key(t.config) for t in trials}
        assert len(trials) <= limit.get("trials", 1000)


@pytest.mark.parametrize(("sampler", "budget_s"), [("random", 100.0), ("tpe", 300.0), ("auto", 300.0), ("grid", 300.0)])
def test_on_several_devices_it_runs_once(surface: Surface, scorer: Scorer, sampler: str, budget_s: float) -> None:
    found = replay(surface, scorer, sampler=sampler, seed=0, budget_s=budget_s, devices=4)
    tried = Counter(key(s.trial.config) for s in found.steps)
    assert max(tried.values()) == 1


def space_of(**changes: tuple[Value, ...]) -> Space:
    own = {"workload.depth": (3, 5), "workload.fast": (False, True)}
    offered = {**{n: KNOBS[n] for n in PLAIN}, **own, **changes}
    base = canonical({**PLAIN, "workload.depth": 3, "workload.fast": False})
    choices = {n: tuple(Choice(v) for v in values) for n, values in offered.items()}
    return Space(choices, {}, base, speed_only=frozenset({"workload.fast"}), on_purpose=frozenset({"workload.depth"}))


def test_what_is_owed_trains_as_the_baseline_does_and_is_eager() -> None:
    space, experience = space_of(), Experience()
    baseline = make_trial(0, dict(space.baseline), 100.0)
    other = {"compile_mode": "default", "batch_size": 128, "workload.depth": 5, "workload.fast": True}
    best = make_trial(1, {**space.baseline, "precision": "bf16", **other}, 300.0)
    twin = {**space.baseline, "precision": "bf16", "workload.fast": True}
    debt = owed(space, best, baseline, set(), experience)
    assert debt is not None and debt.config == twin
    assert owed(space, best, baseline, {key(twin)}, experience) is None
    compiled = space_of(compile_mode=("default",))
    debt = owed(compiled, best, baseline, set(), experience)
    assert debt is not None and debt.config == {**twin, "compile_mode": "default"}


def test_nothing_is_owed_if_the_best_is_no_better_or_has_the_own_batch() -> None:
    space, experience = space_of(), Experience()
    baseline = make_trial(0, dict(space.baseline), 100.0)
    slower = make_trial(1, {**space.baseline, "batch_size": 128}, 90.0)
    same = make_trial(1, {**space.baseline, "precision": "bf16"}, 300.0)
    larger = make_trial(1, {**space.baseline, "batch_size": 128}, 300.0)
    for best in (None, slower, same):
        assert owed(space, best, baseline, {key(baseline.config)}, experience) is None
    # Only the batch was changed, and the baseline has been tried.
    assert owed(space, larger, baseline, {key(baseline.config)}, experience) is None
    out_of_reach = space_of(batch_size=(64, 128))
    assert owed(out_of_reach, larger, baseline, set(), experience) is None
