"""When a launch that is under way is surely too slow."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.records import MeasurePlan, Window
from autotune.stats.rate import rate_of

#: With fewer windows than this an interval says nothing, so slow steps get more time than planned.
FEWEST_WINDOWS = 3
#: A launch whose fastest step is below this fraction of what it is to be pruned at gets no second window.
HOPELESS = 0.5


def surely_slow(plan: MeasurePlan, kept: Sequence[Window], taken: int, fastest_per_s: float, elapsed_s: float) -> bool:
    """Whether a launch ends as pruned now: its 95 % interval lies below the plan's threshold.

    Args:
        kept: windows that count, in order. taken: how many windows there were, those cut from the front included.
        fastest_per_s: samples per second of the first window's fastest step: one long recompilation must not count as
            the rate.
        elapsed_s: since the first window began.
    """
    below = plan.prune_below_per_s
    if below <= 0 or not taken:
        return False
    # Steps so slow that there is time for only two windows are judged by these.
    enough = FEWEST_WINDOWS if elapsed_s < plan.max_measure_s else 2
    if len(kept) >= enough and rate_of(kept).high_per_s < below:
        return True
    return taken == 1 and fastest_per_s < HOPELESS * below
