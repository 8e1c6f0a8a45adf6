"""What the user requires of a configuration besides that it is fast: ``peak_memory<=8GiB``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from autotune.base.errors import UnknownNameError, UsageError
from autotune.base.parsing import short_duration_s, size_bytes
from autotune.base.records import FIGURES, SHORT, Figure, Goal, Measurement, NotScored, Trial

_FORM = re.compile(r"\s*([a-z_]+)\s*(<=|>=|[<>=]=?)\s*(.+?)\s*")
_FLAG = "--require"
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)", re.ASCII)
#: A figure below this counts as this, so that it has a logarithm.
_LEAST = 1e-9


@dataclass(frozen=True)
class Requirement:
    """A bound on one figure.

    Attributes:
        at_most: the figure must not be above the limit; otherwise, not below it.
        limit: in the figure's unit.
        text: as the user typed it.
    """

    figure: Figure
    at_most: bool
    limit: float
    text: str

    def __str__(self) -> str:
        return self.text

    def excess(self, measurements: Sequence[Measurement], goal: Goal) -> float | None:
        """Return by how much the limit is exceeded, as a natural logarithm; at most 0 if the requirement is met.

        Returns:
            ``None`` if the figure is unknown.

        Raises:
            UsageError: the figure needs something that is unknown about the training.
        """
        try:
            value = figure_of(self.figure, measurements, goal)
        except NotScored as error:
            raise UsageError(f"{_FLAG} {self}: {error}") from error
        if value is None:
            return None
        excess = math.log(max(value, _LEAST) / max(self.limit, _LEAST))
        return excess if self.at_most else -excess


@dataclass(frozen=True)
class Requirements:
    """All requirements on a configuration of one study."""

    every: tuple[Requirement, ...] = ()
    goal: Goal = field(default_factory=Goal)

    def __bool__(self) -> bool:
        return bool(self.every)

    def __str__(self) -> str:
        return " and ".join(map(str, self.every))

    @classmethod
    def parsed(cls, texts: Iterable[str], goal: Goal) -> Requirements:
        """Parse several texts, each with `requirement`.

        Raises:
            UsageError: a text is no requirement, or needs something that was not stated about the training.
        """
        every = tuple(map(requirement, texts))
        for bound in every:
            needs = {"training_time": ("length",), "cost": ("price_per_hour",)}.get(bound.figure.name, ())
            missing = goal.lacks(needs)
            if missing is not None:
                raise UsageError(f"{_FLAG} {bound}: {missing}")
        return cls(every, goal)

    def excess(self, measurements: Sequence[Measurement]) -> float:
        """Return by how much the limit that is missed most is exceeded, as a natural logarithm: at most 0 if all are
        met, infinity if a figure is unknown."""
        excesses = [each.excess(measurements, self.goal) for each in self.every]
        return max((math.inf if each is None else each for each in excesses), default=0.0)

    def allow(self, trial: Trial) -> bool:
        """Return whether a trial meets all requirements by its own launch, as far as that was measured."""
        measurement = trial.result.measurement
        return measurement is None or self.met_by([measurement])

    def met_by(self, measurements: Sequence[Measurement]) -> bool:
        return self.excess(measurements) <= 0

    def unmet(self, measurements: Sequence[Measurement]) -> list[tuple[Requirement, float | None]]:
        """Return the requirements that are not met, each with the figure; ``None`` if that is unknown."""
        excesses = [(bound, bound.excess(measurements, self.goal)) for bound in self.every]
        return [
            (bound, figure_of(bound.figure, measurements, self.goal))
            for bound, excess in excesses
            if excess is None or excess > 0
        ]


#: Nothing is required.
ANYTHING = Requirements()


def requirement(text: str) -> Requirement:
    """Parse ``FIGURE<=VALUE`` or ``FIGURE>=VALUE``, with the unit of the figure: ``8GiB``, ``90s``, ``5%``, ``1.5``.

    Raises:
        UsageError: the text has another form, or the value another unit.
        UnknownNameError: there is no such figure.
    """
    match = _FORM.fullmatch(text)
    if match is None or match[2] not in ("<=", ">="):
        raise UsageError(
            f"{_FLAG} {text[:60]!r} is no requirement", advice="write it as 'peak_memory<=8GiB', in quotes."
        )
    name, sign, value = match.groups()
    figure = figure_called(name)
    limit = _in_unit(figure, value, text)
    if not math.isfinite(limit):
        raise UsageError(f"{_FLAG} {text[:60]!r}: {value[:30]!r} is beyond any figure")
    return Requirement(figure, sign == "<=", limit, f"{figure.name}{sign}{value}")


def figure_called(name: str) -> Figure:
    """Return the figure with this name or short name.

    Raises:
        UnknownNameError: there is none.
    """
    full_name = SHORT.get(name, name)
    if full_name not in FIGURES:
        raise UnknownNameError("figure", name, FIGURES)
    return FIGURES[full_name]


def _in_unit(figure: Figure, text: str, whole: str) -> float:
    if figure.unit == "bytes":
        return float(size_bytes(text, _FLAG))
    if figure.unit == "s":
        return short_duration_s(text, _FLAG)
    match = _NUMBER.fullmatch(text)
    if match is None or (match[2] and figure.unit != "fraction"):
        raise UsageError(f"{_FLAG} {whole[:60]!r}: {text[:30]!r} is no number", advice=f"it is in {figure.unit}.")
    return float(match[1]) / (100 if match[2] else 1)


def figure_of(figure: Figure, measurements: Sequence[Measurement], goal: Goal) -> float | None:
    """Return a figure over the launches of one configuration: the mean, or the maximum where that is what counts.

    Returns:
        ``None`` if no launch measured it.

    Raises:
        NotScored: it needs something that was not stated about the training.
    """
    values = [value for value in (figure.of(m, goal) for m in measurements) if value is not None]
    if not values:
        return None
    return max(values) if figure.largest else fmean(values)
