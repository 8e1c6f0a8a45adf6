"""The numbers: quantiles against tables, intervals against simulation, comparisons against hand calculation."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.records import Window
from autotune.stats import LaunchNoise, Rate, launch_noise, mean_rate, rate_of, speedup, t_quantile, with_epoch_turn

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


class TestQuantile:
    @pytest.mark.parametrize(("degrees", "expected"), T_975.items())
    def test_agrees_with_the_tables(self, degrees: int, expected: float) -> None:
        assert t_quantile(degrees) == pytest.approx(expected, abs=2e-4)

    @pytest.mark.parametrize(
        ("degrees", "probability", "expected"),
        [(1, 0.95, 6.31375), (2, 0.99, 6.96456), (3, 0.995, 5.84091), (5, 0.95, 2.01505), (20, 0.9, 1.32534)],
    )
    def test_at_other_probabilities(self, degrees: int, probability: float, expected: float) -> None:
        assert t_quantile(degrees, probability) == pytest.approx(expected, rel=2e-4)

    def test_falls_towards_the_normal_distributions(self) -> None:
        found = [t_quantile(degrees) for degrees in range(1, 2000)]
        assert found == sorted(found, reverse=True)
        assert found[-1] == pytest.approx(1.95996, abs=2e-3)


class TestRate:
    def test_is_total_over_total(self) -> None:
        # The mean of the windows' rates would say 55.
        assert rate_of([window(100, 1.0), window(100, 10.0)]).per_s == pytest.approx(200 / 11)

    def test_the_interval_of_two_windows_by_hand(self) -> None:
        # Rate 100/s; residuals -5 and 5; their variance 50; mean duration 1 s.
        found = rate_of([window(95, 1.0), window(105, 1.0)])
        half = 12.7062 * math.sqrt(50 / 2)
        assert found.high_per_s == pytest.approx(100 + half, abs=0.01)
        assert found.low_per_s == pytest.approx(100 - half, abs=0.01)

    def test_one_window_tells_nothing_of_the_scatter(self) -> None:
        found = rate_of([window(50, 0.5)])
        assert (found.per_s, found.low_per_s, found.high_per_s) == (100.0, 0.0, 200.0) and found.halfwidth == 1.0

    @pytest.mark.parametrize("windows", [[], [window(3, 0.0)], [window(3, 1.0), window(3, -1.0)]])
    def test_nothing_to_divide_by(self, windows: list[Window]) -> None:
        with pytest.raises(ValueError, match="positive duration"):
            rate_of(windows)

    @given(windows_of, st.randoms(use_true_random=False))
    def test_holds_the_estimate_and_does_not_see_the_order(self, windows: list[Window], rng: random.Random) -> None:
        found = rate_of(windows)
        assert 0 <= found.low_per_s <= found.per_s <= found.high_per_s
        rng.shuffle(windows)
        again = rate_of(windows)
        assert again.per_s == pytest.approx(found.per_s) and again.high_per_s == pytest.approx(found.high_per_s)

    @given(windows_of, st.floats(0.25, 4))
    def test_scales_with_the_unit_of_time(self, windows: list[Window], factor: float) -> None:
        found = rate_of(windows)
        scaled = rate_of([window(w.samples, w.seconds * factor) for w in windows])
        assert scaled.per_s * factor == pytest.approx(found.per_s)
        assert scaled.high_per_s * factor == pytest.approx(found.high_per_s)

    @pytest.mark.parametrize("count", [5, 20])
    @pytest.mark.parametrize("steps", [(8, 8), (4, 12)], ids=["equal windows", "unequal windows"])
    def test_the_interval_covers_what_it_promises(self, count: int, steps: tuple[int, int]) -> None:
        rng = random.Random(count)
        batch, step_s = 32, 0.1
        truth = batch / step_s
        hits = 0
        repetitions = 2000
        for _ in range(repetitions):
            found = rate_of(
                [
                    window(batch * taken, sum(rng.gauss(step_s, 0.15 * step_s) for _ in range(taken)))
                    for taken in (rng.randint(*steps) for _ in range(count))
                ]
            )
            hits += found.low_per_s <= truth <= found.high_per_s
        assert 0.93 <= hits / repetitions <= 0.97


class TestEpochTurn:
    RATE = Rate(100.0, 90.0, 110.0)

    def test_weighs_in_once_an_epoch(self) -> None:
        # 1,000 samples take 10 s, and 5 s more.
        found = with_epoch_turn(self.RATE, 5.0, 1000)
        assert found.per_s == pytest.approx(1000 / 15)
        assert found.low_per_s == pytest.approx(1000 / (1000 / 90 + 5))
        assert found.high_per_s == pytest.approx(1000 / (1000 / 110 + 5))

    @pytest.mark.parametrize("turn_s", [None, 0.0, -0.5])
    def test_no_turn_changes_nothing(self, turn_s: float | None) -> None:
        assert with_epoch_turn(self.RATE, turn_s, 1000) == self.RATE

    def test_an_end_at_zero_stays_there(self) -> None:
        assert with_epoch_turn(Rate(100.0, 0.0, 200.0), 1.0, 1000).low_per_s == 0.0

    @given(st.floats(1, 1e4), st.floats(0.001, 100), st.integers(1, 10**7))
    def test_never_makes_faster_and_fades_with_the_epochs_length(self, per_s: float, turn_s: float, epoch: int) -> None:
        rate = Rate(per_s, per_s, per_s)
        short = with_epoch_turn(rate, turn_s, epoch).per_s
        long = with_epoch_turn(rate, turn_s, 10 * epoch).per_s
        assert 0 < short <= long <= per_s * (1 + 1e-12)


class TestLaunches:
    def test_noise_is_pooled_within_the_groups(self) -> None:
        # Logarithms: 0 and 0.0953102 (squares about their mean 0.00454201); 0, -0.0512933 and 0.0487902
        # (0.00500939). Together 0.00955140 on 1 + 2 degrees of freedom. The lone launch adds nothing.
        found = launch_noise([[100, 110], [200, 190, 210], [5]])
        assert found is not None
        assert found.degrees == 3
        assert found.sd == pytest.approx(0.0564252, abs=1e-6)

    @pytest.mark.parametrize("groups", [[], [[100]], [[100], [3]]])
    def test_nothing_launched_twice_tells_nothing(self, groups: list[list[float]]) -> None:
        assert launch_noise(groups) is None

    def test_groups_may_be_as_far_apart_as_they_like(self) -> None:
        near, far = launch_noise([[100, 110], [100, 90]]), launch_noise([[100, 110], [1e6, 9e5]])
        assert near is not None and far is not None and near.sd == pytest.approx(far.sd)

    def test_a_single_launch_without_noise_is_itself(self) -> None:
        found = mean_rate([Rate(100, 95, 105)], None)
        assert found.per_s == pytest.approx(100) and found.halfwidth == pytest.approx(0.05, rel=1e-3)

    def test_the_mean_is_geometric_and_the_wider_interval_holds(self) -> None:
        rates = [Rate(90, 89.1, 90.9), Rate(160, 158.4, 161.6)]
        quiet = mean_rate(rates, LaunchNoise(0.0001, 5))
        assert quiet.per_s == pytest.approx(120)
        assert quiet.high_per_s == pytest.approx(120 * math.exp(0.01 / math.sqrt(2)))
        loud = mean_rate(rates, LaunchNoise(0.1, 5))
        assert loud.high_per_s == pytest.approx(120 * math.exp(2.57058 * 0.1 / math.sqrt(2)), rel=1e-4)

    def test_no_launch_has_no_mean(self) -> None:
        with pytest.raises(ValueError, match="no launch"):
            mean_rate([], None)

    def test_half_widths_of_a_ratio_add_in_squares(self) -> None:
        ratio, low, high = speedup(Rate(200, 194, 206), Rate(100, 96, 104))
        assert ratio == pytest.approx(2) and high == pytest.approx(2 * math.exp(0.05))
        assert low == pytest.approx(2 * math.exp(-0.05))

    @given(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0, 0.5), st.floats(0, 0.5))
    def test_turned_round_it_is_the_inverse(self, a: float, b: float, wide: float, narrow: float) -> None:
        one, other = Rate(a, a * (1 - wide), a * (1 + wide)), Rate(b, b * (1 - narrow), b * (1 + narrow))
        ratio, low, high = speedup(one, other)
        inverse, below, above = speedup(other, one)
        assert ratio * inverse == pytest.approx(1) and low * above == pytest.approx(1)
        assert low <= ratio <= high and high * below == pytest.approx(1)

    @pytest.mark.parametrize("rounds", [2, 4])
    def test_a_speedup_from_interleaved_launches_covers_the_truth(self, rounds: int) -> None:
        rng = random.Random(rounds)
        repetitions, hits = 2000, 0
        for _ in range(repetitions):
            launched = [[true * math.exp(rng.gauss(0, 0.04)) for _ in range(rounds)] for true in (30.0, 60.0, 61.0)]
            noise = launch_noise(launched)
            rates = [mean_rate([Rate(r, r, r) for r in group], noise) for group in launched]
            _, low, high = speedup(rates[1], rates[0])
            hits += low <= 2.0 <= high
        assert hits / repetitions >= 0.93
