"""Finds where the steady state begins in a series of step times, and how uneven it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median

from autotune.stats.rate import MAD_TO_SD

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
