"""How many steps in a row take about as long as any others."""

import random
from collections.abc import Callable

import pytest

from autotune.stats import even_after

NOISE = random.Random(1)


def steps(long: Callable[[int], float], count: int = 400, noise: float = 0.1) -> list[float]:
    return [long(i) * (1 + NOISE.gauss(0, noise)) for i in range(count)]


@pytest.mark.parametrize(
    ("long", "found"),
    [
        (lambda i: 1.0, {1}),
        # A rollout after sixteen updates, of any weight; two networks in turns; one step that was disturbed.
        (lambda i: 5.0 if i % 16 == 0 else 1.0, {16, 32}),
        (lambda i: 3.0 if i % 16 == 7 else 1.0, {16, 32}),
        (lambda i: 2.0 if i % 2 else 1.0, set(range(2, 17, 2))),
        (lambda i: 50.0 if i == 100 else 1.0, {1}),
        # Accumulation that makes every fourth step a little longer is noise enough for rounds.
        (lambda i: 1.3 if i % 4 == 0 else 1.0, {1}),
    ],
)
def test_a_period_is_found(long: Callable[[int], float], found: set[int]) -> None:
    assert even_after(steps(long)) in found


def test_sentences_of_all_lengths_have_turns_of_many_steps() -> None:
    found = even_after(steps(lambda i: NOISE.uniform(0.2, 1.8), count=60))
    assert found is not None and found > 5


def test_what_pauses_too_rarely_has_none() -> None:
    assert even_after(steps(lambda i: 200.0 if i % 120 == 60 else 1.0)) is None


@pytest.mark.parametrize("count", [0, 1, 3, 6, 7])
def test_a_few_steps_tell_nothing(count: int) -> None:
    assert even_after([1.0, 3.0, 1.0, 2.5, 1.0, 3.0, 1.0][:count]) is not None
