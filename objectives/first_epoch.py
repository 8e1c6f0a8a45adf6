"""Epochs per hour of a training that is only one epoch long: start-up and compile seconds count in full.

For short trainings, where a compile mode that is fastest in the long run may never pay back.
"""

from autotune.records import Measurement

UNIT = "epochs/h"


def score(measurement: Measurement) -> float:
    """Higher is better."""
    training_s = measurement.epoch_samples / measurement.samples_per_s
    return 3600 / (measurement.startup_s + measurement.compile_s + training_s)
