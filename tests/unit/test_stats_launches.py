"""Statistics over several launches: noise, mean and comparison, checked against hand calculations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.stats import (
    PRIORS,
    LaunchNoise,
    Rate,
    at_equal_clocks,
    launch_noise,
    mean_rate,
    speedup,
    t_quantile,
)

PRIOR = replace(PRIORS["cpu"], least=0.0)
NOISE = LaunchNoise(0.04, 5, True)


def rates(*per_s: float) -> list[Rate]:
    return [Rate(r, r, r, 0.0, 9) for r in per_s]


class TestNoise:
    def test_is_pooled_within_the_groups(self) -> None:
        # Logarithms: 0 and 0.0953102 (squares about their mean 0.00454201); 0, -0.0512933 and 0.0487902
        # (0.00500939). Together 0.00955140 on 1 + 2 degrees of freedom. The lone launch adds nothing.
        found = launch_noise([rates(100, 110), rates(200, 190, 210), rates(5), []], prior=PRIOR)
        assert (found.degrees, found.learnt) == (3, True)
        assert found.sd == pytest.approx(0.0564252, abs=1e-6)

    @pytest.mark.parametrize("groups", [[], [[100]], [[100], [3]], [[100, 110]], [[100, 110], [3]]])
    def test_is_the_prior_with_fewer_than_two_degrees_of_freedom(self, groups: list[list[float]]) -> None:
        assert launch_noise([rates(*group) for group in groups], prior=PRIOR) is PRIOR
        assert not PRIOR.learnt

    def test_lies_between_its_bounds(self) -> None:
        # Of 2 degrees of freedom and a standard deviation of 0.05, Student's t allows for 0.22, and for 0.54 with six
        # candidates by Bonferroni's inequality.
        bounded = replace(PRIOR, least=0.003, most=0.3)
        few = launch_noise([rates(100, 107.33), rates(100, 107.33)], prior=bounded)
        assert few.sd * t_quantile(few.degrees) == pytest.approx(0.18, abs=0.01)
        assert few.sd * t_quantile(few.degrees, 1 - 0.025 / 6) == pytest.approx(0.38, abs=0.02)
        many = rates(*[100, 107.33] * 20)
        assert launch_noise([many], prior=bounded).sd == pytest.approx(launch_noise([many], prior=PRIOR).sd, rel=0.01)
        equal, far = launch_noise([rates(5, 5, 5)], prior=bounded), launch_noise([rates(1, 2, 4)], prior=bounded)
        assert 0.003 < equal.sd < 0.005 and 0.3 < far.sd < 0.7 and far.degrees < 6

    def test_does_not_depend_on_differences_between_groups(self) -> None:
        near = launch_noise([rates(100, 110), rates(100, 90)], prior=PRIOR)
        far = launch_noise([rates(100, 110), rates(1e6, 9e5)], prior=PRIOR)
        assert near.sd == pytest.approx(far.sd)


class TestMean:
    def test_of_one_launch_has_the_noise_of_a_launch(self) -> None:
        found = mean_rate([Rate(100, 99.9, 100.1, 0.0005, 12)], NOISE)
        assert found.high_per_s == pytest.approx(100 * math.exp(2.57058 * 0.04), rel=1e-4)
        assert found.low_per_s == pytest.approx(100 * math.exp(-2.57058 * 0.04), rel=1e-4)
        assert (found.relative_se, found.degrees) == (0.04, 5)

    def test_is_geometric_and_narrows_with_the_root_of_the_launches(self) -> None:
        found = mean_rate(rates(90, 160, 120, 120), NOISE)
        assert found.per_s == pytest.approx(120)
        assert found.high_per_s == pytest.approx(120 * math.exp(2.57058 * 0.04 / 2), rel=1e-4)
        assert found.relative_se == pytest.approx(0.02)

    def test_a_launch_shorter_than_the_repeats_has_its_own_error(self) -> None:
        found = mean_rate([Rate(100, 80, 120, 0.09, 4)], NOISE)
        assert (found.relative_se, found.degrees) == (pytest.approx(0.09), pytest.approx(4))
        assert found.high_per_s == pytest.approx(100 * math.exp(2.77645 * 0.09), rel=1e-4)

    def test_errors_of_short_launches_add_in_squares(self) -> None:
        # Variances 0.12² and 0.16², halved twice: 0.1². Satterthwaite: 0.04² / (0.0144² / 4 + 0.0256² / 4) = 7.42.
        found = mean_rate([Rate(100, 80, 120, 0.12, 4), Rate(100, 80, 120, 0.16, 4)], NOISE)
        assert found.relative_se == pytest.approx(0.1)
        assert found.degrees == pytest.approx(7.41839, abs=1e-4)

    def test_an_error_that_the_noise_includes_is_not_counted_twice(self) -> None:
        # It exceeds the noise by chance, like the error of every third launch without other differences.
        assert mean_rate([Rate(100, 80, 120, 0.06, 4)], NOISE).relative_se == 0.04
        assert mean_rate([Rate(100, 80, 120, 0.06, 4)], PRIOR).relative_se == pytest.approx(0.06)

    def test_an_interval_without_degrees_of_freedom_is_treated_as_normal(self) -> None:
        found = mean_rate([Rate(100, 80, 120)], NOISE)
        assert found.relative_se == pytest.approx(0.2 / 1.95996, abs=1e-5)
        assert found.high_per_s == pytest.approx(100 * math.exp(0.2))

    def test_no_launches_raise(self) -> None:
        with pytest.raises(ValueError, match="no launch"):
            mean_rate([], NOISE)


class TestSpeedup:
    def test_with_a_common_noise_has_its_degrees_of_freedom(self) -> None:
        a, b = mean_rate(rates(220, 220), NOISE), mean_rate(rates(100, 100), NOISE)
        ratio, low, high = speedup(a, b)
        spread = 2.57058 * 0.04
        assert ratio == pytest.approx(2.2)
        assert high == pytest.approx(2.2 * math.exp(spread), rel=1e-4) and low == pytest.approx(
            2.2 * math.exp(-spread), rel=1e-4
        )

    def test_of_two_estimates_has_welchs_degrees_of_freedom(self) -> None:
        # Variances 0.0009 on 6 and 0.0016 on 3: 0.0025² / (0.0009² / 6 + 0.0016² / 3) = 6.32.
        _, _, high = speedup(Rate(100, 95, 105, 0.03, 6), Rate(100, 95, 105, 0.04, 3))
        assert high == pytest.approx(math.exp(t_quantile(6.32379) * 0.05), rel=1e-5)

    def test_half_widths_add_in_squares_if_only_intervals_are_known(self) -> None:
        ratio, low, high = speedup(Rate(200, 194, 206), Rate(100, 96, 104, 0.001, 9))
        assert ratio == pytest.approx(2) and high == pytest.approx(2 * math.exp(0.05))
        assert low == pytest.approx(2 * math.exp(-0.05))

    @given(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0, 0.5), st.floats(0, 0.5), st.booleans())
    def test_of_swapped_rates_is_the_inverse(self, a: float, b: float, wide: float, narrow: float, known: bool) -> None:
        one = Rate(a, a * (1 - wide), a * (1 + wide), wide / 2 if known else None, 3 if known else None)
        other = Rate(b, b * (1 - narrow), b * (1 + narrow), narrow / 2 if known else None, 8 if known else None)
        ratio, low, high = speedup(one, other)
        inverse, below, above = speedup(other, one)
        assert ratio * inverse == pytest.approx(1) and low * above == pytest.approx(1)
        assert low <= ratio <= high and high * below == pytest.approx(1)


class TestClocks:
    FOUND = (1.5, 1.4, 1.6)

    @pytest.mark.parametrize("clocks", [1.0, 1.009, 1 / 1.009])
    def test_that_agree_change_nothing(self, clocks: float) -> None:
        assert at_equal_clocks(self.FOUND, clocks) == self.FOUND

    @pytest.mark.parametrize(("clocks", "low", "high"), [(1.1, 1.4 / 1.1, 1.6), (0.9, 1.4, 1.6 / 0.9)])
    def test_that_differ_widen_the_interval_to_what_it_may_be_at_equal_ones(
        self, clocks: float, low: float, high: float
    ) -> None:
        assert at_equal_clocks(self.FOUND, clocks) == (1.5, pytest.approx(low), pytest.approx(high))

    @given(st.floats(0.5, 2))
    def test_of_swapped_rates_are_the_inverse(self, clocks: float) -> None:
        _, low, high = at_equal_clocks((2.0, 1.6, 2.5), clocks)
        _, swapped_low, swapped_high = at_equal_clocks((0.5, 0.4, 0.625), 1 / clocks)
        assert (1 / high, 1 / low) == (pytest.approx(swapped_low), pytest.approx(swapped_high))
