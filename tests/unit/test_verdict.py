"""The verdict on a search as data, from which the table and the report are rendered."""

from __future__ import annotations

from autotune.base.records import Finding
from autotune.report.sentences import NO_VERDICT, SAME_MATHS, verdict_on
from tests.support import make_measurement, make_outcome, make_trial

FOUND = make_outcome()
BEST, OWN, BASELINE = FOUND.best, FOUND.best_same_batch, FOUND.baseline
UNSURE = {"speedup_ci95": (0.98, 1.2)}
TIE = "trial 7 ran at 1.010× trial 4"


def test_two_winners_with_what_each_changes() -> None:
    epoch = make_measurement(63.4, epoch_samples=1280)
    found = verdict_on(FOUND, [make_trial(BEST.trial, BEST.config, measurement=epoch)])
    assert found.advice is None and not found.one_winner and found.own_title == "at your own batch size (32)"
    assert found.best.shown and found.own.shown and not found.own.is_baseline
    assert "an epoch is 20 steps instead of 40" in found.best.consequence and found.own.consequence == SAME_MATHS


def test_one_winner_changes_nothing_but_the_speed() -> None:
    found = verdict_on(make_outcome(best=OWN), [])
    assert found.one_winner and found.best.consequence == found.own.consequence == SAME_MATHS


def test_one_of_two_that_is_shown_is_enough() -> None:
    found = verdict_on(make_outcome(best=BEST.model_copy(update=UNSURE), tie=TIE), [])
    assert found.advice is None and not found.best.shown and found.own.shown
    assert found.tie == "Trial 7 ran at 1.010× trial 4."


def test_a_tie_is_part_of_the_advice_where_nothing_is_faster() -> None:
    nobody = {"best": BASELINE, "best_same_batch": BASELINE, "finalists": (BASELINE,), "tie": TIE}
    found = verdict_on(make_outcome(**nobody), [])
    assert found.advice == "Trial 7 ran at 1.010× trial 4. Keep what you have." and found.tie is None
    assert found.best.is_baseline


def test_without_a_verdict_the_reason_and_what_to_do_are_given() -> None:
    nobody = {"best": BASELINE, "best_same_batch": BASELINE, "finalists": (BASELINE,), "finding": Finding.OPEN}
    found = verdict_on(make_outcome(**nobody, because="others used the machine", advice="wait"), [])
    assert found.nothing_faster == NO_VERDICT and found.advice == "Others used the machine. Wait."


def test_a_batch_size_that_was_kept_distinguishes_nothing() -> None:
    both = {"best": BEST.model_copy(update={"config": {**OWN.config, "workload.width": 2}})}
    assert verdict_on(make_outcome(**both), []).own_title == "with the training as it is"
    assert verdict_on(make_outcome(keeps_batch_size=True), []).own_title == "with the training as it is"


def test_only_what_was_not_shown_is_a_caution() -> None:
    assert verdict_on(FOUND, []).cautions is None
    check = FOUND.checks[0].model_copy(update={"passed": None, "reason": "no time"})
    found = verdict_on(make_outcome(checks=(check,)), [])
    assert found.cautions == "Whether the winner trains was not checked: no time."
