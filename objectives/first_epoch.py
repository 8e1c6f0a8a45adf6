"""Epochs per hour of a training that is only one epoch long: start-up and compile seconds count in full, and
so does reading it from files in no cache, where that was measured apart.

For short trainings, where a compile mode that is fastest in the long run may never pay back.
"""

from autotune import Goal, Measurement, NotScored

UNIT = "epochs/h"


def score(measurement: Measurement) -> float:
    """Higher is better."""
    if not measurement.epoch_samples:
        raise NotScored("how many samples an epoch has is not known: take --objective time_to_train --samples N")
    return 3600 / Goal(epochs=1).seconds_of(measurement)
