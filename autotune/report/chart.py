"""Curves as one small chart in inline SVG, with a legend in text. Sizes are in the chart's own units."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

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


def escape(text: str) -> str:
    """``text`` on one line, as HTML that shows it as it is, in an element or a quoted attribute."""
    return html.escape(one_line(text))


def chart(curves: Curves) -> str:
    """The curves over their steps, all on one scale, as an HTML ``<figure>``.

    A value that is no finite number interrupts its curve. A curve that does not go on to the last step ends in a dot.
    The legend names every curve, also one without a step, and says where it begins and ends.
    """
    lines = ["<figure>"]
    steps = max((len(values) for _, values in curves.rows), default=0)
    drawn = [v for _, values in curves.rows for v in values if _can_draw(v)]
    if drawn:
        lines += _svg(curves, steps, *_scale(min(drawn), max(drawn)))
    lines += ["<figcaption>", "<ul>"]
    for i, (name, values) in enumerate(curves.rows):
        ends = f"{values[0]:.3g} → {values[-1]:.3g}" if values else "no step"
        early = f", ended after {count(len(values), 'step')}" if 0 < len(values) < steps else ""
        key = f'<svg viewBox="0 0 40 12" aria-hidden="true"><line x1="0" y1="6" x2="40" y2="6"{_look(i)}/></svg>'
        lines.append(f"<li>{key}{escape(name)}: {ends}{early}</li>")
    return "\n".join([*lines, "</ul>", "</figcaption>", "</figure>"])


def _svg(curves: Curves, steps: int, low: float, high: float) -> Iterator[str]:
    names = ", ".join(escape(name) for name, _ in curves.rows)
    about = f"Loss at steps 1 to {steps}, from {low:.3g} to {high:.3g}: {names}"
    yield f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{about}">'
    yield f'<polyline class="axis" points="{_LEFT},{_TOP} {_LEFT},{_BOTTOM} {_RIGHT},{_BOTTOM}"/>'
    yield _text(_LEFT - 6, _TOP + 8, "end", f"{high:.3g}")
    yield _text(_LEFT - 6, (_TOP + _BOTTOM) // 2 + 4, "end", "loss")
    yield _text(_LEFT - 6, _BOTTOM, "end", f"{low:.3g}")
    if steps > 1:
        yield _text(_LEFT, _BOTTOM + 16, "start", "1")
        yield _text(_RIGHT, _BOTTOM + 16, "end", str(steps))
    yield _text((_LEFT + _RIGHT) // 2, _BOTTOM + 16, "middle", "step" if steps > 1 else "step 1")
    for i, (_, values) in enumerate(curves.rows):
        for run in _runs(values):
            points = [
                (
                    _LEFT + (_RIGHT - _LEFT) * (step / (steps - 1) if steps > 1 else 0.5),
                    _BOTTOM - (_BOTTOM - _TOP) * (v - low) / (high - low),
                )
                for step, v in run
            ]
            yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"{_look(i)}/>'
            if len(points) == 1 or run[-1][0] < steps - 1:
                x, y = points[-1]
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill: var(--c{i % _COLOURS})"/>'
    yield "</svg>"


def _text(x: int, y: int, anchor: str, text: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _look(i: int) -> str:
    """The attributes by which curve ``i`` is told from the others."""
    dash = _DASHES[i % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f' class="curve" style="stroke: var(--c{i % _COLOURS})"{dashes}'


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
