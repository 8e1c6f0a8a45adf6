"""The rate below which a trial can be stopped early."""

from __future__ import annotations

from collections.abc import Sequence

from autotune import stats
from autotune.base.records import Config, Trial
from autotune.space import Space


def rate_to_beat(
    space: Space, complete: Sequence[Trial], config: Config, noise: stats.LaunchNoise
) -> tuple[float, float | None]:
    """Return the rate in samples/s below which a trial can be stopped early, 0 if none is known, and the card's clock
    at which it was seen, if known.

    Two launches of equal configurations differ by less than ``2 √2 sd`` in 19 of 20 cases (the difference of two
    independent launches has √2 times the standard deviation of one), so a trial that is slower than the best by more
    than that is really slower. Configurations with the user's own batch size are reported separately, so they are
    compared with the best of their own kind.

    Args:
        noise: of one launch.
    """
    alike = space.same_training(config)
    rivals = [t for t in complete if not alike or space.same_training(t.config)]
    fastest = max(rivals, key=lambda t: t.rate_per_s or 0.0, default=None)
    if fastest is None:
        return 0.0, None
    margin = 2 * 2**0.5 * noise.sd
    seen = fastest.result.measurement
    return (fastest.rate_per_s or 0.0) * max(0.0, 1 - margin), seen.sm_clock_mhz if seen else None
