"""Samples per second for each GiB of peak device memory: for cards that are shared with others."""

from autotune import Measurement, NotScored

UNIT = "samples/s/GiB"


def score(measurement: Measurement) -> float:
    """Higher is better."""
    if not measurement.peak_allocated_bytes:
        raise NotScored("the peak memory of this launch is not known")
    return measurement.samples_per_s / (measurement.peak_allocated_bytes / 2**30)
