"""What a search says, over many simulated searches: noise, drift, and others who come and go (`simulated`)."""

from pathlib import Path

import pytest

from autotune.base.records import Finding
from autotune.space import key

from .simulated import Searched, contradictions, simulate

#: Few enough for the normal suite; in the last, the winner turns out to be faster without one of its knobs, with just
#: time enough to let that take its place. The stress run has a thousand.
SOME, MANY = (*range(6), 466), range(1000)


def false_wins(found: Searched) -> int:
    """Count the winners that are in truth no faster than the baseline."""
    outcome = found.outcome
    if outcome is None or outcome.found is not Finding.FASTER:
        return 0
    winners = {key(s.config): s.config for s in (outcome.best, outcome.best_same_batch)}
    usual = found.machine.true_rate(outcome.baseline.config)
    winners.pop(key(outcome.baseline.config), None)
    return sum(found.machine.true_rate(config) <= usual for config in winners.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", SOME)
def test_what_a_search_says_agrees_with_what_it_measured(seed: int, tmp_path: Path) -> None:
    assert list(contradictions(simulate(seed, tmp_path))) == []


@pytest.mark.stress
def test_what_a_thousand_searches_say(tmp_path: Path) -> None:
    wins, wrong = 0, 0
    for seed in MANY:
        found = simulate(seed, tmp_path / str(seed))
        assert list(contradictions(found)) == [], f"seed {seed}"
        wins += found.outcome is not None and found.outcome.found is Finding.FASTER
        wrong += false_wins(found)
    assert wins > 200 and wrong <= 0.05 * wins
