"""Statistics of step times: steady state, rates, intervals, comparisons. Pure functions; no clock, no torch.

From one step to the reported figure:

* `settled_at` finds the end of the warm-up in a series of step times.
* `rate_of` computes a rate from a launch's windows; its interval reflects only that launch.
* `launch_noise` estimates from repeats how much launches differ; `mean_rate` gives intervals that account for it;
  `speedup` compares two rates.
* `surely_slow` decides when a launch can be stopped early.
* `compare_rounds` compares contenders launched in interleaved rounds, where drift cancels; `at_equal_clocks` accounts
  for a card's clocks that differed nevertheless; `gain_per_round` tells whether another round is worthwhile.
* `compare_data` tells whether two loaders deliver the same samples.

Each formula cites its source in its docstring.
"""

from autotune.stats.launches import (
    PRIORS,
    ComparedRounds,
    at_equal_clocks,
    clocks_allow,
    compare_rounds,
    interval_of,
    launch_noise,
    mean_rate,
    outdone,
    ratio_error,
    rounds_to_show,
    satterthwaite,
    speedup,
)
from autotune.stats.rate import (
    FEWEST_WINDOWS,
    LEAST_STEPS,
    LaunchNoise,
    Rate,
    Settling,
    autocorrelation,
    even_after,
    gain_per_round,
    rate_of,
    settled_at,
    surely_slow,
    t_of_largest,
    t_quantile,
    with_epoch_turn,
)
from autotune.stats.same_data import (
    DataComparison,
    compare_data,
    first_epoch_more_s,
    is_cached,
    plan_beside,
    times_read,
    why_not_copied,
)

__all__ = [
    "FEWEST_WINDOWS",
    "LEAST_STEPS",
    "PRIORS",
    "ComparedRounds",
    "DataComparison",
    "LaunchNoise",
    "Rate",
    "Settling",
    "at_equal_clocks",
    "autocorrelation",
    "clocks_allow",
    "compare_data",
    "compare_rounds",
    "even_after",
    "first_epoch_more_s",
    "gain_per_round",
    "interval_of",
    "is_cached",
    "launch_noise",
    "mean_rate",
    "outdone",
    "plan_beside",
    "rate_of",
    "ratio_error",
    "rounds_to_show",
    "satterthwaite",
    "settled_at",
    "speedup",
    "surely_slow",
    "t_of_largest",
    "t_quantile",
    "times_read",
    "why_not_copied",
    "with_epoch_turn",
]
