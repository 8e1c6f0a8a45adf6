"""The catalog as a page: ``docs/knobs.md``."""

from __future__ import annotations

import inspect
import math
import textwrap
from importlib import import_module

from autotune.knobs import KNOBS
from autotune.knobs.knob import Effects, Expected, Knob, Maths, Refusal, spell

_HEAD = """\
# Knobs

What autotune can set, one section for each file of `autotune/knobs/`. Written by `python -m autotune.knobs`; change the
file, not this page. `autotune space --model NAME` shows which of these values are possible on this machine, and why the
others are not.
"""
_MATHS = {
    Maths.SAME: "no",
    Maths.KERNELS: "no, but other kernels compute it: a winner with it is checked to train as eager fp32 does",
    Maths.CHANGED: "yes",
}


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([_HEAD, *map(_section, KNOBS.values())])


def _section(knob: Knob) -> str:
    story = inspect.getdoc(import_module(f"autotune.knobs.{knob.name}")) or ""
    rows = [f"| {what} | {text} |" for what, text in _facts(knob) if text]
    return "\n".join([f"## {knob.name}\n", _markdown(story), "\n| | |\n|---|---|", *rows, ""])


def _facts(knob: Knob) -> list[tuple[str, str]]:
    """Rows of what the file declares."""
    numbers = f"whole numbers from {knob.minimum}"
    return [
        ("values", numbers if knob.values is None else _listed(knob.values)),
        ("tried here", _first_line(type(knob).ladder) if knob.numeric else ""),
        (
            "PyTorch's default",
            _first_line(type(knob).default_here) if knob.default is None else f"`{spell(knob.default)}`",
        ),
        ("acts on", f"the {knob.scope}"),
        ("changes what a step computes", _MATHS[knob.maths]),
        ("device memory depends on it", "yes" if knob.memory else "no"),
        ("can be switched while training", "yes" if knob.switchable else "no"),
        ("means nothing without", f"`{knob.needs}`" if knob.needs else ""),
        ("not possible", "; ".join(map(_refused, (*knob.inactive, *knob.refusals)))),
        ("expected of the rate", _expected(knob)),
    ]


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(f"`{spell(value)}`" for value in values)  # type: ignore[arg-type]


def _refused(refusal: Refusal) -> str:
    return f"{_listed(refusal.values)}: {refusal.reason}" if refusal.values else refusal.reason


def _expected(knob: Knob) -> str:
    """The prior of the whole training, or of the part that the file speaks of."""
    effects: Effects = knob.effects("whole")
    return "; ".join(f"{_of(value)} {_percent(e)}" for value, e in effects.items())


def _of(value: object) -> str:
    return "each doubling" if value is None else f"`{spell(value)}`"  # type: ignore[arg-type]


def _percent(effect: Expected) -> str:
    # A normal prior of the logarithm; the range is one standard deviation to both sides.
    low, middle, high = (100 * math.expm1(effect.mean + side * effect.sd) for side in (-1, 0, 1))
    return f"{middle:+.0f} % ({low:+.0f} to {high:+.0f} %)"


def _first_line(method: object) -> str:
    return " ".join((inspect.getdoc(method) or "").split("\n\n")[0].split())


def _markdown(text: str) -> str:
    """A docstring's marks as Markdown has them."""
    return textwrap.dedent(text).replace("``", "`").strip()
