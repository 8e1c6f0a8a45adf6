"""The least memory among the configurations that are about as fast as the fastest: for a card that others share, or
that has more to hold than the training."""

from autotune import Measurement, NotScored

UNIT = "1/GiB"
FIGURE = "peak_memory"
#: Only configurations compete whose rate is within this fraction of the fastest one's.
RATE_WITHIN = 0.02


def score(measurement: Measurement) -> float:
    """Higher is better."""
    if not measurement.peak_bytes:
        raise NotScored("the peak memory of this launch is not known")
    return 2**30 / measurement.peak_bytes
