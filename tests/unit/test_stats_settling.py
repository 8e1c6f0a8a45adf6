"""Finding where step times settle, in simulated series with a known start of the steady state."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import median

import pytest

from autotune.stats import LEAST_STEPS, Settling, settled_at

SEEDS = 200


def noisy(rng: random.Random, steps: int, spread: float = 0.05) -> list[float]:
    return [0.1 * max(0.05, rng.gauss(1, spread)) for _ in range(steps)]


def slow_start(steps: int, slow: int, factor: float = 3.0) -> Callable[[random.Random], list[float]]:
    return lambda rng: [s * factor if i < slow else s for i, s in enumerate(noisy(rng, steps))]


def settlings(series: Callable[[random.Random], list[float]]) -> list[Settling]:
    return [settled_at(series(random.Random(seed))) for seed in range(SEEDS)]


def settled_part(found: list[Settling]) -> float:
    return sum(f.settled for f in found) / len(found)


@pytest.mark.parametrize("steps", [10, 20, 50, 100, 300])
def test_stationary_noise_has_settled_from_the_start(steps: int) -> None:
    found = settlings(lambda rng: noisy(rng, steps))
    assert settled_part(found) >= 0.95
    cuts = sorted(f.steps for f in found)
    assert median(cuts) == 0 and cuts[int(0.9 * SEEDS)] <= max(2, steps // 10)


@pytest.mark.parametrize("steps", [30, 100])
def test_correlated_neighbours_are_not_a_transient(steps: int) -> None:
    def series(rng: random.Random) -> list[float]:
        excess, found = rng.gauss(0, 0.05), []
        for _ in range(steps):
            found.append(0.1 * (1 + excess))
            excess = 0.5 * excess + rng.gauss(0, 0.05 * math.sqrt(0.75))
        return found

    found = settlings(series)
    assert settled_part(found) >= 0.93 and median(f.steps for f in found) == 0


@pytest.mark.parametrize(
    ("steps", "slow"), [(10, 1), (12, 3), (30, 1), (30, 12), (60, 6), (100, 1), (100, 40), (300, 3), (300, 100)]
)
def test_a_slow_start_is_cut_and_little_more(steps: int, slow: int) -> None:
    found = settlings(slow_start(steps, slow))
    assert settled_part(found) >= 0.95
    assert min(f.steps for f in found) >= slow
    assert median(f.steps for f in found) <= slow + 5


def test_an_invisibly_slower_start_is_cut_too() -> None:
    found = settlings(slow_start(200, 50, factor=1.1))
    assert settled_part(found) >= 0.95 and 50 <= median(f.steps for f in found) <= 60


@pytest.mark.parametrize("steps", [40, 150])
def test_an_exponential_decay_is_cut_where_it_drops_below_the_noise(steps: int) -> None:
    constant = steps / 15
    found = settlings(lambda rng: [s * (1 + 2 * math.exp(-i / constant)) for i, s in enumerate(noisy(rng, steps))])
    assert settled_part(found) >= 0.95
    # Three time constants leave 10 % of excess, twice the noise of a step; with few steps it is less clear.
    assert min(f.steps for f in found) >= 1.5 * constant
    assert 3 * constant <= median(f.steps for f in found) <= 6 * constant


@pytest.mark.parametrize("direction", [1, -1], ids=["slower and slower", "faster and faster"])
@pytest.mark.parametrize(("steps", "least"), [(40, 0.75), (100, 0.95), (300, 1.0)])
def test_a_trend_through_the_whole_series_never_settles(steps: int, least: float, direction: int) -> None:
    def series(rng: random.Random) -> list[float]:
        return [s * (1.15 + direction * 0.3 * (i / steps - 0.5)) for i, s in enumerate(noisy(rng, steps, 0.03))]

    assert 1 - settled_part(settlings(series)) >= least


def test_a_trend_without_noise_never_settles() -> None:
    assert not settled_at([1.3 - 0.003 * i for i in range(100)]).settled


def test_a_transient_as_long_as_the_series_has_not_settled() -> None:
    assert settled_part(settlings(slow_start(100, 70, factor=1.5))) == 0


@pytest.mark.parametrize("steps", [15, 50, 150])
@pytest.mark.parametrize("place", [0.3, 0.6, 0.9, 1.0])
def test_a_single_very_slow_step_is_an_incident(steps: int, place: float) -> None:
    def series(rng: random.Random) -> list[float]:
        found = noisy(rng, steps)
        found[min(steps - 1, int(place * steps))] *= 10
        return found

    found = settlings(series)
    assert settled_part(found) >= 0.95
    assert median(f.steps for f in found) <= 2


def test_occasional_slow_steps_are_part_of_the_steady_state() -> None:
    found = settlings(lambda rng: [s * (3 if rng.random() < 0.05 else 1) for s in noisy(rng, 200)])
    assert settled_part(found) >= 0.95 and median(f.steps for f in found) == 0


def test_equal_steps_have_settled() -> None:
    assert settled_at([0.25] * 40) == Settling(0, True)
    assert settled_at([0.75] * 8 + [0.25] * 40).steps in range(8, 12)


@pytest.mark.parametrize("steps", range(LEAST_STEPS))
def test_a_few_steps_tell_nothing(steps: int) -> None:
    assert settled_at([0.1] * steps) == Settling(0, False)


def test_the_time_unit_does_not_matter() -> None:
    series = slow_start(80, 13)(random.Random(3))
    assert settled_at([s * 1e-6 for s in series]) == settled_at([s * 1e3 for s in series]) == settled_at(series)
