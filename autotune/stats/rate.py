"""Rates and their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import NormalDist, fmean, median

import numpy as np
import numpy.typing as npt

from autotune.base.records import MeasurePlan, Window

Array = npt.NDArray[np.float64]

# Quantiles of Student's t distribution.

#: Nodes of the Gauss-Legendre quadrature of `t_of_largest`, which is then exact to four digits.
_NODES = 64


def t_quantile(degrees: float, probability: float = 0.975) -> float:
    """Return a quantile of Student's t distribution.

    Args:
        degrees: degrees of freedom, at least 1; fractional ones come from Satterthwaite's formula, infinite ones mean
            that the standard error is known.
        probability: in (0.5, 1).
    """
    # A tenth of a second to import, which the command line's help does not wait for.
    from scipy.special import stdtrit

    return NormalDist().inv_cdf(probability) if math.isinf(degrees) else float(stdtrit(degrees, probability))


@lru_cache(maxsize=1024)
def t_of_largest(degrees: float, count: int, *, shared: bool = True) -> float:
    """Return what the largest of several Student's t stays below in magnitude, in 19 of 20 cases.

    The errors are normal with equal variances, and however they are correlated, the result is large enough (Šidák,
    "Rectangular confidence regions for the means of multivariate normal distributions", JASA 62, 1967). If they share
    one estimate of their standard deviation, as ratios do whose noise is pooled, it is the studentized maximum modulus
    (Stoline & Ury, "Tables of the studentized maximum modulus distribution", Technometrics 21, 1979), which with few
    degrees of freedom is much smaller than what Bonferroni's inequality demands.

    Args:
        degrees: see `t_quantile`. count: number of estimates. shared: whether they share their standard deviation.
    """
    each = (1 + 0.95 ** (1 / max(1, count))) / 2
    if count <= 1 or not shared or math.isinf(degrees):
        return t_quantile(degrees, each)
    from scipy.special import gammaincinv, ndtr

    nodes, weights = _legendre()
    # Relative to the true standard deviation, the estimated one is the root of a chi-squared variable over its degrees.
    sds = np.sqrt(gammaincinv(degrees / 2, nodes) * 2 / degrees)
    low, high = t_quantile(degrees), t_quantile(degrees, each)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        is_too_small = float(((2 * ndtr(middle * sds) - 1) ** count) @ weights) < 0.95
        low, high = (middle, high) if is_too_small else (low, middle)
    return high


@lru_cache(maxsize=1)
def _legendre() -> tuple[Array, Array]:
    """Return nodes and weights of a Gauss-Legendre quadrature from 0 to 1."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return (nodes + 1) / 2, weights / 2


