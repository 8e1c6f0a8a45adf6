"""A database that loses its connection in the middle of a search: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from autotune.base.errors import InterruptedSearch, MachineError
from autotune.base.records import TrialStatus
from autotune.study.budget import Budget
from autotune.study.database import PATIENCE_S, LostConnection, Patience, PatientStorage
from autotune.study.history import History
from tests.support import FakeClock

from .remembering import BASELINE, OTHER, SPACE, new_study, run_one

ADDRESS = "postgresql://tuner@host/tunings"


class Losing:
    """A storage that loses the connection at every other call on average: before the call, or with its answer."""

    def __init__(self, after: bool) -> None:
        self._real = InMemoryStorage()
        self._after = after
        self._rng = random.Random(1)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._rng.random() < 0.5:
                return getattr(self._real, name)(*arguments, **named)
            if self._after:
                getattr(self._real, name)(*arguments, **named)
            raise LostConnection("server closed the connection unexpectedly")

        return call


def never() -> None:
    raise LostConnection("connection refused")


@pytest.mark.parametrize("after", [False, True])
def test_half_of_all_answers_are_lost(tmp_path: Path, after: bool) -> None:
    def stored(storage: Any) -> list[tuple[Any, ...]]:
        made = optuna.create_study(study_name="s", storage=storage, direction="maximize")
        history = History(files, SPACE, study=made)
        run_one(history, BASELINE, TrialStatus.COMPLETE)
        run_one(history, OTHER, TrialStatus.OOM)
        history.end("enough", 7.0)
        # An enqueued trial, and one that the sampler would propose.
        history.optuna.enqueue_trial({"precision": "bf16"})
        number, config, _ = history.ask()
        assert (number, config["precision"]) == (2, "bf16")
        assert history.optuna.ask().number == 3
        study = optuna.load_study(study_name="s", storage=storage)
        found = study.get_trials()
        assert study.user_attrs["autotune_ended"] == "enough"
        return [(t.number, t.state, t.values, t.user_attrs, t.constraints) for t in found]

    files = new_study(tmp_path)
    lost = stored(PatientStorage(Losing(after), Patience(ADDRESS, FakeClock())))  # type: ignore[arg-type]
    assert lost == stored(InMemoryStorage())
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.RUNNING]
    assert [state for _, state, *_ in lost] == states


def test_waiting_is_said_once_and_is_not_counted(tmp_path: Path) -> None:
    clock, said = FakeClock(), []
    budget = Budget(new_study(tmp_path), 600.0, clock)
    patience = Patience(ADDRESS, clock, budget, said.append)
    clock.advance(10.0)
    back_s = clock.now() + 60.0

    def ask(_again: bool) -> str:
        if clock.now() < back_s:
            never()
        return "answer"

    assert patience.until_answered(ask) == "answer"
    assert budget.spent_s == pytest.approx(10.0) and clock.now() >= back_s
    assert said == [f"{ADDRESS} does not answer; the search waits for it, 5 min at most"]


def test_patience_ends(tmp_path: Path) -> None:
    clock = FakeClock()
    began_s = clock.now()
    with pytest.raises(MachineError, match=r"has not answered for 5 min: connection refused") as caught:
        Patience(ADDRESS, clock).until_answered(lambda _again: never())
    assert PATIENCE_S < clock.now() - began_s < PATIENCE_S + 10
    # Only a search is resumed.
    assert caught.value.advice == "try again once it answers."
    with pytest.raises(MachineError) as caught:
        Patience(ADDRESS, clock, advice="resume it").until_answered(lambda _again: never())
    assert caught.value.advice == "resume it"


def test_a_signal_ends_the_waiting() -> None:
    with pytest.raises(InterruptedSearch) as caught:
        Patience(ADDRESS, FakeClock(), stop=lambda: signal.SIGTERM).until_answered(lambda _again: never())
    assert caught.value.exit_code == 143
