"""Statistics over several launches: how much they differ, their mean, and whether one configuration beats another.

All computed on the logarithm of the rate, because launches differ by percentages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean

from autotune.stats.rate import LaunchNoise, Rate
from autotune.stats.student import t_quantile

#: Assumed until a study has repeats of its own. Launches of one training on shared CPU cores differ by 3 to 5 %. On
#: one H200 they differ by 0.05 %, but the card drifts by 0.25 % within minutes, which affects launches that are not
#: interleaved. Eight degrees of freedom, because the figures come from other machines.
PRIORS = {"cpu": LaunchNoise(0.05, 8, False), "cuda": LaunchNoise(0.003, 8, False)}
#: See `outdone`.
MUCH_LARGER = 2.0
#: With fewer degrees of freedom a standard deviation is too uncertain (one degree has a t of 12.7).
LEAST_DEGREES = 2
#: Clocks whose ratio differs from 1 by less than this count as equal.
CLOCKS_AGREE = 0.01
#: Half-widths of logarithms beyond this, a factor of 10**100, say no more, and their exponential may not be a float.
_WIDEST = 230.0


def launch_noise(groups: Sequence[Sequence[Rate]], *, prior: LaunchNoise) -> LaunchNoise:
    """Return the total noise of one launch, pooled over configurations that were launched several times.

    The pooled within-group variance of a one-way layout (Snedecor & Cochran, Statistical Methods, ch. 12).

    Args:
        groups: for each configuration, the rates of its launches.
        prior: returned if the groups have fewer than two degrees of freedom.
    """
    squares, degrees = within([[r.per_s for r in rates] for rates in groups])
    return LaunchNoise(math.sqrt(squares / degrees), degrees, True) if degrees >= LEAST_DEGREES else prior


def within(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return ``(sum of squares, degrees of freedom)`` of the logarithms about their group means; skips empty groups."""
    squares, degrees = 0.0, 0
    for rates in groups:
        if rates:
            logs = [math.log(r) for r in rates]
            centre = fmean(logs)
            squares += sum((x - centre) ** 2 for x in logs)
            degrees += len(logs) - 1
    return squares, degrees


def launch_rate(rate: Rate, noise: LaunchNoise) -> Rate:
    """Return one launch's rate with an interval that includes launch noise: `mean_rate` of a single launch."""
    return mean_rate([rate], noise)


def mean_rate(rates: Sequence[Rate], noise: LaunchNoise) -> Rate:
    """Return the geometric mean of several launches of one configuration, with its 95 % interval.

    The standard error is ``noise.sd / sqrt(launches)``. If the launches' own windows give a larger one (see `outdone`),
    that is used instead: the root of the sum of squares, with degrees of freedom by Satterthwaite's formula ("An
    approximate distribution of estimates of variance components", Biometrics Bulletin 2, 1946).

    Raises:
        ValueError: no launch.
    """
    if not rates:
        raise ValueError("no launch to average")
    centre = math.exp(fmean(math.log(r.per_s) for r in rates))
    own = [_own(r) for r in rates]
    own_se = math.sqrt(sum(se**2 for se, _ in own)) / len(rates)
    se = noise.sd / math.sqrt(len(rates))
    if outdone(noise, own_se * math.sqrt(len(rates))):
        return _with_interval(centre, own_se, satterthwaite(own), None)
    return _with_interval(centre, se, noise.degrees, noise)


def outdone(noise: LaunchNoise, own_se: float) -> bool:
    """Return whether a launch's own windows give a larger standard error than the launch noise does.

    Noise learnt from repeats already includes that of the windows, whose estimate sometimes exceeds it by chance.
    Taking the larger of two estimates of the same quantity makes intervals too wide (97 to 98 % coverage in
    simulation). So the windows' estimate must be much larger, as for a launch that was shorter than the repeats. An
    assumed noise includes nothing of this launch, so any larger estimate replaces it.
    """
    return own_se > (MUCH_LARGER if noise.learnt else 1.0) * noise.sd


