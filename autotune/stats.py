"""Numbers from step times: rates, intervals, comparisons. Pure functions, no clock, no torch.

The formulas:

* *Batch means*: steps are grouped into windows and the windows' rates are treated as independent samples
  (Law & Kelton, Simulation Modeling and Analysis, "the method of batch means"). Grouping absorbs most of
  the correlation between neighbouring steps.
* *Ratio estimator*: a rate is total samples over total seconds, never the mean of rates, so that a slow
  window weighs by its duration (Cochran, Sampling Techniques, ch. 6); its standard error is that of the
  linearised residuals ``samples_i - rate * seconds_i``.
* *Student's t* for the half-width with few windows. Quantiles by Hill's expansion (G. W. Hill, "Algorithm 396",
  CACM 13, 1970), exact for one and two degrees of freedom, within 1e-4 above.
* *Several launches* are averaged, and compared, on the logarithm of the rate: see `launch_noise`, `speedup`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean

from autotune.records import Window


@dataclass(frozen=True)
class Rate:
    """A rate in samples per second with its 95 % interval.

    Attributes:
        per_s: the estimate.
        low_per_s, high_per_s: the interval's ends. From a single window nothing is known about the scatter,
            and the interval is the estimate ± itself.
    """

    per_s: float
    low_per_s: float
    high_per_s: float

    @property
    def halfwidth(self) -> float:
        """Half the interval as a fraction of the estimate."""
        return (self.high_per_s - self.low_per_s) / 2 / self.per_s


def t_quantile(degrees: int, probability: float = 0.975) -> float:
    """The quantile of Student's t distribution (Hill 1970).

    Args:
        degrees: degrees of freedom, at least 1.
        probability: in (0.5, 1).
    """
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    tail = 2 * (1 - probability)
    if degrees == 2:
        return math.sqrt(2 / (tail * (2 - tail)) - 2)
    a = 1 / (degrees - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * degrees
    x = d * tail
    y = x ** (2 / degrees)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(tail / 2)
        y = x * x
        if degrees < 5:
            c += 0.3 * (degrees - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = (
            (1 / (((degrees + 6) / (degrees * y) - 0.089 * d - 0.822) * (degrees + 2) * 3) + 0.5 / (degrees + 4)) * y
            - 1
        ) * (degrees + 1) / (degrees + 2) + 1 / y
    return math.sqrt(degrees * y)


def rate_of(windows: Sequence[Window]) -> Rate:
    """The rate over the windows with its 95 % interval (ratio estimator, batch means).

    Raises:
        ValueError: no window, or one without duration.
    """
    if not windows or any(w.seconds <= 0 for w in windows):
        raise ValueError("a rate needs at least one window of positive duration")
    samples = sum(w.samples for w in windows)
    seconds = sum(w.seconds for w in windows)
    rate = samples / seconds
    n = len(windows)
    if n == 1:
        return Rate(rate, 0.0, 2 * rate)
    residuals = [w.samples - rate * w.seconds for w in windows]
    variance = sum(r * r for r in residuals) / (n - 1)
    half = t_quantile(n - 1) * math.sqrt(variance / n) / (seconds / n)
    return Rate(rate, max(0.0, rate - half), rate + half)


def with_epoch_turn(rate: Rate, turn_s: float | None, epoch_samples: int) -> Rate:
    """The rate of whole epochs: ``epoch_samples`` at ``rate``, then ``turn_s`` seconds of nothing."""
    if not turn_s or turn_s <= 0:
        return rate

    def whole(per_s: float) -> float:
        return 0.0 if per_s == 0 else epoch_samples / (epoch_samples / per_s + turn_s)

    return Rate(whole(rate.per_s), whole(rate.low_per_s), whole(rate.high_per_s))


@dataclass(frozen=True)
class LaunchNoise:
    """How much launches of one configuration differ from each other.

    Attributes:
        sd: standard deviation of the logarithm of the rate. degrees: degrees of freedom of that estimate.
    """

    sd: float
    degrees: int


def launch_noise(groups: Sequence[Sequence[float]]) -> LaunchNoise | None:
    """The between-launch noise, pooled over configurations that were launched several times.

    The pooled within-group variance of a one-way layout (Snedecor & Cochran, Statistical Methods, ch. 12), on the
    logarithm because launches differ by percentages. ``None`` when nothing was launched twice.

    Args:
        groups: per configuration, the rates of its launches.
    """
    squares, degrees = 0.0, 0
    for rates in groups:
        logs = [math.log(r) for r in rates]
        centre = mean(logs)
        squares += sum((x - centre) ** 2 for x in logs)
        degrees += len(logs) - 1
    return LaunchNoise(math.sqrt(squares / degrees), degrees) if degrees else None


def mean_rate(rates: Sequence[Rate], noise: LaunchNoise | None) -> Rate:
    """One rate from several launches of one configuration: their geometric mean with its 95 % interval.

    The interval is the wider of what the launches' scatter and what their own windows say; with a single launch
    and no noise known it is that launch's own.

    Raises:
        ValueError: no launch.
    """
    if not rates:
        raise ValueError("no launch to average")
    centre = math.exp(mean(math.log(r.per_s) for r in rates))
    within = math.sqrt(sum(r.halfwidth**2 for r in rates)) / len(rates)
    between = t_quantile(noise.degrees) * noise.sd / math.sqrt(len(rates)) if noise else 0.0
    half = max(within, between)
    return Rate(centre, centre * math.exp(-half), centre * math.exp(half))


def speedup(candidate: Rate, baseline: Rate) -> tuple[float, float, float]:
    """``(ratio, low, high)`` of two independent rates, 95 %: half-widths add in squares (delta method)."""
    ratio = candidate.per_s / baseline.per_s
    spread = math.hypot(candidate.halfwidth, baseline.halfwidth)
    return ratio, ratio * math.exp(-spread), ratio * math.exp(spread)
