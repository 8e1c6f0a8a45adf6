"""Batches that a script skips because something fails in them are not trained on: who skips them is no winner."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from autotune.base.records import HeatPlan, LaunchKind, TrialStatus, Value

from .conftest import PLAIN, PLAN, SCRIPTS, python

AS_ONE = PLAN.model_copy(update={"per_batch": (1.0, 1.0)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "updates"),
    [((), 1.0), (("--accumulate", "4"), 0.25), (("--overflows",), 1.0)],
    ids=["plain", "accumulated", "overflowing"],
)
def test_what_trains_is_counted_for_each_batch(launched: Any, options: tuple[str, ...], updates: float) -> None:
    result = launched(*python("skipping.py", *options))
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert result.measurement.per_batch == pytest.approx((1.0, updates), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "every", "cause"),
    [
        ("forward", 2, "every second batch fails: 0.50 updates per batch instead of 1.00"),
        ("backward", 5, "20 % of batches fail: 0.80 backward passes per batch instead of 1.00"),
    ],
)
def test_a_trial_that_skips_batches_has_failed(launched: Any, where: str, every: int, cause: str) -> None:
    words = python("skipping.py", "--where", where, "--every", str(every))
    result = launched(*words, plan=AS_ONE, precision="bf16")
    assert result.status is TrialStatus.DIVERGED and result.measurement is None
    what, figure = cause.split(": ")
    assert result.cause.split(": ")[0].split()[-2:] == what.split()[-2:], result.cause
    assert figure[6:] in result.cause and "goes on where something fails" in result.advice


@pytest.mark.slow
def test_an_entrant_that_skips_batches_is_out_alone(command_launch: Any) -> None:
    plain: dict[str, Value] = {**PLAIN, "optimizer_impl": "for-loop"}
    entrants = (plain, {**plain, "precision": "bf16"}, {**plain, "optimizer_impl": "foreach"})
    words = (sys.executable, str(SCRIPTS / "skipping.py"), "--every", "2")
    heat = HeatPlan(entrants=entrants, turn_s=0.05, all_rounds=True, min_rounds=2, max_rounds=4)
    result = command_launch(words, plain, kind=LaunchKind.HEAT, heat=heat)
    assert result.status is TrialStatus.COMPLETE, result.cause
    first, skips, other = result.heat.entrants
    assert skips.status is TrialStatus.DIVERGED and skips.ratio is None
    assert skips.cause.startswith("every second batch fails: 0.5")
    assert first.status is other.status is TrialStatus.COMPLETE and other.ratio is not None