def speedup(candidate: Rate, baseline: Rate) -> tuple[float, float, float]:
    """Return ``(ratio, low, high)`` of two rates with independent errors, 95 %.

    The standard errors of the logarithms add in quadrature. The degrees of freedom are Welch's ("The significance of
    the difference between two means when the population variances are unequal", Biometrika 29, 1938), or those of the
    launch noise if both rates rest on the same noise, because it was estimated once. If one of the rates has no
    standard error, half-widths add in quadrature.
    """
    ratio = candidate.per_s / baseline.per_s
    spread = math.hypot(candidate.halfwidth, baseline.halfwidth)
    if None not in (candidate.relative_se, candidate.degrees, baseline.relative_se, baseline.degrees):
        both = [_own(candidate), _own(baseline)]
        shared = candidate.noise if candidate.noise == baseline.noise else None
        degrees = shared.degrees if shared else satterthwaite(both)
        spread = t_quantile(degrees) * math.hypot(both[0][0], both[1][0])
    return (ratio, *interval_of(ratio, spread))


def clocks_allow(clock_mhz: float | None, reference_mhz: float | None) -> float:
    """Return the least fraction of a rate seen at another clock that a rate must reach, not to be certainly lower.

    At equal clocks the first may be as many times as fast as its clock was lower; see `at_equal_clocks`. 1 if its clock
    was not lower, by more than `CLOCKS_AGREE`, or if one of them is unknown.
    """
    if clock_mhz is None or reference_mhz is None or reference_mhz <= clock_mhz * (1 + CLOCKS_AGREE):
        return 1.0
    return clock_mhz / reference_mhz


def rounds_to_show(gain: float, noise: LaunchNoise, *, among: int = 1, least: int = 2, most: int = 12) -> int:
    """Return in how many rounds of launches in turns a gain is likely to be shown: until the half-width of the ratio's
    logarithm is less. The half-width is Student's, with Bonferroni's inequality if one of several is chosen.

    Args:
        gain: natural logarithm of the ratio that is expected. among: from how many it was chosen.
        least, most: the result is at least, and at most this.
    """
    surest = t_quantile(max(1.0, noise.degrees), 1 - 0.025 / max(1, among)) * noise.sd
    return next((n for n in range(least, most) if surest * math.sqrt(2 / n) < gain), most)


def at_equal_clocks(ratio: tuple[float, float, float], clocks: float) -> tuple[float, float, float]:
    """Return ``(ratio, low, high)`` of two rates with the uncertainty of clocks that were not the same.

    A rate may follow the clock entirely, or not at all if memory or the loader limits it. So the ratio at equal clocks
    lies between the measured one and that divided by the clocks' ratio, and the interval is extended on that side.

    Args:
        clocks: the mean clock of the first divided by that of the second. If both agree within `CLOCKS_AGREE`, the
            interval is returned as it is.
    """
    middle, low, high = ratio
    if abs(math.log(clocks)) <= math.log1p(CLOCKS_AGREE):
        return ratio
    return middle, low / max(1.0, clocks), high / min(1.0, clocks)


def interval_of(value: float, halfwidth: float) -> tuple[float, float]:
    """Return the interval ``(low, high)`` of a value whose logarithm has this half-width."""
    factor = math.exp(min(halfwidth, _WIDEST))
    return value / factor, value * factor


def satterthwaite(parts: Sequence[tuple[float, float]]) -> float:
    """Return the degrees of freedom of a sum of independent estimates.

    Args:
        parts: ``(standard error, its degrees of freedom)`` of each estimate.
    """
    fourth = sum(se**4 / degrees for se, degrees in parts)
    return sum(se**2 for se, _ in parts) ** 2 / fourth if fourth > 0 else math.inf


def _own(rate: Rate) -> tuple[float, float]:
    """Return the standard error of a rate's logarithm and its degrees of freedom. If only the interval is known, it is
    taken as a normal distribution's."""
    if rate.relative_se is None or rate.degrees is None:
        return rate.halfwidth / NormalDist().inv_cdf(0.975), math.inf
    return rate.relative_se, rate.degrees


def _with_interval(per_s: float, se: float, degrees: float, noise: LaunchNoise | None) -> Rate:
    return Rate(per_s, *interval_of(per_s, t_quantile(degrees) * se), se, degrees, noise)
