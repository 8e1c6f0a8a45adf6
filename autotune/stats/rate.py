"""The rate of one launch, with an interval, from its windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from autotune.base.records import Window
from autotune.stats.student import t_quantile

#: Windows further than this many standard deviations from the centre are down-weighted.
HUBER_K = 2.0
#: With fewer windows, neither outliers nor correlation can be identified.
LEAST_WINDOWS = 5
LARGEST_CORRELATION = 0.9
#: Factors that turn a median absolute deviation into a standard deviation for normal residuals: asymptotic, and for
#: small n (Croux & Rousseeuw, "Time-efficient algorithms for two highly robust estimators of scale", COMPSTAT 1992).
MAD_TO_SD = 1.4826
_MAD_SMALL = {5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
#: Relative differences below this are rounding errors.
_ROUNDING = 1e-9
_MAX_ITERATIONS = 100


@dataclass(frozen=True)
class LaunchNoise:
    """The variation in rate from one launch to the next of the same configuration.

    This is the total noise, within a launch and between launches, because repeats show both together.

    Attributes:
        sd: standard deviation of the logarithm of one launch's rate. degrees: degrees of freedom of that estimate.
        learnt: estimated from repeats; otherwise assumed.
    """

    sd: float
    degrees: float
    learnt: bool


@dataclass(frozen=True)
class Rate:
    """A rate in samples per second with its 95 % interval.

    Attributes:
        per_s: the estimate.
        low_per_s, high_per_s: the interval's ends. A single window does not reveal the scatter, so its interval is the
            estimate ± itself.
        relative_se: standard error of the rate's logarithm, with `degrees` of freedom; both ``None`` if only the
            interval is known.
        noise: the launch noise that `relative_se` is based on, if any. Two rates based on the same noise share one
            estimate of their error.
    """

    per_s: float
    low_per_s: float
    high_per_s: float
    relative_se: float | None = None
    degrees: float | None = None
    noise: LaunchNoise | None = None

    @property
    def halfwidth(self) -> float:
        """Half the interval's width, as a fraction of the estimate."""
        return (self.high_per_s - self.low_per_s) / 2 / self.per_s


def rate_of(windows: Sequence[Window]) -> Rate:
    """Return the rate over the windows, in the order they were taken, with its 95 % interval. No window is discarded.

    * *Ratio estimator* (Cochran, Sampling Techniques, ch. 6): total samples over total seconds, never the mean of
      rates, so that a window is weighted by its size. The standard error is that of the residuals.
    * *Robust centre* (Huber, "Robust estimation of a location parameter", Ann. Math. Stat. 35, 1964): windows whose
      duration is out of line with their samples are down-weighted. Without such windows this is exactly total over
      total. The standard error is the M-estimator's (Huber & Ronchetti, Robust Statistics, 2009, ch. 6).
    * *Batch means* (Law & Kelton, Simulation Modeling and Analysis): a window averages over many steps. The remaining
      correlation r between neighbours, modelled as an AR(1) process, inflates the variance by ``(1 + r) / (1 - r)``
      and reduces the effective number of windows by the same factor (Bayley & Hammersley, "The 'effective' number of
      independent observations in an autocorrelated time series", Suppl. JRSS 8, 1946).
    * *Student's t* with the effective number of windows minus one as degrees of freedom, but at least two for three
      or more windows: even highly correlated windows say more about the scatter than two windows do.

    The coverage is 95 % for independent windows. Few windows reveal a correlation poorly: with r = 0.5, coverage is
    88 % for five windows, 91 % for twenty and 94 % for forty. If the windows' distribution is skewed (most are fast,
    some slow), the robust centre is that of the majority, up to a tenth of a window's standard deviation above total
    over total.

    Raises:
        ValueError: no window, or one without samples or duration.
    """
    if not windows or any(w.seconds <= 0 or w.samples <= 0 for w in windows):
        raise ValueError("a rate needs windows, each with samples and a positive duration")
    fit = _fit(windows)
    if len(windows) == 1:
        return Rate(fit.per_s, 0.0, 2 * fit.per_s)
    r = _correlation(fit.residuals) or 0.0
    inflation = (1 + r) / (1 - r)
    se = fit.relative_se * math.sqrt(inflation)
    degrees = max(min(2.0, len(windows) - 1), len(windows) / inflation - 1)
    half = t_quantile(degrees) * se
    return Rate(fit.per_s, fit.per_s * max(0.0, 1 - half), fit.per_s * (1 + half), se, degrees)


def autocorrelation(windows: Sequence[Window]) -> float | None:
    """Return the correlation between neighbouring windows that `rate_of` uses, 0 to 0.9; ``None`` for too few windows.

    The lag-1 autocorrelation of the residuals, corrected for its small-sample bias ``-(1 + 3 r) / n`` (Kendall, "Note
    on bias in the estimation of autocorrelation"; Marriott & Pope, "Bias in the estimation of autocorrelations";
    Biometrika 41, 1954). A negative value counts as zero, because it would narrow the interval on weak evidence, and
    n windows never count as fewer than two. The windows are those of `rate_of`.
    """
    return _correlation(_fit(windows).residuals)


