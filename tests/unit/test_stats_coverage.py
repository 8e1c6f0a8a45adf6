"""Coverage of 95 % intervals, in simulations with a known truth and fixed seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest

from autotune.base.records import Window
from autotune.stats import (
    PRIORS,
    LaunchNoise,
    Rate,
    compare_rounds,
    launch_noise,
    mean_rate,
    rate_of,
    speedup,
    t_of_largest,
)

PRIOR = PRIORS["cpu"]
TRUTH = 100.0


def windows_of(rng: random.Random, count: int, spread: float = 0.03, alike: float = 0.0) -> list[Window]:
    """Windows of `TRUTH` samples that last about a second; ``alike`` is the correlation of neighbours."""
    excess, found = rng.gauss(0, spread), []
    for _ in range(count):
        found.append(Window(steps=1, samples=100, seconds=1 + excess))
        excess = alike * excess + rng.gauss(0, spread * math.sqrt(1 - alike**2))
    return found


def coverage(repetitions: int, holds: Callable[[random.Random], bool], seed: int = 0) -> float:
    rng = random.Random(seed)
    return sum(holds(rng) for _ in range(repetitions)) / repetitions


def holds_truth(rate: Rate) -> bool:
    return rate.low_per_s <= TRUTH <= rate.high_per_s


class TestOneLaunch:
    @pytest.mark.parametrize("count", [3, 4, 5, 8, 20, 40])
    def test_of_independent_windows(self, count: int) -> None:
        # Found 95.0, 94.4, 95.6, 96.2, 95.7 and 96.8 %: from five windows on, some correlation is suspected by chance.
        found = coverage(3000, lambda rng: holds_truth(rate_of(windows_of(rng, count))))
        assert 0.94 <= found <= 0.97

    @pytest.mark.parametrize(("count", "least"), [(5, 0.86), (8, 0.88), (20, 0.90), (40, 0.92)])
    def test_of_correlated_windows(self, count: int, least: float) -> None:
        # Found 88.4, 91.0, 91.0 and 93.7 %: few windows cannot show how correlated they are. Without the correction it
        # would be 80, 76, 74 and 74 %.
        found = coverage(3000, lambda rng: holds_truth(rate_of(windows_of(rng, count, alike=0.5))))
        assert least <= found <= 0.97

    @pytest.mark.parametrize("count", [5, 20])
    def test_of_windows_of_unequal_size(self, count: int) -> None:
        def holds(rng: random.Random) -> bool:
            sizes = [rng.randint(4, 12) for _ in range(count)]
            spans = [sum(rng.gauss(0.1, 0.015) for _ in range(steps)) for steps in sizes]
            return holds_truth(
                rate_of([Window(steps=n, samples=10 * n, seconds=s) for n, s in zip(sizes, spans, strict=True)])
            )

        assert 0.94 <= coverage(1500, holds) <= 0.97

    def test_if_one_window_in_ten_stalls(self) -> None:
        def holds(rng: random.Random) -> bool:
            windows = windows_of(rng, 20)
            for i in rng.sample(range(20), 2):
                windows[i] = windows[i].model_copy(update={"seconds": 2 * windows[i].seconds})
            rate = rate_of(windows)
            assert abs(rate.per_s / TRUTH - 1) < 0.04
            return holds_truth(rate)

        assert coverage(1000, holds) >= 0.93


class TestPairsOfLaunches:
    def test_with_the_noise_of_ten_repeats(self) -> None:
        # 10,000 A/A pairs, each in its own study. Found 95.2 %.
        def one(rng: random.Random) -> Rate:
            per_s = TRUTH * math.exp(rng.gauss(0, 0.03))
            return Rate(per_s, 0.98 * per_s, 1.02 * per_s, 0.01, 9)

        def holds(rng: random.Random) -> bool:
            noise = launch_noise([[one(rng) for _ in range(10)]], prior=PRIOR)
            _, low, high = speedup(mean_rate([one(rng)], noise), mean_rate([one(rng)], noise))
            return low <= 1 <= high

        assert 0.94 <= coverage(10_000, holds) <= 0.96

    def test_with_the_noise_of_the_launches_themselves(self) -> None:
        def holds(rng: random.Random) -> bool:
            groups = [[Rate(r, r, r, 0.0, 9) for r in launched(rng, true, 3)] for true in (30.0, 60.0, 61.0)]
            noise = launch_noise(groups, prior=PRIOR)
            assert noise.learnt
            _, low, high = speedup(mean_rate(groups[1], noise), mean_rate(groups[0], noise))
            return low <= 2.0 <= high

        def launched(rng: random.Random, true: float, count: int) -> list[float]:
            return [true * math.exp(rng.gauss(0, 0.04)) for _ in range(count)]

        assert 0.94 <= coverage(4000, holds) <= 0.96

    @pytest.mark.parametrize(
        ("sd", "least", "narrower"), [(0.005, 0.99, 1.2), (0.02, 0.94, 1.0), (0.05, 0.93, 0.9), (0.12, 0.91, 0.8)]
    )
    def test_of_two_launches_of_each(self, sd: float, least: float, narrower: float) -> None:
        # Found 99.9, 95.7, 94.7 and 92.9 %, with intervals 1.12, 0.94, 0.82 and 0.70 times as wide as without bounds.
        unbounded, widths = replace(PRIOR, least=0.0), {True: 0.0, False: 0.0}

        def holds(rng: random.Random) -> bool:
            rates = [[math.exp(rng.gauss(0, sd)) for _ in range(2)] for _ in range(2)]
            pair = [[Rate(r, r, r, 0.0, 9) for r in two] for two in rates]
            inside = {}
            for prior in (PRIOR, unbounded):
                noise = launch_noise(pair, prior=prior)
                _, low, high = speedup(mean_rate(pair[1], noise), mean_rate(pair[0], noise))
                widths[prior is PRIOR] += math.log(high / low)
                inside[prior is PRIOR] = low <= 1 <= high
            return inside[True]

        assert coverage(3000, holds) >= least
        assert widths[True] < narrower * widths[False]

    @pytest.mark.parametrize(("between", "most"), [(0.03, 0.97), (0.0, 0.995)], ids=["both", "windows alone"])
    def test_from_their_windows_to_the_ratio(self, between: float, most: float) -> None:
        # Found 96.3 and 98.6 %: if launches differ only by the scatter of their windows, the interval is too wide,
        # because a launch counts with its own error if that exceeds the repeats' by chance.
        def launch(rng: random.Random) -> Rate:
            slow = math.exp(rng.gauss(0, between))
            return rate_of([w.model_copy(update={"seconds": w.seconds * slow}) for w in windows_of(rng, 6)])

        def holds(rng: random.Random) -> bool:
            noise = launch_noise([[launch(rng) for _ in range(5)], [launch(rng) for _ in range(5)]], prior=PRIOR)
            _, low, high = speedup(mean_rate([launch(rng)], noise), mean_rate([launch(rng)], noise))
            return low <= 1 <= high

        assert 0.94 <= coverage(1000, holds) <= most


class TestRounds:
    @staticmethod
    def table(
        rng: random.Random, contenders: int, rounds: int, drift: float, missing: float = 0.0
    ) -> list[list[float | None]]:
        slow = [rng.gauss(0, drift) for _ in range(rounds)]
        return [
            [
                TRUTH * math.exp(0.1 * i + common + rng.gauss(0, 0.03)) if not i or rng.random() >= missing else None
                for common in slow
            ]
            for i in range(contenders)
        ]

    @pytest.mark.parametrize("drift", [0.0, 0.05, 0.5])
    def test_of_three_contenders_in_four_rounds(self, drift: float) -> None:
        def holds(rng: random.Random) -> bool:
            found = compare_rounds(dict(enumerate(self.table(rng, 3, 4, drift))), prior=PRIOR)
            _, low, high = found.ratio(2, 0)
            return low <= math.exp(0.2) <= high

        assert 0.94 <= coverage(5000, holds) <= 0.96

    def test_with_missing_launches(self) -> None:
        def holds(rng: random.Random) -> bool:
            rows = self.table(rng, 3, 5, 0.05, missing=0.2)
            if not any(rows[1]):
                return True
            _, low, high = compare_rounds(dict(enumerate(rows)), prior=PRIOR).ratio(1, 0)
            return low <= math.exp(0.1) <= high

        assert 0.935 <= coverage(1500, holds) <= 0.965

    @pytest.mark.parametrize("drift", [0.0, 0.05])
    def test_of_a_rate_on_another_day(self, drift: float) -> None:
        def holds(rng: random.Random) -> bool:
            return holds_truth(compare_rounds(dict(enumerate(self.table(rng, 3, 4, drift))), prior=PRIOR).rate(0))

        assert 0.93 <= coverage(3000, holds) <= 0.97

    #: Noise of a reference, of the one in question, and of a third.
    @pytest.mark.parametrize("sds", [(0.05, 0.05, 0.05), (0.08, 0.005, 0.005), (0.005, 0.08, 0.005)])
    @pytest.mark.parametrize("rounds", [2, 4])
    def test_where_one_differs_more_than_the_others(self, sds: tuple[float, ...], rounds: int) -> None:
        """As launches do that copy from memory that is not pinned. Found 94.6 to 95.5 %; with the noise pooled, 83 to
        88 % of ratios, and 70 % of the noisy one's rates."""

        def compared(rng: random.Random) -> tuple[bool, bool]:
            rows = {i: [TRUTH * math.exp(rng.gauss(0, sd)) for _ in range(rounds)] for i, sd in enumerate(sds)}
            launches = {i: [*rates, TRUTH * math.exp(rng.gauss(0, sds[i]))] for i, rates in rows.items()}
            found = compare_rounds(rows, prior=PRIOR, launches=launches)
            _, low, high = found.ratio(1, 0)
            return low <= 1 <= high, holds_truth(found.rate(1))

        rng = random.Random(0)
        ratios, rates = zip(*(compared(rng) for _ in range(1500)), strict=True)
        assert 0.935 <= sum(ratios) / 1500 <= 0.97 and sum(rates) / 1500 >= 0.93

    def test_where_one_differs_more_and_others_missed_rounds(self) -> None:
        """One dropped out after two rounds, and two were launched in the last two only, as an ablation's variants are.
        With the error of their own launches, but the centre from all, the intervals of quiet ones held in 24 % of
        races: how a round was, a noisy one tells badly."""
        rounds = {"noisy": range(6), "winner": range(6), "out": range(2), "variant": (4, 5), "other": (4, 5)}
        pairs = [("winner", "variant"), ("winner", "out"), ("variant", "other"), ("winner", "noisy")]

        def compared(rng: random.Random) -> list[tuple[bool, float]]:
            drift = [rng.gauss(0, 0.002) for _ in range(6)]
            rows: dict[str, list[float | None]] = {
                name: [
                    math.exp(drift[j] + rng.gauss(0, 0.08 if name == "noisy" else 0.003)) if j in present else None
                    for j in range(6)
                ]
                for name, present in rounds.items()
            }
            launches = {name: [rate for rate in rates if rate is not None] for name, rates in rows.items()}
            prior = launch_noise([[Rate(r, r, r) for r in rates] for rates in launches.values()], prior=PRIORS["cuda"])
            found = compare_rounds(rows, prior=prior, launches=launches)
            return [(low <= 1 <= high, high / low) for _, low, high in (found.ratio(a, b) for a, b in pairs)]

        rng = random.Random(0)
        races = [compared(rng) for _ in range(400)]
        for of_pair in zip(*races, strict=True):
            assert sum(held for held, _ in of_pair) >= 0.93 * len(races)
        # The noisy one does not widen the others' intervals.
        assert median(widths for (_, widths), *_ in races) < 1.03

    def test_two_that_differ_much_beside_two_that_do_not(self) -> None:
        def holds(rng: random.Random) -> bool:
            rows = {i: [math.exp(rng.gauss(0, sd)) for _ in range(4)] for i, sd in enumerate((0.1, 0.1, 0.002, 0.002))}
            _, low, high = compare_rounds(rows, prior=PRIORS["cuda"], launches=rows).ratio(0, 1)
            return low <= 1 <= high

        # With the noise pooled, 0.87.
        assert coverage(1000, holds) >= 0.9

    def test_who_differs_little_has_a_narrow_interval_beside_one_who_does_not(self) -> None:
        rows = {0: [100.0, 92.0, 108.0], 1: [200.0, 200.1, 199.9], 2: [150.0, 150.1, 150.2]}
        rate = compare_rounds(rows, prior=PRIORS["cuda"], launches=rows).rate(1)
        assert rate.halfwidth < 0.003 and holds_truth(compare_rounds(rows, prior=PRIORS["cuda"], launches=rows).rate(0))

    def test_drift_would_ruin_unpaired_intervals(self) -> None:
        # The same tables without the knowledge of the rounds: the interval is correct, and three times as wide.
        rng = random.Random(1)
        rows = self.table(rng, 3, 4, 0.1)
        found = compare_rounds(dict(enumerate(rows)), prior=PRIOR)
        _, low, high = found.ratio(1, 0)
        _, wide_low, wide_high = speedup(found.rate(1), found.rate(0))
        assert math.log(wide_high / wide_low) > 3 * math.log(high / low)


