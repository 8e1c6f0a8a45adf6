"""Decides when a running launch is certainly too slow."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.base.records import MeasurePlan, Window
from autotune.stats.rate import rate_of

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
