"""Models the noise of recorded launches with a few parameters, and simulates launches with it.

The logarithm of a window's rate is modelled as a sum of four parts::

    level + drift (a random walk from launch to launch) + launch (drawn anew for each) + window (AR(1) inside a launch)
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median, pstdev

from autotune import stats
from autotune.base.records import Window
from benchmarks.recording import RecordedLaunch

#: Maximum lag for estimating the drift; launches further apart tell little about it.
LAGS = 10
#: Number of launches around each launch whose median is taken as the level at that time.
NEIGHBOURHOOD = 11


@dataclass(frozen=True)
class Noise:
    """The parameters. Standard deviations are of the logarithm of a rate.

    Attributes:
        drift_sd: of the random walk's step from one launch to the next.
        window_sd: of a window around its launch. correlation: between neighbouring windows.
        launch_tails, window_tails: recorded residuals, standardized to mean 0 and standard deviation 1.
        windows: number of windows of each launch. steps, samples: of a typical window.
    """

    rate_per_s: float
    between_sd: float
    drift_sd: float
    window_sd: float
    correlation: float
    launch_tails: tuple[float, ...]
    window_tails: tuple[float, ...]
    windows: tuple[int, ...]
    steps: int
    samples: int


def fit(launches: Sequence[RecordedLaunch]) -> Noise:
    """Fit the model to a recording.

    * *Windows*: method of moments. The pooled squares and products of neighbours around each launch's mean are set
      equal to their expectation for an AR(1) process with that number of windows around its own mean, which is exact
      and so has no small-sample bias.
    * *Drift and launches*: the variogram of the launches' log rates, half the mean squared difference at lags of 1 to
      10 launches, is a straight line for a random walk plus independent noise (Matheron, "Principles of geostatistics",
      Economic Geology 58, 1963). Its slope is half the variance of the drift. Its value at lag 0 (the nugget), minus
      the part explained by the windows, is the variance of the launches.

    Raises:
        SystemExit: fewer launches than lags, or none with three windows.
    """
    if len(launches) <= LAGS:
        raise SystemExit(f"{len(launches)} launches are too few to fit a noise to; more than {LAGS} are needed")
    residuals = [_about_mean([math.log(m / s) for _, m, s in one.windows]) for one in launches]
    long = [r for r in residuals if len(r) >= 3]
    if not long:
        raise SystemExit("no launch has three windows")
    correlation, window_sd = _windows(long)
    logs = [math.log(one.rate_per_s) for one in launches]
    slope, nugget = _line(range(1, LAGS + 1), [_semivariance(logs, lag) for lag in range(1, LAGS + 1)])
    if slope < 0:
        slope, nugget = 0.0, mean(_semivariance(logs, lag) for lag in range(1, LAGS + 1))
    explained = mean(window_sd**2 * _sum(len(r), correlation) / len(r) ** 2 for r in residuals)
    return Noise(
        rate_per_s=math.exp(median(logs)),
        between_sd=math.sqrt(max(0.0, nugget - explained)),
        drift_sd=math.sqrt(2 * slope),
        window_sd=window_sd,
        correlation=correlation,
        launch_tails=_standard(_about_neighbours(logs)),
        window_tails=_standard([e for r in long for e in r]),
        windows=tuple(len(one.windows) for one in launches),
        steps=round(median(n for one in launches for n, _, _ in one.windows)),
        samples=round(median(m for one in launches for _, m, _ in one.windows)),
    )


def simulate(noise: Noise, count: int, rng: random.Random, *, recorded_tails: bool) -> list[stats.Rate]:
    """Simulate the rates of ``count`` consecutive launches, computed by autotune's own formula from simulated windows.

    Args:
        recorded_tails: draw from the recorded residuals instead of a normal distribution.
    """

    def draw(tails: Sequence[float]) -> float:
        return rng.choice(tails) if recorded_tails else rng.gauss(0, 1)

    found = []
    drift = 0.0
    fresh = math.sqrt(1 - noise.correlation**2)
    for _ in range(count):
        drift += noise.drift_sd * rng.gauss(0, 1)
        launch = noise.between_sd * draw(noise.launch_tails)
        about = draw(noise.window_tails)
        windows = []
        for _ in range(rng.choice(noise.windows)):
            per_s = noise.rate_per_s * math.exp(drift + launch + noise.window_sd * about)
            windows.append(Window(steps=noise.steps, samples=noise.samples, seconds=noise.samples / per_s))
            about = noise.correlation * about + fresh * draw(noise.window_tails)
        found.append(stats.rate_of(windows))
    return found


def _about_mean(values: Sequence[float]) -> list[float]:
    centre = mean(values)
    return [v - centre for v in values]


def _about_neighbours(values: Sequence[float]) -> list[float]:
    half = NEIGHBOURHOOD // 2
    return [v - median(values[max(0, i - half) : i + half + 1]) for i, v in enumerate(values)]


def _standard(values: Sequence[float]) -> tuple[float, ...]:
    sd = pstdev(values)
    centre = mean(values)
    return tuple((v - centre) / sd for v in values) if sd else (0.0,)


def _semivariance(values: Sequence[float], lag: int) -> float:
    return mean((b - a) ** 2 for a, b in zip(values, values[lag:], strict=False)) / 2


def _line(x: Sequence[int], y: Sequence[float]) -> tuple[float, float]:
    """Return slope and value at 0 of the least-squares line."""
    mx, my = mean(x), mean(y)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)
    return slope, my - slope * mx


def _windows(residuals: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return lag-1 correlation and standard deviation of the windows, from residuals around each launch's mean."""
    squares = sum(e * e for r in residuals for e in r)
    products = sum(a * b for r in residuals for a, b in pairwise(r))
    counts = [len(r) for r in residuals]

    def expected(correlation: float) -> tuple[float, float]:
        each = [_moments(n, correlation) for n in counts]
        return sum(s for s, _ in each), sum(p for _, p in each)

    low, high = -0.5, 0.95
    for _ in range(40):
        middle = (low + high) / 2
        square, product = expected(middle)
        low, high = (middle, high) if product / square < products / squares else (low, middle)
    return low, math.sqrt(squares / expected(low)[0])


def _moments(n: int, correlation: float) -> tuple[float, float]:
    """Return the expected sums of squares and of products of neighbours of ``n`` values of an AR(1) process of variance
    1 around their mean."""
    rows = [sum(correlation ** abs(i - j) for j in range(n)) for i in range(n)]
    total = sum(rows)
    products = sum(correlation - (a + b) / n + total / n**2 for a, b in pairwise(rows))
    return n - total / n, products


def _sum(n: int, correlation: float) -> float:
    """Return the variance of the sum of ``n`` values of an AR(1) process of variance 1."""
    return sum(correlation ** abs(i - j) for i in range(n) for j in range(n))
