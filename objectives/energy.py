"""Samples per joule, by the energy counter of the card, or of the processors for a training on a CPU."""

from autotune.records import Measurement, NotScored

UNIT = "samples/J"
FIGURE = "energy_per_sample"


def score(measurement: Measurement) -> float:
    """Higher is better."""
    joules = measurement.joules_per_sample
    if joules is None:
        raise NotScored(
            "the energy of this launch is not known: the card has no energy counter, or that of the processors (RAPL) "
            "cannot be read here"
        )
    return 1 / joules
