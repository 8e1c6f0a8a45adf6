"""What is recorded of a space, and what is taken for the truth about it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import pstdev

import pytest

from autotune.base.records import Config, Value
from autotune.search.replay import Row, Surface, read_surface
from autotune.space import canonical, device_part, key
from benchmarks.designs import heats
from benchmarks.truth import Truth, truth_of
from tests.support import PLAIN, write_surface

BASELINE: dict[str, Value] = {**PLAIN, "num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
KNOBS: dict[str, tuple[Value, ...]] = {
    "precision": ("fp32", "bf16"),
    "compile_mode": ("off",),
    "batch_size": (16, 32, 64),
    "memory_format": ("contiguous", "channels_last"),
    "num_workers": (2, 4),
    "prefetch_factor": (2,),
    "persistent_workers": (True,),
}


def rate(config: Config) -> float:
    """Combinations differ by 3 % and more."""
    gain = 1.21 if config["precision"] == "bf16" else 1.0
    gain *= 1.10 if config["memory_format"] == "channels_last" else 1.0
    return 50 * gain * (int(config["batch_size"]) / 32) ** 0.05


@pytest.fixture
def surface(tmp_path: Path) -> Surface:
    write_surface(tmp_path / "made-up.jsonl", KNOBS, BASELINE, rate, lambda config: 2**28, heats=True)
    return read_surface(tmp_path / "made-up.jsonl")


def every(**changes: tuple[Value, ...]) -> list[dict[str, Value]]:
    found: list[dict[str, Value]] = [BASELINE]
    for name, values in changes.items():
        found = [{**config, name: value} for config in found for value in values]
    return [canonical(config) for config in found]


def test_one_heat_has_all_that_one_training_can_be_switched_between() -> None:
    configs = every(precision=("fp32", "bf16"), batch_size=(32, 64), num_workers=(0, 2))
    (found,) = heats("device", configs, BASELINE)
    assert {key(device_part(e)) for e in found.entrants} == {key(device_part(c)) for c in configs}
    assert len(found.entrants) == 4 and key(found.entrants[0]) == key(canonical(BASELINE)) and found.all_rounds


def test_what_cannot_be_switched_is_in_no_heat() -> None:
    configs = every(compile_mode=("off", "default", "reduce-overhead"))
    (found,) = heats("device", configs, BASELINE)
    assert [e["compile_mode"] for e in found.entrants] == ["off", "default"]


def test_loaders_are_compared_at_each_batch_size() -> None:
    found = heats("loader", every(batch_size=(32, 64), num_workers=(0, 2, 4), precision=("fp32", "bf16")), BASELINE)
    assert [{e["batch_size"] for e in heat.entrants} for heat in found] == [{32}, {64}]
    assert [[e["num_workers"] for e in heat.entrants] for heat in found] == [[2, 0, 4], [0, 2, 4]]


def test_the_truth_is_what_heats_showed_even_where_launches_differ_by_more(surface: Surface) -> None:
    rng = random.Random(1)

    def noisy(row: Row) -> Row:
        if row.rate_per_s is None or row.kind != "measure":
            return row
        return row.model_copy(update={"rate_per_s": row.rate_per_s * math.exp(rng.gauss(0, 0.15))})

    noised = Surface(surface.heading, tuple(noisy(row) for row in surface.rows))
    without = Surface(surface.heading, tuple(row for row in noised.rows if row.side is None))
    found, rough = truth_of(noised), truth_of(without)

    def error(truth: Truth) -> float:
        """Of the logarithms of rates, whose level does not matter."""
        return pstdev(truth.log_rate[key(config)] - math.log(rate(config)) for config in surface.space.grid())

    assert error(found) < error(rough) / 2 and error(found) < 0.03
    assert found.noise_sd > 0.1 and found.se < rough.se


def test_without_heats_the_truth_is_as_uncertain_as_the_launches(surface: Surface) -> None:
    rows = tuple(row for row in surface.rows if row.side is None)
    assert truth_of(Surface(surface.heading, rows)).se > 0