def with_epoch_turn(rate: Rate, turn_s: float | None, epoch_samples: int) -> Rate:
    """Return the rate over whole epochs: ``epoch_samples`` at ``rate``, then ``turn_s`` idle seconds.

    The turn is assumed exact, so the relative error shrinks by the turn's share of the epoch.
    """
    if not turn_s or turn_s <= 0:
        return rate

    def whole(per_s: float) -> float:
        return 0.0 if per_s == 0 else epoch_samples / (epoch_samples / per_s + turn_s)

    per_s = whole(rate.per_s)
    se = None if rate.relative_se is None else rate.relative_se * per_s / rate.per_s
    return Rate(per_s, whole(rate.low_per_s), whole(rate.high_per_s), se, rate.degrees)


@dataclass(frozen=True)
class _Fit:
    """A rate fitted to windows, and each window's weighted residual in units of equal variance."""

    per_s: float
    relative_se: float
    residuals: list[float]


def _fit(windows: Sequence[Window]) -> _Fit:
    """Compute the M-estimate of the ratio by iterative reweighting.

    A residual is a window's seconds in excess of what its samples take at the rate. Its variance grows with the number
    of samples, as for a sum of independent steps; it is scaled by samples rather than seconds, because a stalled window
    must not gain influence by its own stall.
    """
    n = len(windows)
    root = [math.sqrt(w.samples) for w in windows]
    step_s = median(w.seconds / w.samples for w in windows)
    scale_s = _scale_s(windows, step_s)
    weights = [1.0] * n
    for _ in range(_MAX_ITERATIONS if scale_s else 0):
        excess = [abs(w.seconds - step_s * w.samples) / q for w, q in zip(windows, root, strict=True)]
        weights = [1.0 if e <= HUBER_K * scale_s else HUBER_K * scale_s / e for e in excess]
        previous, step_s = step_s, _seconds_per_sample(windows, weights)
        if abs(step_s - previous) <= 1e-12 * step_s:
            break
    free = sum(w.samples for w, weight in zip(windows, weights, strict=True) if weight == 1.0)
    if 2 * sum(weight == 1.0 for weight in weights) < n:
        # Two clusters rather than a centre with outliers.
        weights, free = [1.0] * n, sum(w.samples for w in windows)
    step_s = _seconds_per_sample(windows, weights)
    left = [weight * _unless_rounding(w, step_s) for w, weight in zip(windows, weights, strict=True)]
    se = math.sqrt(sum(e * e for e in left) * n / (n - 1)) / (step_s * free) if n > 1 else math.inf
    samples = sum(weight * w.samples for w, weight in zip(windows, weights, strict=True))
    seconds = sum(weight * w.seconds for w, weight in zip(windows, weights, strict=True))
    return _Fit(samples / seconds, se, [e / q for e, q in zip(left, root, strict=True)])


def _unless_rounding(window: Window, step_s: float) -> float:
    """Return the window's residual in seconds, or 0 for a rounding error, which could look like a correlation."""
    excess_s = window.seconds - step_s * window.samples
    return 0.0 if abs(excess_s) <= _ROUNDING * window.seconds else excess_s


def _scale_s(windows: Sequence[Window], step_s: float) -> float:
    """Return a robust standard deviation of the residuals about the median window; 0 if it is negligible."""
    n = len(windows)
    if n < LEAST_WINDOWS:
        return 0.0
    mad = median(abs(w.seconds - step_s * w.samples) / math.sqrt(w.samples) for w in windows)
    if mad <= _ROUNDING * median(w.seconds / math.sqrt(w.samples) for w in windows):
        # Most windows are equal, as only synthetic ones are. Any other window would get zero weight.
        return 0.0
    return MAD_TO_SD * _MAD_SMALL.get(n, n / (n - 0.8)) * mad


def _seconds_per_sample(windows: Sequence[Window], weights: Sequence[float]) -> float:
    seconds = sum(weight * w.seconds for w, weight in zip(windows, weights, strict=True))
    return seconds / sum(weight * w.samples for w, weight in zip(windows, weights, strict=True))


def _correlation(residuals: Sequence[float]) -> float | None:
    n = len(residuals)
    if n < LEAST_WINDOWS:
        return None
    square = sum(e * e for e in residuals)
    if square == 0:
        return 0.0
    seen = sum(a * b for a, b in pairwise(residuals)) / square
    return min(max(0.0, (n * seen + 1) / (n - 3)), (n - 2) / (n + 2), LARGEST_CORRELATION)
