"""Samples per second, epoch turns weighed in: how fast a long training goes."""

from autotune.records import Measurement

UNIT = "samples/s"


def score(measurement: Measurement) -> float:
    """Higher is better."""
    return measurement.samples_per_s