def test_the_prior_noise_is_valid_if_launches_differ_as_assumed() -> None:
    def holds(rng: random.Random, noise: LaunchNoise) -> bool:
        per_s = [TRUTH * math.exp(rng.gauss(0, noise.sd)) for _ in range(2)]
        _, low, high = speedup(*(mean_rate([Rate(r, r, r, 0.0, 9)], noise) for r in per_s))
        return low <= 1 <= high

    for prior in PRIORS.values():
        # Its eight degrees of freedom allow for a slightly noisier machine.
        assert 0.95 <= coverage(2000, lambda rng, prior=prior: holds(rng, prior)) <= 0.99


@pytest.mark.parametrize(("rounds", "count"), [(2, 3), (3, 5)])
@pytest.mark.parametrize("baseline_sd", [0.0, 1.0], ids=["independent", "sharing a baseline"])
def test_none_of_several_equals_seems_faster_in_nineteen_of_twenty(rounds: int, count: int, baseline_sd: float) -> None:
    degrees = (rounds - 1) * count
    quantile = t_of_largest(degrees, count)

    def holds(rng: random.Random) -> bool:
        sd = math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(degrees)) / degrees)
        baseline = rng.gauss(0, baseline_sd)
        error = math.hypot(1.0, baseline_sd)
        return all(abs(rng.gauss(0, 1) - baseline) < quantile * error * sd for _ in range(count))

    found = coverage(20_000, holds)
    assert found == pytest.approx(0.95, abs=0.006) if baseline_sd == 0 else 0.95 <= found <= 0.98


