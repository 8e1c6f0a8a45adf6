"""Contenders launched in rounds: paired ratios, noise without drift and rates with it, against hand calculations."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import pytest

from autotune.stats import PRIORS, compare_rounds, gain_per_round, speedup, t_quantile

PRIOR = replace(PRIORS["cpu"], least=0.0)
#: Two contenders, three rounds; log rates by hand: a - b is 0.1, 0.2, 0.3 beside a drift of 0, 1, 2.
ROWS = {
    "a": [math.exp(x) for x in (0.1, 1.2, 2.3)],
    "b": [math.exp(x) for x in (0.0, 1.0, 2.0)],
}


def test_the_ratio_is_that_of_paired_launches() -> None:
    found = compare_rounds(ROWS, prior=PRIOR)
    # Differences 0.1, 0.2, 0.3: sd 0.1 on 2 degrees; one launch's noise is that over sqrt(2).
    assert (found.noise.degrees, found.noise.learnt) == (2, True)
    assert found.noise.sd == pytest.approx(0.1 / math.sqrt(2))
    ratio, low, high = found.ratio("a", "b")
    half = 4.30265 * 0.1 / math.sqrt(3)
    assert (ratio, low, high) == pytest.approx((math.exp(0.2), math.exp(0.2 - half), math.exp(0.2 + half)))


def test_a_rates_interval_includes_the_drift() -> None:
    found = compare_rounds(ROWS, prior=PRIOR)
    rate = found.rate("b")
    assert rate.per_s == pytest.approx(math.e)
    # Squares within contenders: 2.42 and 2, on 4 degrees; 0.01 of them is noise on 2, the rest rounds on 2.
    assert found.total.sd == pytest.approx(math.sqrt(4.42 / 4))
    assert found.total.degrees == pytest.approx(4.42**2 / (4.41**2 / 2 + 0.01**2 / 2))
    assert rate.relative_se == pytest.approx(found.total.sd / math.sqrt(3))


def test_a_missing_launch_removes_only_its_own_round() -> None:
    rows = {"a": [110.0, 220.0, 330.0], "b": [100.0, None, 300.0], "c": [50.0, 100.0, 150.0]}
    found = compare_rounds(rows, prior=PRIOR)
    assert found.ratio("a", "b")[0] == pytest.approx(1.1)
    assert found.noise.degrees == 8 - 3 - 3 + 1
    assert found.noise.sd == pytest.approx(0, abs=1e-9)


def test_the_other_contenders_show_the_level_of_a_missed_round() -> None:
    # All are equal, except b's first launch, which is 0.4 slower. Compared with b alone, a would be 0.2 faster in their
    # two common rounds. b's third launch equals c's, and c equals a in those two. By hand, least squares give 5/12 of
    # 0.4.
    rows = {"a": [1.0, 1.0, None], "b": [math.exp(-0.4), 1.0, 1.0], "c": [1.0, 1.0, 1.0]}
    found = compare_rounds(rows, prior=PRIOR)
    ratio, low, high = found.ratio("a", "b")
    assert math.log(ratio) == pytest.approx(0.4 * 5 / 12)
    half, of_pairs = math.log(high / low) / 2, found.noise.sd * t_quantile(found.noise.degrees)
    # Narrower than from two pairs, wider than from three.
    assert of_pairs * math.sqrt(2 / 3) < half < of_pairs * math.sqrt(2 / 2)
    assert math.log(found.ratio("b", "c")[0]) == pytest.approx(-0.4 / 3)


def test_least_squares_of_an_incomplete_table() -> None:
    # Log rates of a: 0, 0; of b: 1, 2, 2, of which the third round tells nothing. The fit to the differences 1 and 2
    # leaves residuals of 1/4 in four cells, with 5 - 2 - 3 + 1 = 1 degree. A contender alone in its round changes
    # nothing.
    rows = {"a": [1.0, 1.0, None, None], "b": [math.e, math.e**2, math.e**2, None], "c": [None, None, None, 7.0]}
    assert compare_rounds(rows, prior=PRIOR).noise is PRIOR
    # Two more rounds with the same scatter add two degrees: the differences are 1, 2, 1, 2.
    longer = {"a": [1.0, 1.0, None, 1.0, 1.0], "b": [math.e, math.e**2, 1.0, math.e, math.e**2]}
    found = compare_rounds(longer, prior=PRIOR).noise
    assert found.degrees == 3 and found.sd == pytest.approx(math.sqrt(4 * 0.25 / 2 / 3))


def test_without_a_common_round_the_mean_rates_are_compared() -> None:
    rows = {"a": [200.0, 202.0, None, None, None], "b": [None, None, 100.0, 101.0, 99.0]}
    found = compare_rounds(rows, prior=PRIOR)
    ratio, low, high = found.ratio("a", "b")
    assert low < ratio < high and ratio == pytest.approx(2.01, abs=0.001)
    assert (ratio, low, high) == speedup(found.rate("a"), found.rate("b"))


def test_a_contender_that_was_never_launched_has_no_figures() -> None:
    found = compare_rounds({"a": [1.0, 1.1], "b": [None, None]}, prior=PRIOR)
    for ask in (lambda: found.rate("b"), lambda: found.ratio("a", "b"), lambda: found.ratio("b", "b")):
        with pytest.raises(ValueError, match="b was launched in no round"):
            ask()


def test_one_round_has_the_prior_noise() -> None:
    found = compare_rounds({0: [100.0], 1: [110.0], 2: [None]}, prior=PRIOR)
    assert found.noise is PRIOR and found.total is PRIOR
    ratio, low, high = found.ratio(1, 0)
    assert math.log(high / ratio) == pytest.approx(2.306 * PRIOR.sd * math.sqrt(2), rel=1e-4)
    assert low < 1 < high


def test_a_ratio_to_itself_is_exactly_one() -> None:
    assert compare_rounds(ROWS, prior=PRIOR).ratio("a", "a") == (1, 1, 1)


def test_rows_must_have_equal_lengths() -> None:
    with pytest.raises(ValueError, match="each round"):
        compare_rounds({"a": [1.0, 2.0], "b": [1.0]}, prior=PRIOR)


def test_an_empty_table_is_allowed() -> None:
    assert compare_rounds({}, prior=PRIOR).noise is PRIOR


class TestAnotherRound:
    def test_of_two_equals_it_gains_what_the_means_may_still_move(self) -> None:
        # A fifth round moves the means by sd * sqrt(1/4 - 1/5); the larger of two normal ones is 1/sqrt(pi).
        expected = 0.02 * math.sqrt(1 / 4 - 1 / 5) / math.sqrt(math.pi)
        assert gain_per_round([0.0, 0.0], 4, 0.02) == pytest.approx(expected, rel=0.05)

    def test_it_gains_less_the_more_there_were_and_nothing_where_one_is_far_ahead(self) -> None:
        gains = [gain_per_round([0.0, 0.01, 0.01], n, 0.03) for n in (1, 2, 4, 8, 16)]
        assert gains == sorted(gains, reverse=True) and gains[-1] > 0
        assert gain_per_round([0.0, 1.0], 4, 0.02) == pytest.approx(0.0, abs=1e-9)
        assert gain_per_round([0.0], 4, 0.02) == 0.0

    def test_several_may_be_worth_it_where_one_is_not(self) -> None:
        """One more round cannot turn this order round, and eight may."""
        moved = 0.03 * math.sqrt(1 / 3 - 1 / 4)
        gap = 4 * moved
        # The gain of one round: that the difference, of which the sd is moved * sqrt(2), turns out below 0.
        z = gap / moved / math.sqrt(2)
        alone = moved * math.sqrt(2) * (NormalDist().pdf(z) - z * NormalDist().cdf(-z))
        assert gain_per_round([0.0, gap], 3, 0.03) > 4 * alone


def test_a_robust_fit_of_rates_without_noise_is_exact() -> None:
    drift = [1.0, 1.5, 0.7]
    found = compare_rounds({i: [(1 + i) * d for d in drift] for i in range(8)}, prior=PRIOR, robust=True)
    assert found.ratio(3, 0) == pytest.approx((4.0, 4.0, 4.0))
    same = compare_rounds({i: [1.0] * 3 for i in range(8)}, prior=PRIOR, robust=True)
    assert same.ratio(1, 0) == pytest.approx((1.0, 1.0, 1.0)) and same.noise.sd == pytest.approx(0.0, abs=1e-12)


def test_one_late_turn_hardly_moves_a_robust_fit() -> None:
    rows = {i: [math.exp(0.01 * ((7 * i + 3 * j) % 5 - 2)) for j in range(6)] for i in range(8)}
    late = {**rows, 0: [rows[0][0] / 4, *rows[0][1:]]}
    moved = [math.log(compare_rounds(late, prior=PRIOR, robust=r).ratio(0, 1)[0]) for r in (False, True)]
    assert moved[0] < -0.2 and abs(moved[1]) < 0.03
