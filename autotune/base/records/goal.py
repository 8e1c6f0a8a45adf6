"""What the user's training is to be, as far as it was stated: how long, and on a machine of what price."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from autotune.base.records.base import Record
from autotune.base.records.measurement import Measurement

#: What an objective may need to be stated, and how it is.
NEEDS = {
    "length": "how long the training is was not stated: --epochs N or --samples N",
    "price_per_hour": "what an hour of the machine costs was not stated: --price-per-hour PRICE",
}


def training_s(
    samples: int, *, epoch_samples: int | None, start_s: float, per_s: float, cold_per_s: float | None
) -> float:
    """Return the seconds of a training: its start, a first epoch from files in no cache, and the rest.

    Args:
        epoch_samples: of one epoch; ``None`` or 0 if not known. start_s: from the launch to the end of the first step.
        per_s: samples per second. cold_per_s: in the first epoch; ``None`` if that was not measured.
    """
    first = min(samples, epoch_samples or 0)
    return start_s + first / min(per_s, cold_per_s or per_s) + (samples - first) / per_s


class NotScored(ValueError):
    """A measurement cannot be scored, for want of a figure or of something to be stated; the text says which."""


class Goal(Record):
    """The length and the price of a training. The methods raise `NotScored` if they need what was not stated.

    Attributes:
        epochs, samples: how much it reads in all, in one unit or the other.
        price_per_hour: of the machine, in the user's currency.
    """

    epochs: int | None = Field(default=None, gt=0)
    samples: int | None = Field(default=None, gt=0)
    price_per_hour: float | None = Field(default=None, gt=0)

    @property
    def has_length(self) -> bool:
        """Whether it is stated how long the training is."""
        return self.epochs is not None or self.samples is not None

    def lacks(self, needs: Iterable[str]) -> str | None:
        """Return what is missing of `NEEDS`, in one sentence; ``None`` if nothing is."""
        stated = {"length": self.has_length, "price_per_hour": self.price_per_hour is not None}
        return next((NEEDS[name] for name in needs if not stated[name]), None)

    def samples_of(self, measurement: Measurement) -> int:
        """Return the number of samples that the training reads."""
        if self.samples is not None:
            return self.samples
        if self.epochs is None:
            raise NotScored(NEEDS["length"])
        if not measurement.epoch_samples:
            raise NotScored("how many samples an epoch has is not known: state --samples N instead of --epochs")
        return self.epochs * measurement.epoch_samples

    def seconds_of(self, measurement: Measurement) -> float:
        """Return the seconds that the training takes: start-up, the first step with its compiling, the first epoch, and
        the rest at the measured rate, which includes the turns of epochs.

        The first epoch is that of files in no cache, if its rate is known.
        """
        return training_s(
            self.samples_of(measurement),
            epoch_samples=measurement.epoch_samples,
            start_s=measurement.startup_s + measurement.compile_s,
            per_s=measurement.samples_per_s,
            cold_per_s=measurement.cold_per_s,
        )

    def cost_of(self, measurement: Measurement) -> float:
        """Return what the training costs, or a million samples of it if its length was not stated."""
        if self.price_per_hour is None:
            raise NotScored(NEEDS["price_per_hour"])
        seconds = self.seconds_of(measurement) if self.has_length else 1e6 / measurement.samples_per_s
        return self.price_per_hour * seconds / 3600