# The rate of one launch, with an interval, from its windows.

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
        least, most: between which standard deviations lie on machines of this kind, as far as has been seen.
        straggles: whether now and then a launch is much slower than its equals on such machines.
    """

    sd: float
    degrees: float
    learnt: bool
    least: float = 0.0
    most: float = math.inf
    straggles: bool = False


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


# Finds where the steady state begins in a series of step times, and how uneven it is.

#: With fewer steps, only the scatter is visible.
LEAST_STEPS = 10
#: White's batch size; batches get smaller if there would be fewer than `_BATCHES` of them.
_BATCH = 5
_BATCHES = 15
#: Never cut within the last batches: the fewer remain, the more likely they agree by chance.
_NEVER_CUT = 5
#: A step longer than this many standard deviations above the median is an incident, not part of a trend.
_INCIDENT = 3.0
#: The median of the square of a standard normal variable.
_MEDIAN_CHI2 = 0.4549
#: Steps are uneven that scatter by this part of their mean; and even in runs that scatter by one of these parts of
#: that, and by no more than this part of their mean. As many runs are to be seen. Of long series the last steps are
#: looked at.
UNEVEN, EVENED, FEWEST_RUNS = 0.25, ((0.1, 0.1), (0.25, 0.15)), 4
_INCIDENTS, _SEEN = 2, 1024
#: Where none are even, steps that take so many times as long as usual come too rarely, if they take this part of the
#: time. Others are of all lengths, as sentences are: turns of many steps are fair enough.
LONG_STEP, RARE = 5.0, 0.1


@dataclass(frozen=True)
class Settling:
    """The point at which a series of step times settled.

    Attributes:
        steps: number of steps to cut from the front.
        settled: False if the series still changes towards its end, or is too short to tell.
    """

    steps: int
    settled: bool


def settled_at(step_s: Sequence[float]) -> Settling:
    """Find the end of the initial transient in a series of step times.

    Uses MSER-5 on means of five steps each: cut where the standard error of the mean of the remainder, computed as if
    it were independent, is smallest. If that point is in the second half, the series is too short for its transient
    (K. P. White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69, 1997).
    The last batches are excluded (Hoad, Robinson & Davies, "Automating warm-up length estimation", JORS 61, 2010).
    Series shorter than 75 steps use smaller batches, down to single steps below 30.

    Plain MSER is misled by a single slow step, and by a few last batches that agree by chance (in a quarter of
    stationary series of 50 steps). Therefore incidents are Winsorised to `_INCIDENT` standard deviations, except at
    the start of the series; and no tail counts as quieter than the noise from batch to batch, estimated as half the
    median squared difference of neighbours (after von Neumann, Kent, Bellinson & Hart, "The mean square successive
    difference", Ann. Math. Stat. 12, 1941).

    Args:
        step_s: seconds of each step, in order. With fewer than `LEAST_STEPS`, nothing is cut and the series does not
            count as settled.
    """
    if len(step_s) < LEAST_STEPS:
        return Settling(0, False)
    size = min(_BATCH, max(1, len(step_s) // _BATCHES))
    count = len(step_s) // size
    tame = _without_incidents(step_s)
    means = [sum(tame[i * size : (i + 1) * size]) / size for i in range(count)]
    noise = median((b - a) ** 2 for a, b in pairwise(means)) / 2 / _MEDIAN_CHI2
    kept = range(min(_NEVER_CUT, count // 4) + 1, count + 1)
    best, cut = float("inf"), 0
    middle, total, squares = means[-1], 0.0, 0.0
    for left, value in enumerate(reversed(means), start=1):
        # Centre the sums on a typical value: with squares of raw seconds, small differences would be lost to rounding.
        total += value - middle
        squares += (value - middle) ** 2
        if left in kept:
            scatter = max(squares - total**2 / left, 0.0) / left
            error = max(scatter, noise) / left
            if error <= best:
                best, cut = error, count - left
    return Settling(cut * size, cut <= count / 2)


def _without_incidents(step_s: Sequence[float]) -> list[float]:
    middle = median(step_s)
    limit = middle + _INCIDENT * MAD_TO_SD * median(abs(s - middle) for s in step_s)
    begun = next(i for i, s in enumerate(step_s) if s <= limit)
    return [s if i < begun else min(s, limit) for i, s in enumerate(step_s)]


def even_after(seconds: Sequence[float]) -> int | None:
    """Return how many steps in a row take about as long as any others of as many; ``None`` if none that are seen do.

    A rollout, an evaluation or an accumulation every so many steps makes single steps uneven, and turns of too few of
    them unfair: whoever has the long step loses. The means of all runs of a length are compared, and the first length
    is returned at which they scatter by no more than a part of what single steps do. That is a period, where there is
    one. Steps that differ by little are even as they are: that is noise, for which there are rounds.

    Args:
        seconds: of each step, in order.
    """
    # Two that were disturbed are no pattern.
    usual = sorted(seconds)[:-_INCIDENTS]
    if len(usual) < FEWEST_RUNS or _scatter(usual, 1) < UNEVEN:
        return 1
    recent = seconds[-_SEEN:]
    single = _scatter(recent, 1)
    scatters = [_scatter(recent, n) for n in range(2, len(recent) // FEWEST_RUNS + 1)]
    # A period first; without one, some that are long enough.
    for part, most in EVENED:
        first = next((n for n, scatter in enumerate(scatters) if scatter <= min(most, part * single)), None)
        if first is not None:
            # A little less than a period may do; the period is better.
            near = range(first, min(len(scatters), first + 2 + first // 4))
            return 2 + min(near, key=lambda n: scatters[n])
    long = LONG_STEP * sorted(recent)[len(recent) // 2]
    rare = sum(one for one in recent if one > long) > RARE * sum(recent)
    return None if rare else max(1, len(recent) // FEWEST_RUNS)


def _scatter(seconds: Sequence[float], length: int) -> float:
    """Return the standard deviation of the means of all runs of a length, relative to the mean."""
    sums = [0.0, *accumulate(seconds)]
    means = [(sums[i + length] - sums[i]) / length for i in range(len(seconds) - length + 1)]
    usual = fmean(means)
    return math.sqrt(fmean((mean - usual) ** 2 for mean in means)) / usual if usual > 0 else 0.0


# Decides when a running launch is certainly too slow.

#: With fewer windows an interval is meaningless, so slow steps get more time than planned.
FEWEST_WINDOWS = 3
#: A launch whose fastest step is below this fraction of the pruning threshold gets no second window.
HOPELESS = 0.5


def surely_slow(
    plan: MeasurePlan,
    kept: Sequence[Window],
    taken: int,
    fastest_per_s: float,
    elapsed_s: float,
    *,
    below_per_s: float,
) -> bool:
    """Return whether to prune a launch now, because its 95 % interval lies below a threshold.

    Args:
        kept: windows that count, in order. taken: number of windows so far, including those cut from the front.
        fastest_per_s: samples per second of the first window's fastest step, so that one long recompilation does not
            count as the rate.
        elapsed_s: seconds since the first window began. below_per_s: the threshold in samples per second.
    """
    if below_per_s <= 0 or not taken:
        return False
    # If steps are so slow that there is time for only two windows, those two decide.
    enough = FEWEST_WINDOWS if elapsed_s < plan.max_measure_s else 2
    if len(kept) >= enough and rate_of(kept).high_per_s < below_per_s:
        return True
    return taken == 1 and fastest_per_s < HOPELESS * below_per_s


# Whether another round of a comparison is worth its seconds.

#: Draws from what more rounds may show, always the same ones.
_DRAWS = 1000
#: How many more rounds are looked at together. A single one may be worth nothing although several are worth much
#: (Frazier & Powell, "Paradoxes in learning and the marginal value of information", Decision Analysis 7, 2010).
_AHEAD = 1, 2, 4, 8


def gain_per_round(effects: Sequence[float], rounds: int, noise_sd: float) -> float:
    """Return by how much each of the next rounds is expected to improve the best contender, at most.

    The one that leads is chosen, now or after the rounds; they may show that another one is better. This is the
    knowledge gradient of a batch of observations, here of one of each contender (Frazier, Powell & Dayanik, "A
    knowledge-gradient policy for sequential information collection", SIAM J. Control Optim. 47, 2008), if nothing is
    known of the contenders but what the rounds showed.

    Args:
        effects: of the contenders that are still compared, in natural logarithms.
        rounds: number of rounds so far, at least one.
        noise_sd: of one turn, in natural logarithms.

    Returns:
        Improvement in natural logarithms per round, for the number of rounds for which it is largest.
    """
    if len(effects) < 2:
        return 0.0
    means = np.asarray(effects, dtype=np.float64)
    draws = np.random.default_rng(0).standard_normal((_DRAWS, len(means)))
    # Means of few draws are not quite 0, and a leader would seem to gain by itself.
    draws -= draws.mean(axis=0)
    found = []
    for ahead in _AHEAD:
        moved = noise_sd * math.sqrt(1 / rounds - 1 / (rounds + ahead))
        found.append(float((means + moved * draws).max(axis=1).mean() - means.max()) / ahead)
    return max(0.0, *found)
