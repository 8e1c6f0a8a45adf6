"""The budget over several runs, with a clock that the test sets."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.errors import MachineError
from autotune.base.layout import StudyFiles
from autotune.study.budget import PROOF_PART, PROOF_TRIALS, SAVE_EVERY_S, SEARCH_SHARE, Budget, lack, search_share


class ManualClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def files(tmp_path: Path) -> StudyFiles:
    return StudyFiles(tmp_path)


def test_counts_from_its_creation(files: StudyFiles) -> None:
    clock = ManualClock()
    budget = Budget(files, 60.0, clock)
    assert (budget.spent_s, budget.left_s) == (0.0, 60.0)
    clock.sleep(12.5)
    assert (budget.spent_s, budget.left_s) == (12.5, 47.5)
    clock.sleep(100)
    assert budget.left_s == -52.5


def test_continues_the_count_of_an_earlier_run(files: StudyFiles) -> None:
    first = ManualClock()
    budget = Budget(files, 60.0, first)
    first.sleep(20)
    budget.save()
    # After a reboot, the monotonic clock starts anywhere.
    second = ManualClock(now=3.0)
    budget = Budget(files, 60.0, second)
    second.sleep(1)
    assert budget.spent_s == 21.0


def test_a_pause_does_not_count(files: StudyFiles) -> None:
    clock = ManualClock()
    budget = Budget(files, 60.0, clock)
    clock.sleep(5)
    budget.pause()
    clock.sleep(1000)
    assert budget.spent_s == 5.0
    budget.save()
    assert json.loads(files.spent.read_text()) == {"spent_s": 5.0}
    budget.resume()
    clock.sleep(2)
    assert budget.spent_s == 7.0
    budget.resume()
    assert budget.spent_s == 7.0


def test_only_the_waiting_of_a_pause_does_not_count(files: StudyFiles) -> None:
    clock = ManualClock()
    budget = Budget(files, 60.0, clock)
    clock.sleep(5)
    budget.pause()
    clock.sleep(103)
    budget.resume()
    clock.sleep(2)
    budget.settle(100.0)
    assert (budget.spent_s, budget.waited_s) == (10.0, 100.0)
    # Settling once is enough.
    budget.settle(0.0)
    assert (budget.spent_s, budget.waited_s) == (10.0, 100.0)


def test_a_tick_saves_only_after_the_interval(files: StudyFiles) -> None:
    clock = ManualClock()
    budget = Budget(files, 60.0, clock)
    clock.sleep(SAVE_EVERY_S - 0.01)
    budget.tick()
    assert not files.spent.exists()
    clock.sleep(0.01)
    budget.tick()
    assert json.loads(files.spent.read_text()) == {"spent_s": SAVE_EVERY_S}
    clock.sleep(1)
    budget.tick()
    assert json.loads(files.spent.read_text()) == {"spent_s": SAVE_EVERY_S}


@given(st.lists(st.floats(0, 3), max_size=30))
def test_a_kill_loses_at_most_one_saving_interval(steps: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files, clock = StudyFiles(Path(folder)), ManualClock()
        budget = Budget(files, 60.0, clock)
        for step in steps:
            clock.sleep(step)
            budget.tick()
            # The count that the next run would find after a kill at this point.
            kept = Budget(files, 60.0, clock).spent_s
            rounding_s = 0.001
            assert -rounding_s < budget.spent_s - kept < SAVE_EVERY_S + rounding_s


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"spent_s": "much"}', '{"spent_s": null}', "\x00"])
def test_an_unreadable_count_is_not_taken_for_zero(files: StudyFiles, text: str) -> None:
    files.spent.write_text(text)
    with pytest.raises(MachineError, match="cannot be read") as caught:
        Budget(files, 60.0, ManualClock())
    assert caught.value.advice
    assert files.spent.read_text() == text


def test_what_the_proof_needs_is_kept_for_it() -> None:
    assert search_share(3600.0, 60.0) == pytest.approx(1 - PROOF_TRIALS * 60 / 3600)
    assert search_share(3600.0, 1.0) == 1 - PROOF_PART
    # Of a small budget searching has its part all the same.
    assert search_share(60.0, 10.0) == SEARCH_SHARE


@pytest.mark.parametrize(
    ("limit_s", "said"),
    [
        (120.0, None),
        (65.0, "the check of how a winner trains, which takes 2 more: --budget 90s would"),
        (40.0, "a verdict, which takes 5 more: --budget 90s would"),
    ],
)
def test_what_a_budget_has_no_time_for_is_said_with_one_that_has(limit_s: float, said: str | None) -> None:
    found = lack(limit_s, spent_s=20.0, launch_s=8.0, check_s=6.0)
    assert found is None if said is None else found is not None and found.endswith(f"no time for {said}")
    assert found is None or found.startswith("a launch takes 8.0 s here")
