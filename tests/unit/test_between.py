"""Batch sizes between powers of two, which are tried beside the best one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.base.records import Config, TrialStatus, Value
from autotune.samplers.auto.features import DEVICE, Features
from autotune.search.replay import Surface, read_surface
from autotune.search.replay.run import replay
from autotune.space import Choice, Space, canonical
from autotune.workload.scoring import Scorer
from tests.support import write_surface

BASELINE: dict[str, Value] = {"precision": "fp32", "batch_size": 64, "memory_format": "contiguous", "num_workers": 0}
RUNGS, BETWEEN = (32, 64, 128, 256, 512), (48, 96, 192, 384)
KNOBS: dict[str, tuple[Value, ...]] = {
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "batch_size": tuple(sorted((*RUNGS, *BETWEEN))),
    "memory_format": ("contiguous", "channels_last"),
    "num_workers": (0, 4),
    "prefetch_factor": (2,),
    "persistent_workers": (True,),
}
CAPACITY_BYTES = 2**34


def rate(config: Config) -> float:
    gain = {"fp32": 1.0, "tf32": 1.3, "bf16": 1.6, "fp16": 1.55}[str(config["precision"])]
    gain *= 1.25 if config["memory_format"] == "channels_last" else 1.0
    return 1000 * gain * (int(config["batch_size"]) / 64) ** 0.25


def memory(config: Config) -> int:
    """A batch of 384 fits with room to spare, one of 512 does not."""
    return int(CAPACITY_BYTES * (0.02 + 0.88 * int(config["batch_size"]) / 400))


@pytest.fixture(scope="module")
def surface(tmp_path_factory: pytest.TempPathFactory) -> Surface:
    path = tmp_path_factory.mktemp("surface") / "between.jsonl"
    write_surface(path, KNOBS, BASELINE, rate, memory, capacity_bytes=CAPACITY_BYTES)
    return read_surface(path)


def space_of(surface: Surface) -> Space:
    batches = tuple(Choice(b, further=b in BETWEEN) for b in sorted((*RUNGS, *BETWEEN)))
    return replace(surface.space, choices={**surface.space.choices, "batch_size": batches})


def test_the_best_batch_that_fits_is_found_between_two_powers(surface: Surface, scorer: Scorer) -> None:
    for seed in range(4):
        found = replay(surface, scorer, space=space_of(surface), budget_s=900, seed=seed)
        assert found.best.config["batch_size"] == 384
        tried = [s.trial.config["batch_size"] for s in found.steps]
        # Halfway to what is far from the best is of no use.
        assert not {48, 96}.intersection(tried) and tried.index(384) > tried.index(256)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_other_samplers_try_them_beside_the_best_too(surface: Surface, scorer: Scorer, sampler: str) -> None:
    space = space_of(surface)
    for seed in range(3):
        best: Config = BASELINE
        best_score = 0.0
        for step in replay(surface, scorer, space=space, budget_s=400, sampler=sampler, seed=seed).steps:
            trial = step.trial
            batch = trial.config["batch_size"]
            assert batch in RUNGS or batch in space.beside("batch_size", best["batch_size"])
            if trial.result.status is TrialStatus.COMPLETE and (trial.score or 0.0) > best_score:
                best, best_score = trial.config, trial.score or 0.0


def test_what_is_known_of_two_batches_tells_half_of_what_lies_between(surface: Surface) -> None:
    features = Features(space_of(surface), DEVICE)
    rows = features.of([canonical({**BASELINE, "batch_size": batch}) for batch in (256, 384, 512)])
    levels = [column for column in rows.T[features.fine] if column[0] + column[2] == 1]
    assert levels and all(column[1] == 0.5 for column in levels)
