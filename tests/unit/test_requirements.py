"""What a winner must meet: how it is written, and how far measurements are from it."""

from __future__ import annotations

import math

import pytest

from autotune.base.errors import UnknownNameError, UsageError
from autotune.base.records import FIGURES, Goal
from autotune.space.formatting import unmet_text
from autotune.space.requirements import Requirements, requirement
from tests.support import make_measurement

GIB = 2**30


def required(*texts: str, goal: Goal | None = None) -> Requirements:
    return Requirements.parsed(texts, goal or Goal())


@pytest.mark.parametrize(
    ("text", "name", "limit"),
    [
        ("peak_memory<=8GiB", "peak_memory", 8 * GIB),
        (" memory <= 512 MiB ", "peak_memory", GIB / 2),
        ("throughput>=50", "throughput", 50),
        ("rate>=1e3", "throughput", 1000),
        ("compile_time<=1m30s", "compile_time", 90),
        ("epoch_turn<=80ms", "epoch_turn", 0.08),
        ("loader_wait<=5%", "loader_wait", 0.05),
        ("loader_wait<=0.05", "loader_wait", 0.05),
        ("energy<=2.5", "energy_per_sample", 2.5),
    ],
)
def test_a_requirement_is_read(text: str, name: str, limit: float) -> None:
    found = requirement(text)
    assert (found.figure.name, found.limit) == (name, pytest.approx(limit))
    assert found.at_most == ("<=" in text)
    # What is written into the study is read as the same.
    assert requirement(str(found)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("peak_memory", "is no requirement"),
        ("peak_memory<8GiB", "is no requirement"),
        ("peak_memory==8GiB", "is no requirement"),
        ("peak_memory<=", "is no requirement"),
        ("peak_memory<=8 apples", "is no size"),
        ("compile_time<=8GiB", "is no duration"),
        ("throughput>=fast", "'fast' is no number"),
        ("throughput>=5%", "'5%' is no number"),
        ("throughput>=1" + 400 * "0", "is beyond any figure"),
        ("training_time<=8h", "how long the training is was not stated"),
        ("cost<=100", "what an hour of the machine costs was not stated"),
    ],
)
def test_what_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        required(text)


def test_an_unknown_figure_is_named_with_those_that_there_are() -> None:
    with pytest.raises(UnknownNameError) as raised:
        required("peak_memmory<=8GiB")
    assert "peak_memory" in f"{raised.value} {raised.value.advice}"


def test_the_largest_peak_counts_and_the_mean_rate() -> None:
    launches = [
        make_measurement(rate).model_copy(update={"peak_allocated_bytes": peak * GIB})
        for rate, peak in ((90, 7), (110, 9))
    ]
    assert required("throughput>=100").met_by(launches)
    assert not required("throughput>=101").met_by(launches)
    assert required("memory<=9GiB").met_by(launches)
    over = required("memory<=8GiB").excess(launches)
    assert over == pytest.approx(math.log(9 / 8))
    # The worst of several counts.
    assert required("memory<=8GiB", "throughput>=200").excess(launches) == pytest.approx(math.log(2))
    said = unmet_text(required("memory<=8GiB", "throughput>=200"), launches)
    assert said == (
        "its peak_memory is 9.00 GiB, and peak_memory<=8GiB is required; "
        "its throughput is 100 samples/s, and throughput>=200 is required"
    )
    assert unmet_text(required("throughput>=100"), launches) is None


def test_a_figure_that_was_not_measured_does_not_meet_anything() -> None:
    without = [make_measurement(100)]
    assert required("energy<=1").excess(without) == math.inf
    assert unmet_text(required("energy<=1"), without) == (
        "its energy_per_sample is not known, and energy_per_sample<=1 is required"
    )


def test_each_figure_of_a_full_measurement_is_known() -> None:
    full = make_measurement(100).model_copy(
        update={
            "peak_allocated_bytes": GIB,
            "host_memory_bytes": GIB,
            "epoch_turn_s": 1.0,
            "energy_j": 10.0,
            "loader_wait_fraction": 0.1,
        }
    )
    goal = Goal(samples=1000, price_per_hour=1.0)
    for figure in FIGURES.values():
        assert isinstance(figure.of(full, goal), float | int), figure.name


def test_a_rate_of_steps_is_told_in_steps() -> None:
    launches = [make_measurement(120.0).model_copy(update={"counts": "steps"})]
    assert unmet_text(required("throughput>=200"), launches) == (
        "its throughput is 120 steps/s, and throughput>=200 is required"
    )
