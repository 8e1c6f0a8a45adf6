"""Samples per joule, by the energy counter of the card, or of the processors for a training on a CPU."""

from autotune import Measurement, NotScored

UNIT = "samples/J"
FIGURE = "energy_per_sample"


def score(measurement: Measurement) -> float:
    """Higher is better."""
    joules = measurement.joules_per_sample
    if joules is None:
        raise NotScored(
            "the energy of this launch is not known: no counter of its cards, or without cards of the processors "
            "(RAPL), could be read in all its windows"
        )
    return 1 / joules
