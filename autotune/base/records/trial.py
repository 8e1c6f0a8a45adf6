"""A trial of a study, and what was expected of it."""

from __future__ import annotations

from autotune.base.records.base import Record, Value
from autotune.base.records.result import TrialResult


class Prediction(Record):
    """The sampler's expectation of a trial before it began.

    Attributes:
        rate_per_s: in the objective's unit, if that is not a rate. seconds: duration of the whole trial.
        peak_bytes: of device memory; ``None`` if it could not be predicted.
        why: a few words on why the trial was proposed.
    """

    rate_per_s: float
    seconds: float
    peak_bytes: float | None = None
    why: str = ""


class Trial(Record):
    """One finished trial, as the search stores it.

    Attributes:
        predicted: ``None`` if the proposer had no particular expectation.
        result: its measurement omits the per-step tuples; those are in the trial's folder.
        score: the objective's; only for a complete trial. further: those of further objectives.
    """

    number: int
    config: dict[str, Value]
    result: TrialResult
    score: float | None = None
    further: tuple[float, ...] = ()
    repeats: int | None = None
    predicted: Prediction | None = None

    @property
    def rate_per_s(self) -> float | None:
        """Samples per second: measured if complete, observed if pruned."""
        measurement = self.result.measurement
        return measurement.samples_per_s if measurement else self.result.rate_seen_per_s
