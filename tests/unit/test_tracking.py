"""Experiment trackers that are missing, that fail, and what a search tells them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.base import tracking
from autotune.base.errors import UnknownNameError, UsageError
from autotune.base.observer import Observer
from autotune.base.tracking import TrackedRun, Tracker, Tracking
from autotune.cli.main import run
from autotune.cli.search import TrackedSearch
from tests.support import make_outcome, make_study_spec, make_trial


class Kept(Tracker):
    """Keeps what it is told, and fails at a given call."""

    package = pip = "kept"
    fails_at = 0
    calls: list[tuple[Any, ...]] = []  # noqa: RUF012

    def __init__(self, run: TrackedRun) -> None:
        self._note("begin", run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._note("log", step, dict(values))

    def tell(self, step: int, name: str, text: str) -> None:
        self._note("tell", step, name, text)

    def end(self, *, failed: bool) -> None:
        self._note("end", failed)

    def _note(self, *call: Any) -> None:
        print("told")
        self.calls.append(call)
        if len(self.calls) == self.fails_at:
            raise ConnectionError("nobody there\nsecond line")


@pytest.fixture
def kept() -> Callable[[int], type[Kept]]:
    return lambda fails_at=0: type("Made", (Kept,), {"calls": [], "fails_at": fails_at})  # type: ignore[return-value]


@pytest.fixture
def tracked_run(tmp_path: Path) -> TrackedRun:
    return TrackedRun("net", "net-1", "f00d", {"batch_size": 8}, tmp_path)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_tracker_that_fails_is_told_nothing_more_and_the_user_once(
    kept: Callable[..., type[Kept]], tracked_run: TrackedRun, capsys: pytest.CaptureFixture[str], fails_at: int
) -> None:
    failing, other, said = kept(fails_at), kept(), []
    told = Tracking([failing, other], lambda: tracked_run, said.append)
    told.log(1, {"loss": 2.0, "rate": None})
    told.tell(1, "note", "text")
    told.end()
    told.end()
    assert said == ["kept fails, and is told nothing more (ConnectionError: nobody there)"]
    assert len(failing.calls) == fails_at
    assert other.calls == [
        *(("begin", tracked_run), ("log", 1, {"loss": 2.0}), ("tell", 1, "note", "text"), ("end", False)),
    ]
    # A command's output is its own.
    assert capsys.readouterr().out == ""


def test_nothing_begins_before_something_is_told(kept: Callable[..., type[Kept]], tracked_run: TrackedRun) -> None:
    kind = kept()
    Tracking([kind], lambda: tracked_run, print).end(failed=True)
    assert kind.calls == []


def test_a_missing_package_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    for name in tracking.names():
        with pytest.raises(UsageError, match=f"--track {name} needs the package") as found:
            tracking.check([name])
        assert found.value.advice == f"pip install {tracking.tracker_named(name).pip}."
    with pytest.raises(UnknownNameError, match="unknown tracker 'tensorbord'") as unknown:
        tracking.check(["tensorbord"])
    assert unknown.value.closest == ("tensorboard",)
    assert run(["search", "--model", "resnet50", "--track", "wandb"]) == 2
    assert "pip install wandb" in capsys.readouterr().err.lower()


def test_a_search_is_one_run_with_a_step_for_each_trial(kept: Callable[..., type[Kept]], tmp_path: Path) -> None:
    kind, spec, outcome = kept(), make_study_spec("net-1"), make_outcome()
    watched = TrackedSearch(Observer(), [kind], tmp_path)
    watched.begins(spec, "headline")
    watched.trial_ends(make_trial(3, {"batch_size": 16, "precision": "bf16"}, 120.0))
    watched.ends()
    watched.concludes(outcome)
    watched.tracking.end(failed=False)
    (_, begun), *told, ended = kind.calls
    assert begun.key == spec.mark and begun.folder == tmp_path / "net-1" and begun.parameters["seed"] == 0
    assert told[0][:2] == ("log", 3) and told[0][2]["samples_per_second"] == 120.0
    assert told[1][:3] == ("tell", 3, "trial/00003") and "bf16" in told[1][3] and told[1][3].startswith("complete: ")
    assert told[2][2]["best_samples_per_second"] == outcome.best.samples_per_second
    assert told[3][2] == "outcome" and str(outcome.found) in told[3][3]
    assert ended == ("end", False)
