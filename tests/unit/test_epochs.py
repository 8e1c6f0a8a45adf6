"""What the report says of whole trainings: hours, and where the files of each epoch come from."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.formatting import seconds_text
from autotune.records import Bottleneck, DataRef, Limit, SlowStore
from autotune.report.document import Facts, Grid
from autotune.report.epochs import epochs
from autotune.testing import make_measurement, make_outcome, make_trial

OUTCOME = make_outcome()
TRIALS = [make_trial(0, OUTCOME.baseline.config, 30.4)]
FOLDER = DataRef(kind="folder", path="/data", page_cache="warm")
SAMPLES = make_measurement(30.4).epoch_samples


def told(data: DataRef | None = FOLDER, **changes: Any) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Return the rows of the table, and the facts below it."""
    outcome = OUTCOME.model_copy(update={"epochs": 90, "dataset_samples": SAMPLES, "samples_read": 500, **changes})
    (section,) = epochs(outcome, data, TRIALS)
    grid, facts = section.parts
    assert isinstance(grid, Grid) and isinstance(facts, Facts)
    return list(grid.rows), dict(facts.rows)


def limit(**rates: Any) -> tuple[Bottleneck, ...]:
    best = OUTCOME.best
    return (
        Bottleneck(trial=best.trial, limit=Limit.LOADER, samples_per_s=best.samples_per_second, sentence="", **rates),
    )


def test_nobody_who_has_not_asked_is_told() -> None:
    assert epochs(OUTCOME, FOLDER, TRIALS) == []


def test_hours_follow_from_rates() -> None:
    rows, facts = told(FOLDER.model_copy(update={"page_cache": "cold"}))
    assert rows[0][1] == "as later ones"
    assert rows[0][4] == seconds_text(90 * SAMPLES / OUTCOME.baseline.samples_per_second)
    assert "every epoch" in facts["where its files come from"]
    assert facts["what the launches read"] == f"500 of {SAMPLES:,} samples; none was read twice"


def test_the_first_epoch_counts_by_its_own_rate() -> None:
    rows, facts = told(bottlenecks=limit(cold_per_s=(1.0, 0.9, 1.1), local_per_s=100.0))
    best = rows[-1]
    first, later = SAMPLES / 1.0, SAMPLES / OUTCOME.best.samples_per_second
    assert best[1] == seconds_text(first)
    assert best[4] == seconds_text(first + 89 * later)
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
    (section,) = epochs(OUTCOME.model_copy(update={"epochs": 3}), None, [trial.model_copy(update={"result": result})])
    assert "not known" in str(section.parts[0])
