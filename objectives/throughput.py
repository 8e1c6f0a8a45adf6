"""Samples per second, epoch turns weighed in: how fast a long training goes."""

from autotune import Measurement

UNIT = "samples/s"
#: The fastest wins.
RATE_WITHIN = 0.0


def score(measurement: Measurement) -> float:
    """Higher is better."""
    return measurement.samples_per_s
