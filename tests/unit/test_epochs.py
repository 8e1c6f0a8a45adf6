"""What the report says of whole trainings: hours, and where the files of each epoch come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest

from autotune.base.records import Bottleneck, DataRef, Limit, Outcome, SlowStore, Standing, TrialResult, TrialStatus
from autotune.report import Material
from autotune.report.document import Facts, Grid
from autotune.report.material import LaunchRecord
from autotune.report.sections import epochs, saved
from autotune.space.formatting import seconds_text
from tests.support import make_measurement, make_outcome, make_spec, make_study_spec, make_trial

OUTCOME = make_outcome()
TRIALS = [make_trial(0, OUTCOME.baseline.config, 30.4)]
FOLDER = DataRef(kind="folder", path="/data", page_cache="warm")
COMPLETE = TrialResult(launch="x", status=TrialStatus.COMPLETE)
SAMPLES = make_measurement(30.4).epoch_samples


def material(data: DataRef | None, outcome: Outcome = OUTCOME, **asked: Any) -> Material:
    """A study over such data whose request has such options."""
    spec = make_study_spec(**asked)
    launches = [] if data is None else [LaunchRecord(make_spec(Path("/x"), data=data), COMPLETE)]
    return Material("net-1", "net-1", PurePath("/home/me"), spec, TRIALS, outcome, launches)


def training(standing: Standing, samples: int) -> str:
    return seconds_text(standing.startup_s + standing.compile_s + samples / standing.samples_per_second)


def told(data: DataRef | None = FOLDER, **changes: Any) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Return the rows of the table, and the facts below it."""
    outcome = OUTCOME.model_copy(update={"dataset_samples": SAMPLES, "samples_read": 500, **changes})
    (section,) = epochs(outcome, material(data, outcome, epochs=90))
    grid, facts = section.parts
    assert isinstance(grid, Grid) and isinstance(facts, Facts)
    return list(grid.rows), dict(facts.rows)


def limit(**rates: Any) -> tuple[Bottleneck, ...]:
    best = OUTCOME.best
    return (
        Bottleneck(trial=best.trial, limit=Limit.LOADER, samples_per_s=best.samples_per_second, sentence="", **rates),
    )


def test_nobody_who_has_not_asked_is_told() -> None:
    assert epochs(OUTCOME, material(FOLDER)) == []


def test_hours_follow_from_rates() -> None:
    rows, facts = told(FOLDER.model_copy(update={"page_cache": "cold"}))
    assert rows[0][1] == "as later ones"
    assert rows[0][4] == training(OUTCOME.baseline, 90 * SAMPLES)
    assert "every epoch" in facts["where its files come from"]
    assert facts["what the launches read"] == f"500 of {SAMPLES:,} samples; none was read twice"


def test_the_first_epoch_counts_by_its_own_rate() -> None:
    rows, facts = told(bottlenecks=limit(cold_per_s=(1.0, 0.9, 1.1), local_per_s=100.0))
    best = rows[-1]
    first, later = SAMPLES / 1.0, SAMPLES / OUTCOME.best.samples_per_second
    assert best[1] == seconds_text(first)
    best_ = OUTCOME.best
    assert best[4] == seconds_text(best_.startup_s + best_.compile_s + first + 89 * later)
    assert best[3].startswith("about ")
    assert rows[0][1] == "not measured" and rows[0][4].startswith("at least ")
    assert "page cache, into which they fit" in facts["where its files come from"]


@pytest.mark.parametrize(
    ("cached", "told_of"),
    [(0.0, "in every epoch: it has no cache"), (0.25, "later 25 % of the files"), (1.0, "its cache in all later ones")],
)
def test_what_a_store_delivers_depends_on_its_cache(cached: float, told_of: str) -> None:
    data = FOLDER.model_copy(update={"store": SlowStore(latency_s=0.1, cached=cached)})
    assert told_of in told(data)[1]["where its files come from"]


def test_orders_that_are_not_ours_are_not_spoken_of() -> None:
    assert "what the launches read" not in told(samples_read=0)[1]
    assert "what the launches read" not in told(DataRef(kind="generated", path="/data", page_cache="warm"))[1]


def test_samples_that_were_read_again_are_said() -> None:
    assert told(samples_read=3 * SAMPLES)[1]["what the launches read"] == f"each of {SAMPLES:,} samples 3.0 times"


def test_an_epoch_of_unknown_length_has_no_hours() -> None:
    trial = make_trial(0, OUTCOME.baseline.config, 30.4)
    measured = trial.result.measurement
    assert measured is not None
    result = trial.result.model_copy(update={"measurement": measured.model_copy(update={"epoch_samples": 0})})
    given = replace(material(None, epochs=3), trials=[trial.model_copy(update={"result": result})])
    (section,) = epochs(OUTCOME, given)
    assert "not known" in str(section.parts[0])
    # Samples need no epochs.
    samples = replace(given, spec=make_study_spec(samples=10**6))
    (section,) = epochs(OUTCOME, samples)
    grid = section.parts[0]
    assert isinstance(grid, Grid) and grid.columns[4].title == "1,000,000 samples"
    assert grid.rows[0][1:5] == ("-", "-", "", training(OUTCOME.baseline, 10**6))


def test_what_is_saved_is_said_in_hours_and_where_an_hour_has_a_price_in_money() -> None:
    best, base = OUTCOME.best, OUTCOME.baseline
    ((name, said),) = saved(OUTCOME, best, material(None, epochs=90))
    assert name == "saves" and said.startswith(f"90 epochs take {training(best, 90 * SAMPLES)} instead of ")
    hours = [(s.startup_s + s.compile_s + 10**9 / s.samples_per_second) / 3600 for s in (best, base)]
    _, (name, said) = saved(OUTCOME, best, material(None, samples=10**9, price_per_hour=2.5))
    assert name == "costs" and said == f"{2.5 * hours[0]:,.2f} instead of {2.5 * hours[1]:,.2f}, at 2.50 an hour"
    # Who has not said how long the training is, is told of an epoch.
    ((_, said),) = saved(OUTCOME, best, material(None))
    assert said.startswith(f"an epoch of {SAMPLES:,} samples takes {seconds_text(SAMPLES / best.samples_per_second)}")


def test_trainings_are_compared_by_the_same_kind_of_first_epoch() -> None:
    outcome = OUTCOME.model_copy(update={"bottlenecks": limit(cold_per_s=(1.0, 0.9, 1.1))})
    best, base = outcome.best, outcome.baseline
    ((name, said),) = saved(outcome, best, material(None, outcome, epochs=1))
    then, now = (seconds_text(s.startup_s + s.compile_s + SAMPLES) for s in (best, base))
    assert name == "saves" and said.startswith(f"1 epoch takes {then} instead of at least {now}")


def test_what_another_objective_chose_need_not_save_time() -> None:
    slower = OUTCOME.best.model_copy(update={"samples_per_second": OUTCOME.baseline.samples_per_second / 2})
    ((name, said),) = saved(OUTCOME, slower, material(None))
    assert name == "takes" and "less" not in said


def test_a_compiler_that_does_not_pay_off_in_a_short_training_saves_nothing() -> None:
    slow = OUTCOME.best.model_copy(update={"compile_s": 3600.0})
    ((_, said),) = saved(OUTCOME, slow, material(None, samples=1000))
    assert "1 h 00 min" in said and "less" not in said
