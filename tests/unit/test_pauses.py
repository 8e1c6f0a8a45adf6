"""Pauses between the steps of a script: those that come again and again belong to its rate."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from autotune.child.trail import Pauses, SeenStep


def seen(seconds: Iterable[float]) -> Pauses:
    pauses, at = Pauses(), 0.0
    for one in seconds:
        at += one
        step = SeenStep(at, one, one, 0.0, None, whole=True, turned=False, own_s=one)
        assert pauses.add(step) == (one > 0.3)
    return pauses


CYCLE = [0.01] * 15 + [0.5]


@pytest.mark.parametrize(
    ("seconds", "regular", "may_be"),
    [
        ([0.01] * 200, False, False),
        ([0.01, 0.012, 0.02, 0.03] * 50, False, False),
        (CYCLE, False, True),
        (CYCLE * 2, True, False),
        ([0.01] * 6 + CYCLE * 8, True, False),
        # One in so long a time does not matter, and what comes no more was no regular pause.
        ([*CYCLE, *[0.01] * 1000], False, False),
        ([*CYCLE * 2, *[0.01] * 400], False, False),
    ],
)
def test_pauses_are_told(seconds: list[float], regular: bool, may_be: bool) -> None:
    pauses = seen(seconds)
    assert (pauses.regular, pauses.may_be) == (regular, may_be)
