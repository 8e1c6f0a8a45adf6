"""An answer within the budget: searches in virtual time that have time for eight launches (`answered`)."""

import itertools
from pathlib import Path

import pytest

from autotune.base.layout import StudyFiles
from autotune.base.records import Finding
from autotune.study.tables import read_trials

from .answered import Answer, Case, Training, answer

NOISES, LAUNCHES_S = (0.02, 0.05, 0.10), (3.0, 10.0, 40.0)
#: Few enough for the normal suite. The stress run has a hundred of each.
SOME, MANY = range(1), range(100)
#: Where nothing is faster.
EQUALS_NOISES, EQUALS_LAUNCHES = (0.02, 0.05, 0.10), (3.0, 4.0, 8.0, 16.0)
#: A budget holds to this part of it, or to so many seconds.
OVER, OVER_S = 0.05, 5.0


def searches(seeds: range, folder: Path, *, script: bool, starved: bool) -> list[Answer]:
    cells = itertools.product(seeds, NOISES, LAUNCHES_S)
    cases = [Case(seed, noise, launch_s, script=script, starved=starved) for seed, noise, launch_s in cells]
    return [answer(case, folder / str(i)) for i, case in enumerate(cases)]


def check(found: list[Answer], least: float) -> None:
    """Check how many end with a verdict, that none is false, and that budgets hold."""
    won = [a for a in found if a.outcome is not None and a.outcome.found in (Finding.FASTER, Finding.LIKELY)]
    assert len(won) >= least * len(found), [a.log for a in found if a not in won][:1]
    false = [a for a in won if a.true_ratio <= 1]
    assert len(false) <= 0.01 * len(found), false[0].log
    proven = [a for a in false if a.outcome is not None and a.outcome.found is Finding.FASTER]
    assert len(proven) <= 0.005 * len(found), proven[0].log
    for one in found:
        assert one.elapsed_s <= one.case.budget_s + max(OVER_S, OVER * one.case.budget_s), one.log


@pytest.mark.slow
@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("starved", [True, False])
def test_what_can_be_faster_is_found_to_be(script: bool, starved: bool, tmp_path: Path) -> None:
    check(searches(SOME, tmp_path, script=script, starved=starved), 0.85)


@pytest.mark.slow
@pytest.mark.parametrize("script", [True, False])
def test_heats_that_would_deceive_do_not(script: bool, tmp_path: Path) -> None:
    cells = itertools.product(range(2), NOISES, LAUNCHES_S)
    cases = [Case(seed, noise, launch_s, script=script, malloc=True) for seed, noise, launch_s in cells]
    found = [answer(case, tmp_path / str(i)) for i, case in enumerate(cases)]
    check(found, 0.85)
    for one in found:
        outcome = one.outcome
        if outcome is not None and outcome.found in (Finding.FASTER, Finding.LIKELY):
            low, high = outcome.best.speedup_ci95
            # An interval of 95 %, and the winner of several.
            assert low / 1.1 < one.true_ratio < high * 1.1, one.log


def test_what_heats_show_nothing_of_is_told_by_its_launches(tmp_path: Path) -> None:
    # Two launches of each differ by 5 % and 6 %, at 1.45×; ten others were in a heat without the baseline.
    found = answer(Case(0, 0.02, 10.0, script=False, malloc=True), tmp_path / "s")
    outcome = found.outcome
    assert outcome is not None and outcome.found is Finding.LIKELY, found.log
    assert outcome.evidence == "launches at different times"
    low, high = outcome.best.speedup_ci95
    assert low < found.true_ratio < high


@pytest.mark.slow
@pytest.mark.parametrize(("gain", "comes_first"), [(0.04, False), (0.3, True)])
def test_a_change_of_maths_comes_first_where_it_pays(gain: float, comes_first: bool, tmp_path: Path) -> None:
    training = Training(Case(0, 0.02, 10.0, launches=6.0, malloc=True))
    training.effects, training.load_per_s = {("malloc", "keep"): 0.3, ("precision", "bf16"): gain}, 20_000.0
    outcome = answer(training.case, tmp_path / "s", training).outcome
    assert outcome is not None and outcome.found in (Finding.FASTER, Finding.LIKELY)
    first = read_trials(StudyFiles(tmp_path / "s" / "s"))[1].config
    assert first["malloc"] == "keep" and (first["precision"] == "bf16") == comes_first


@pytest.mark.slow
def test_where_no_heat_shows_anything_faster_its_reference_is_tried(tmp_path: Path) -> None:
    training = Training(Case(0, 0.02, 10.0, launches=6.0, malloc=True))
    training.effects, training.load_per_s = {}, 20_000.0
    outcome = answer(training.case, tmp_path / "s", training).outcome
    assert outcome is not None and outcome.found is not Finding.FASTER
    # All entrants of the heat kept their memory, and what that gives no heat shows.
    assert "kept memory may be faster" not in str(outcome)
    tried = [trial.config["malloc"] for trial in read_trials(StudyFiles(tmp_path / "s" / "s"))]
    assert tried[:2] == ["default", "keep"]


def promised_of_equals(seeds: range, folder: Path) -> list[Answer]:
    """Return the searches that call something faster, or likely to be, where everything is equally fast."""
    cells = itertools.product(seeds, EQUALS_NOISES, EQUALS_LAUNCHES, (True, False), (True, False))
    cases = (
        Case(seed, noise, 10.0, launches=launches, script=script, malloc=malloc, gains=False)
        for seed, noise, launches, script, malloc in cells
    )
    found = [answer(case, folder / str(i)) for i, case in enumerate(cases)]
    assert sum(a.outcome is not None for a in found) > 0.9 * len(found)
    return [a for a in found if a.outcome is not None and a.outcome.found in (Finding.FASTER, Finding.LIKELY)]


@pytest.mark.slow
def test_of_equals_hardly_any_is_called_faster(tmp_path: Path) -> None:
    # Of 48; with an error of 5 % more than six are called so once in a hundred such runs.
    assert len(promised_of_equals(range(1), tmp_path)) <= 6


@pytest.mark.stress
@pytest.mark.timeout(7200)
def test_of_equals_at_most_one_in_twenty_is_called_faster(tmp_path: Path) -> None:
    # Of 960: 48, and two standard deviations.
    assert len(promised_of_equals(range(20), tmp_path)) <= 62


@pytest.mark.stress
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("starved", [True, False])
def test_of_many_searches_ninety_five_of_a_hundred_end_with_a_verdict(
    script: bool, starved: bool, tmp_path: Path
) -> None:
    check(searches(MANY, tmp_path, script=script, starved=starved), 0.95)
