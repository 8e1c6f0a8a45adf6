"""Statistics of one launch: quantiles against tables, the rate and its interval against hand calculations."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.records import Window
from autotune.stats import Rate, autocorrelation, rate_of, t_of_largest, t_quantile, with_epoch_turn

#: Two-sided 95 %, from the tables in Snedecor & Cochran, Statistical Methods.
T_975 = {
    1: 12.7062,
    2: 4.30265,
    3: 3.18245,
    4: 2.77645,
    5: 2.57058,
    6: 2.44691,
    8: 2.30600,
    10: 2.22814,
    15: 2.13145,
    20: 2.08596,
    30: 2.04227,
    60: 2.00030,
    120: 1.97993,
}

seconds = st.floats(0.1, 10)
windows_of = st.lists(st.builds(Window, steps=st.just(1), samples=st.integers(1, 1000), seconds=seconds), min_size=2)


def window(samples: int, duration_s: float) -> Window:
    return Window(steps=1, samples=samples, seconds=duration_s)


def lasting(*durations_s: float) -> list[Window]:
    """Windows of 100 samples each."""
    return [window(100, s) for s in durations_s]


class TestQuantile:
    @pytest.mark.parametrize(("degrees", "expected"), T_975.items())
    def test_agrees_with_the_tables(self, degrees: int, expected: float) -> None:
        assert t_quantile(degrees) == pytest.approx(expected, abs=5e-5)

    @pytest.mark.parametrize(
        ("degrees", "probability", "expected"),
        [(1, 0.95, 6.31375), (2, 0.99, 6.96456), (3, 0.995, 5.84091), (5, 0.95, 2.01505), (20, 0.9, 1.32534)],
    )
    def test_at_other_probabilities(self, degrees: int, probability: float, expected: float) -> None:
        assert t_quantile(degrees, probability) == pytest.approx(expected, rel=2e-6)

    def test_falls_towards_the_normal_distributions(self) -> None:
        found = [t_quantile(degrees / 10) for degrees in range(10, 20_000)]
        assert found == sorted(found, reverse=True)
        assert found[-1] == pytest.approx(1.95996, abs=2e-3)
        assert t_quantile(math.inf) == pytest.approx(1.959964)

    @pytest.mark.parametrize(("degrees", "count", "expected"), [(2, 2, 5.57), (2, 3, 6.34), (3, 5, 5.02), (8, 3, 2.96)])
    def test_of_the_largest_agrees_with_the_tables(self, degrees: int, count: int, expected: float) -> None:
        assert t_of_largest(degrees, count) == pytest.approx(expected, abs=0.005)

    @pytest.mark.parametrize("degrees", [1.0, 2.6, 30.0, 1e4, math.inf])
    @pytest.mark.parametrize("count", [1, 2, 20])
    def test_of_the_largest_lies_between_that_of_one_and_bonferronis(self, degrees: float, count: int) -> None:
        one, bonferroni = t_quantile(degrees), t_quantile(degrees, 1 - 0.025 / count)
        assert one <= t_of_largest(degrees, count) <= t_of_largest(degrees, count, shared=False) * 1.00001
        assert t_of_largest(degrees, count, shared=False) <= bonferroni * 1.00001

    @pytest.mark.parametrize(
        ("degrees", "expected"), [(1.2, 8.64883), (1.5, 6.01666), (1.9, 4.52712), (2.5, 3.57465), (8.3, 2.29158)]
    )
    def test_of_fractional_degrees(self, degrees: float, expected: float) -> None:
        # Expected values by numerical integration of the density.
        assert t_quantile(degrees) == pytest.approx(expected, rel=1e-5)


class TestRate:
    def test_is_total_over_total(self) -> None:
        # The mean of the windows' rates would be 55.
        assert rate_of([window(100, 1.0), window(100, 10.0)]).per_s == pytest.approx(200 / 11)

    def test_the_interval_of_two_windows_by_hand(self) -> None:
        # Rate 100/s; residuals -5 and 5; their variance 50; mean duration 1 s.
        found = rate_of([window(95, 1.0), window(105, 1.0)])
        half = 12.7062 * math.sqrt(50 / 2)
        assert found.high_per_s == pytest.approx(100 + half, abs=0.01)
        assert found.low_per_s == pytest.approx(100 - half, abs=0.01)
        assert (found.relative_se, found.degrees) == (pytest.approx(0.05), 1)

    def test_one_window_does_not_show_the_scatter(self) -> None:
        found = rate_of([window(50, 0.5)])
        assert (found.per_s, found.low_per_s, found.high_per_s) == (100.0, 0.0, 200.0) and found.halfwidth == 1.0
        assert found.relative_se is None and found.degrees is None

    @pytest.mark.parametrize("windows", [[], [window(3, 0.0)], [window(3, 1.0), window(3, -1.0)], [window(0, 1.0)]])
    def test_no_time_or_no_samples_raise(self, windows: list[Window]) -> None:
        with pytest.raises(ValueError, match="positive duration"):
            rate_of(windows)

    @given(windows_of, st.randoms(use_true_random=False))
    def test_contains_the_estimate_and_ignores_the_order(self, windows: list[Window], rng: random.Random) -> None:
        found = rate_of(windows)
        assert 0 <= found.low_per_s <= found.per_s <= found.high_per_s
        rng.shuffle(windows)
        assert rate_of(windows).per_s == pytest.approx(found.per_s)

    @given(windows_of, st.floats(0.25, 4))
    def test_scales_with_the_time_unit(self, windows: list[Window], factor: float) -> None:
        found = rate_of(windows)
        scaled = rate_of([window(w.samples, w.seconds * factor) for w in windows])
        assert scaled.per_s * factor == pytest.approx(found.per_s)
        assert scaled.high_per_s * factor == pytest.approx(found.high_per_s)

    def test_equal_windows_have_an_interval_of_zero_width(self) -> None:
        found = rate_of(lasting(*[0.1] * 12))
        assert found.per_s == found.low_per_s == found.high_per_s == pytest.approx(1000)
        assert autocorrelation(lasting(*[0.1] * 12)) == found.relative_se == 0


class TestCentre:
    def test_of_clean_windows_is_exactly_total_over_total(self) -> None:
        rng = random.Random(4)
        windows = [window(samples := rng.randint(90, 110), samples * rng.uniform(0.0099, 0.0101)) for _ in range(30)]
        assert rate_of(windows).per_s == sum(w.samples for w in windows) / sum(w.seconds for w in windows)

    @pytest.mark.parametrize("spread", [0.001, 0.01, 0.05])
    def test_moves_by_less_than_2_percent_if_a_tenth_of_the_windows_last_twice_as_long(self, spread: float) -> None:
        rng = random.Random(5)
        clean = [rng.gauss(1, spread) for _ in range(30)]
        stalled = [s * 2 if i in {3, 14, 27} else s for i, s in enumerate(clean)]
        moved = rate_of(lasting(*stalled)).per_s / rate_of(lasting(*clean)).per_s
        assert abs(moved - 1) < 0.02
        # Total divided by total would move by 9 %.
        assert sum(clean) / sum(stalled) < 0.92

    def test_a_longer_stall_has_no_larger_effect(self) -> None:
        durations = [1.0, 1.02, 0.99, 1.01, 0.98, 1.0, 1.01]
        found = [rate_of(lasting(*durations, stall_s)).per_s for stall_s in (2.0, 20.0, 2000.0)]
        assert found == pytest.approx([found[0]] * 3, rel=1e-6)

    def test_an_outlier_among_four_windows_counts_in_full(self) -> None:
        assert rate_of(lasting(1.0, 1.01, 0.99, 5.0)).per_s == pytest.approx(400 / 8)

    def test_two_clusters_are_not_outliers_of_each_other(self) -> None:
        durations = [1.0, 1.001, 0.999, 1.002, 2.0, 2.001, 1.999, 2.002]
        assert rate_of(lasting(*durations)).per_s == pytest.approx(800 / sum(durations), rel=1e-3)

    def test_if_most_windows_are_equal_the_others_still_count(self) -> None:
        found = rate_of(lasting(1.0, 1.0, 1.0, 1.0, 1.0, 1.5))
        assert found.per_s == pytest.approx(600 / 6.5) and found.high_per_s > 100

    def test_does_not_narrow_the_interval_by_more_than_the_outliers_share(self) -> None:
        clean = lasting(1.0, 1.02, 0.97, 1.01, 0.98, 1.0, 1.03, 0.99, 1.0)
        stalled = [*clean, window(100, 2.0)]
        assert rate_of(stalled).halfwidth > rate_of(clean).halfwidth


class TestCorrelation:
    def test_of_an_autoregressive_series_is_recovered(self) -> None:
        rng = random.Random(6)
        excess, durations = 0.0, []
        for _ in range(4000):
            excess = 0.6 * excess + rng.gauss(0, 0.01)
            durations.append(1 + excess)
        assert autocorrelation(lasting(*durations)) == pytest.approx(0.6, abs=0.04)

    def test_widens_the_interval_as_if_there_were_fewer_windows(self) -> None:
        rng = random.Random(7)
        excess, durations = 0.0, []
        for _ in range(40):
            excess = 0.7 * excess + rng.gauss(0, 0.01)
            durations.append(1 + excess)
        found, shuffled = rate_of(lasting(*durations)), rate_of(lasting(*rng.sample(durations, 40)))
        r = autocorrelation(lasting(*durations))
        assert r is not None and 0.4 < r < 0.9
        assert found.degrees == pytest.approx(40 * (1 - r) / (1 + r) - 1)
        assert found.halfwidth > 1.5 * shuffled.halfwidth

    def test_of_alternating_windows_is_zero(self) -> None:
        windows = lasting(*[1.0, 1.02] * 5)
        assert autocorrelation(windows) == 0
        assert rate_of(windows).degrees == 9

    def test_a_trend_is_worth_two_windows(self) -> None:
        windows = lasting(*[1 + 0.01 * i for i in range(12)])
        assert autocorrelation(windows) == pytest.approx(10 / 14)
        assert rate_of(windows).degrees == 2

    def test_of_four_windows_is_unknown(self) -> None:
        assert autocorrelation(lasting(1.0, 1.1, 1.2, 1.3)) is None


class TestEpochTurn:
    RATE = Rate(100.0, 90.0, 110.0, 0.05, 7)

    def test_counts_once_per_epoch(self) -> None:
        # 1,000 samples take 10 s, plus 5 s.
        found = with_epoch_turn(self.RATE, 5.0, 1000)
        assert found.per_s == pytest.approx(1000 / 15)
        assert found.low_per_s == pytest.approx(1000 / (1000 / 90 + 5))
        assert found.high_per_s == pytest.approx(1000 / (1000 / 110 + 5))

    def test_an_error_applies_to_the_rest_of_the_epoch_only(self) -> None:
        found = with_epoch_turn(self.RATE, 5.0, 1000)
        assert (found.relative_se, found.degrees) == (pytest.approx(0.05 * 10 / 15), 7)
        assert with_epoch_turn(Rate(100.0, 90.0, 110.0), 5.0, 1000).relative_se is None

    @pytest.mark.parametrize("turn_s", [None, 0.0, -0.5])
    def test_no_turn_changes_nothing(self, turn_s: float | None) -> None:
        assert with_epoch_turn(self.RATE, turn_s, 1000) == self.RATE

    def test_an_interval_end_at_zero_stays_there(self) -> None:
        assert with_epoch_turn(Rate(100.0, 0.0, 200.0), 1.0, 1000).low_per_s == 0.0

    @given(st.floats(1, 1e4), st.floats(0.001, 100), st.integers(1, 10**7))
    def test_never_makes_faster_and_matters_less_in_longer_epochs(
        self, per_s: float, turn_s: float, epoch: int
    ) -> None:
        rate = Rate(per_s, per_s, per_s)
        short = with_epoch_turn(rate, turn_s, epoch).per_s
        long = with_epoch_turn(rate, turn_s, 10 * epoch).per_s
        assert 0 < short <= long <= per_s * (1 + 1e-12)
