"""Numbers from step times: steady state, rates, intervals, comparisons. Pure functions, no clock, no torch.

From one step to the figure that is reported:

* `settled_at` cuts the warm-up off a series of step times.
* `rate_of` makes a rate of a launch's windows; its interval knows of that launch alone.
* `launch_noise` learns from repeats how much launches differ; `launch_rate` and `mean_rate` give intervals that the
  next launch keeps to; `speedup` compares two rates.
* `surely_slow` says when a launch need not be finished.
* `compare_rounds` compares contenders that were launched in turns, where drift cancels.

Each formula names its source where it stands.
"""

from autotune.stats.launches import PRIORS, launch_noise, launch_rate, mean_rate, outdone, speedup
from autotune.stats.pruning import FEWEST_WINDOWS, surely_slow
from autotune.stats.rate import LaunchNoise, Rate, autocorrelation, rate_of, with_epoch_turn
from autotune.stats.rounds import ComparedRounds, compare_rounds
from autotune.stats.settling import LEAST_STEPS, Settling, settled_at
from autotune.stats.student import t_quantile

__all__ = [
    "FEWEST_WINDOWS",
    "LEAST_STEPS",
    "PRIORS",
    "ComparedRounds",
    "LaunchNoise",
    "Rate",
    "Settling",
    "autocorrelation",
    "compare_rounds",
    "launch_noise",
    "launch_rate",
    "mean_rate",
    "outdone",
    "rate_of",
    "settled_at",
    "speedup",
    "surely_slow",
    "t_quantile",
    "with_epoch_turn",
]
