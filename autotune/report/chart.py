"""Curves as one small chart, before it is drawn: points, labels and a legend in text, in the chart's own units."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.formatting import count, one_line
from autotune.report.document import Curves

_WIDTH, _HEIGHT = 360, 180
#: The plot's edges; the axes' labels stand outside it.
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 352, 8, 156
#: Told apart by these where colours are not seen; the first is solid. As many as one chart plausibly has curves.
_DASHES = ("", "7 3", "2 2", "10 3 2 3", "4 4", "10 3 2 3 2 3", "1 4", "14 4")
#: The style sheet knows ``--c0`` and so on.
_COLOURS = 6
#: Nothing larger is drawn, and nothing smaller counts as more than 0: arithmetic on the scale stays finite.
_LARGEST, _SMALLEST = 1e100, 1e-100


@dataclass(frozen=True)
class DrawnCurve:
    """One curve, as far as it can be drawn.

    Attributes:
        colour, dashes: by which it is told from the others. ends: where it begins and ends, in words.
        runs: rows ``(points, the dot at their end or None)``; a value that is no finite number interrupts the curve.
    """

    name: str
    ends: str
    colour: int
    dashes: str
    runs: tuple[tuple[str, tuple[str, str] | None], ...]


@dataclass(frozen=True)
class Chart:
    """The curves over their steps, all on one scale, in the chart's own units.

    Attributes:
        about: for whoever does not see it. labels: rows ``(x, y, anchor, text)``; none where nothing can be drawn.
        curves: every one, also one without a step.
    """

    about: str
    labels: tuple[tuple[int, int, str, str], ...]
    curves: tuple[DrawnCurve, ...]
    width: int = _WIDTH
    height: int = _HEIGHT
    axis: str = f"{_LEFT},{_TOP} {_LEFT},{_BOTTOM} {_RIGHT},{_BOTTOM}"


def chart_of(curves: Curves) -> Chart:
    """What is to be drawn. A curve that does not go on to the last step ends in a dot."""
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
    """What lies between two values that cannot be drawn, as rows ``(step from 0, value)``."""
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
    """The scale's ends: outside ``low`` and ``high``, apart, and exact when written with three significant digits."""
    largest = max(abs(low), abs(high))
    unit = 10.0 ** (math.floor(math.log10(largest)) - 2) if largest > _SMALLEST else 1.0
    # 2.3 / 0.01 is a little less than 230.
    low, high = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    return (low * unit, high * unit) if low < high else ((low - 1) * unit, (high + 1) * unit)
