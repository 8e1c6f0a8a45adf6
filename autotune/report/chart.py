"""Layout of a small chart of curves: points, labels and legend as text, in the chart's own units."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.formatting import count, one_line
from autotune.report.document import Curves

_WIDTH, _HEIGHT = 360, 180
#: Edges of the plot. The labels of the axes are outside.
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 352, 8, 156
#: Dash patterns, which distinguish curves without colour. The first is solid. Charts rarely need more than these.
_DASHES = ("", "7 3", "2 2", "10 3 2 3", "4 4", "10 3 2 3 2 3", "1 4", "14 4")
#: Number of colours in the style sheet: ``--c0``, ``--c1``, …
_COLOURS = 6
#: Larger values are not drawn, and smaller ones count as 0, so that the arithmetic of the scale stays finite.
_LARGEST, _SMALLEST = 1e100, 1e-100


@dataclass(frozen=True)
class DrawnCurve:
    """One curve, with the values that can be drawn.

    Attributes:
        ends: the first and the last value, as text.
        colour: index of its colour.
        dashes: its dash pattern.
        runs: rows ``(points, the dot at their end or None)``; a value that is not finite interrupts the curve.
    """

    name: str
    ends: str
    colour: int
    dashes: str
    runs: tuple[tuple[str, tuple[str, str] | None], ...]


@dataclass(frozen=True)
class Chart:
    """Curves over steps, all on one scale, in the chart's own units.

    Attributes:
        about: the alternative text.
        labels: rows ``(x, y, anchor, text)``; empty if there is nothing to draw.
        curves: all curves, including those without a step.
    """

    about: str
    labels: tuple[tuple[int, int, str, str], ...]
    curves: tuple[DrawnCurve, ...]
    width: int = _WIDTH
    height: int = _HEIGHT
    axis: str = f"{_LEFT},{_TOP} {_LEFT},{_BOTTOM} {_RIGHT},{_BOTTOM}"


def chart_of(curves: Curves) -> Chart:
    """Lay out curves as a chart. A curve that ends before the last step has a dot at its end."""
    steps = max((len(values) for _, values in curves.rows), default=0)
    finite = [v for _, values in curves.rows for v in values if _can_draw(v)]
    low, high = _scale(min(finite), max(finite)) if finite else (0.0, 1.0)
    names = ", ".join(one_line(name) for name, _ in curves.rows)
    return Chart(
        f"Loss at steps 1 to {steps}, from {low:.3g} to {high:.3g}: {names}",
        tuple(_labels(steps, low, high)) if finite else (),
        tuple(_curve(i, *row, steps, low, high) for i, row in enumerate(curves.rows)),
    )


def _labels(steps: int, low: float, high: float) -> Iterator[tuple[int, int, str, str]]:
    yield _LEFT - 6, _TOP + 8, "end", f"{high:.3g}"
    yield _LEFT - 6, (_TOP + _BOTTOM) // 2 + 4, "end", "loss"
    yield _LEFT - 6, _BOTTOM, "end", f"{low:.3g}"
    if steps > 1:
        yield _LEFT, _BOTTOM + 16, "start", "1"
        yield _RIGHT, _BOTTOM + 16, "end", str(steps)
    yield (_LEFT + _RIGHT) // 2, _BOTTOM + 16, "middle", "step" if steps > 1 else "step 1"


def _curve(i: int, name: str, values: Sequence[float], steps: int, low: float, high: float) -> DrawnCurve:
    runs = []
    for run in _runs(values):
        points = [
            (
                f"{_LEFT + (_RIGHT - _LEFT) * (step / (steps - 1) if steps > 1 else 0.5):.1f}",
                f"{_BOTTOM - (_BOTTOM - _TOP) * (v - low) / (high - low):.1f}",
            )
            for step, v in run
        ]
        dot = points[-1] if len(points) == 1 or run[-1][0] < steps - 1 else None
        runs.append((" ".join(f"{x},{y}" for x, y in points), dot))
    ends = f"{values[0]:.3g} → {values[-1]:.3g}" if values else "no step"
    early = f", ended after {count(len(values), 'step')}" if 0 < len(values) < steps else ""
    return DrawnCurve(name, ends + early, i % _COLOURS, _DASHES[i % len(_DASHES)], tuple(runs))


def _can_draw(value: float) -> bool:
    return abs(value) <= _LARGEST  # False for NaN too.


def _runs(values: Sequence[float]) -> Iterator[list[tuple[int, float]]]:
    """Yield the runs of consecutive values that can be drawn, as rows ``(step from 0, value)``."""
    run: list[tuple[int, float]] = []
    for step, value in enumerate(values):
        if _can_draw(value):
            run.append((step, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _scale(low: float, high: float) -> tuple[float, float]:
    """Return the ends of a scale around ``low`` and ``high``: distinct, and exact at three significant digits."""
    largest = max(abs(low), abs(high))
    unit = 10.0 ** (math.floor(math.log10(largest)) - 2) if largest > _SMALLEST else 1.0
    # The tolerance is for floating point: 2.3 / 0.01 is slightly less than 230.
    low, high = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    return (low * unit, high * unit) if low < high else ((low - 1) * unit, (high + 1) * unit)
