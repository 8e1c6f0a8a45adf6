"""What a picture shows, as numbers: charts, waterfalls, intervals and stacked bars. None of it is markup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: How the points of a series are drawn. A line joins its points, steps keep a value until the next one.
Mark = Literal["dots", "rings", "triangles", "crosses", "line", "steps"]
#: A figure with the ends of its 95 % interval; ``None`` if that is not known.
Estimate = tuple[float, float | None, float | None]


@dataclass(frozen=True)
class Axis:
    """An axis with its unit in its title.

    Attributes:
        ticks: values that were tried, which are then the only labelled ones.
        log: logarithmic, for positive values only.
    """

    title: str
    ticks: tuple[float, ...] = ()
    log: bool = False


@dataclass(frozen=True)
class Series:
    """Points ``(x, y)`` of one kind. Crosses have no height: they stand for what failed at this x.

    Attributes:
        name: its entry in the legend; empty for one that continues another series, with its colour.
        colour: index of a colour of the page.
    """

    name: str
    mark: Mark
    points: tuple[tuple[float, float], ...]
    colour: int = 0


@dataclass(frozen=True)
class Level:
    """A horizontal line with its interval as a band, such as a ceiling or a limit."""

    name: str
    at: Estimate
    colour: int = 0


@dataclass(frozen=True)
class Panel:
    """One plot of a chart; the panels of a chart lie below each other and share its x axis."""

    y: Axis
    series: tuple[Series, ...]
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True)
class Span:
    """An interval of the x axis that is shaded."""

    begin: float
    end: float


@dataclass(frozen=True)
class Chart:
    """Points and curves over a common x axis.

    Attributes:
        zero: the x axis begins at 0.
        spans: shaded intervals; spans_are: what they stand for.
        here: a value of x that is pointed out; here_is: what it stands for.
        note: what the reader is to know besides, below the legend.
    """

    x: Axis
    panels: tuple[Panel, ...]
    zero: bool = False
    spans: tuple[Span, ...] = ()
    spans_are: str = ""
    here: float | None = None
    here_is: str = ""
    note: str = ""


@dataclass(frozen=True)
class Factor:
    """A step of a waterfall: what multiplies the value before it. The rest is what no other step accounts for."""

    name: str
    factor: Estimate
    rest: bool = False


@dataclass(frozen=True)
class Waterfall:
    """Factors that lead from 1 to `total`, on a logarithmic axis, on which equal lengths are equal factors."""

    axis: str
    begin: str
    factors: tuple[Factor, ...]
    end: str
    total: Estimate


@dataclass(frozen=True)
class IntervalRow:
    """A row of intervals: a figure with its interval. A faint one is shown beside the others and does not count."""

    name: str
    at: Estimate
    strong: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Intervals:
    """Figures with their 95 % intervals below each other."""

    axis: str
    rows: tuple[IntervalRow, ...]


@dataclass(frozen=True)
class Stacks:
    """Horizontal bars that consist of parts.

    Attributes:
        rows: ``(name, values of the parts)``.
    """

    axis: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]


Plot = Chart | Waterfall | Intervals | Stacks
