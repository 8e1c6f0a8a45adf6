"""Whole trainings per day, of as many epochs or samples as `--epochs` or `--samples` states.

Start-up and compilation count, so that a short training may be faster without compiling, and a long one with it; where
the rate of a first epoch was measured apart (`autotune rank` of a finished study), so does that.
"""

from autotune import Goal, Measurement

UNIT = "trainings/day"
FIGURE = "training_time"
NEEDS = ("length",)


def score(measurement: Measurement, goal: Goal) -> float:
    """Higher is better."""
    return 86400 / goal.seconds_of(measurement)