class TestTurns:
    """Turns of equals in a heat of eight, fitted robustly."""

    @staticmethod
    def compared(rounds: int, incidents: float, *, robust: bool) -> tuple[float, float]:
        """Return the coverage of the ratios' intervals, and the spread of the ratios' logarithms."""
        rng, inside, logs = random.Random(0), 0, []
        for _ in range(400):
            late = [
                [rng.expovariate(2.0) if rng.random() < incidents else 0.0 for _ in range(rounds)] for _ in range(8)
            ]
            rows = {i: [math.exp(rng.gauss(0, 0.04) - wait) for wait in row] for i, row in enumerate(late)}
            found = compare_rounds(rows, prior=PRIOR, robust=robust)
            for one in range(0, 8, 2):
                ratio, low, high = found.ratio(one, one + 1)
                inside += low <= 1 <= high
                logs.append(math.log(ratio))
        return inside / len(logs), math.sqrt(sum(x * x for x in logs) / len(logs))

    @pytest.mark.parametrize("rounds", [3, 6, 12, 30])
    @pytest.mark.parametrize("incidents", [0.0, 0.03])
    def test_coverage(self, rounds: int, incidents: float) -> None:
        found, spread = self.compared(rounds, incidents, robust=True)
        assert 0.93 <= found <= 0.97
        plain = self.compared(rounds, incidents, robust=False)[1]
        # Three turns in a hundred that take half as long again, on average, triple the spread of least squares; of
        # normal noise the robust fit loses little.
        assert spread < (1.1 if incidents == 0 else 0.6) * plain
