"""Trainings per unit of money, at the price of an hour of this machine (`--price-per-hour`).

Of a training whose length is stated (`--epochs`, `--samples`), start-up and compilation cost, too; otherwise it is a
million samples at the steady rate.
"""

from autotune import Goal, Measurement

UNIT = "trainings per unit of money"
FIGURE = "cost"
NEEDS = ("price_per_hour",)


def score(measurement: Measurement, goal: Goal) -> float:
    """Higher is better."""
    return 1 / goal.cost_of(measurement)
