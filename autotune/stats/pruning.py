"""Decides when a running launch is certainly too slow."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.records import MeasurePlan, Window
from autotune.stats.launches import clock_mhz, clocks_allow
from autotune.stats.rate import rate_of

#: With fewer windows an interval is meaningless, so slow steps get more time than planned.
FEWEST_WINDOWS = 3
#: A launch whose fastest step is below this fraction of the pruning threshold gets no second window.
HOPELESS = 0.5


def surely_slow(plan: MeasurePlan, kept: Sequence[Window], taken: int, fastest_per_s: float, elapsed_s: float) -> bool:
    """Return whether to prune a launch now, because its 95 % interval lies below the plan's threshold.

    Args:
        kept: windows that count, in order. taken: number of windows so far, including those cut from the front.
        fastest_per_s: samples per second of the first window's fastest step, so that one long recompilation does not
            count as the rate.
        elapsed_s: seconds since the first window began.
    """
    below = plan.prune_below_per_s * clocks_allow(clock_mhz(kept), plan.prune_clock_mhz)
    if below <= 0 or not taken:
        return False
    # If steps are so slow that there is time for only two windows, those two decide.
    enough = FEWEST_WINDOWS if elapsed_s < plan.max_measure_s else 2
    if len(kept) >= enough and rate_of(kept).high_per_s < below:
        return True
    return taken == 1 and fastest_per_s < HOPELESS * below
