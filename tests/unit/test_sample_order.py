"""Launches that read one after another, and never the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from autotune.base.layout import StudyFiles
from autotune.base.records import CommandRef, TrialResult, TrialSpec, TrialStatus
from autotune.study.history import write_result
from autotune.study.tables import GUESS_BATCHES, SamplesRead
from autotune.training.feed import SampleOrder
from tests.support import make_spec


def test_a_pass_has_every_sample_once() -> None:
    order = SampleOrder(3).over(50)
    assert sorted(order) == list(range(50)) and order.drawn == len(order) == 50
    second = list(order)
    assert sorted(second) == list(range(50)) != second
    assert list(SampleOrder(3).over(50)) != list(SampleOrder(4).over(50))


def test_a_launch_goes_on_where_the_one_before_has_ended() -> None:
    whole = [*SampleOrder(0).over(40), *SampleOrder(0, first=40).over(40)]
    first = SampleOrder(0).over(40)
    taken = [index for _, index in zip(range(15), first, strict=False)]
    # Of one more, that was asked for in advance, nobody has heard.
    assert first.drawn in (15, 16)
    later = SampleOrder(0, first=first.drawn).over(40)
    seen = list(later)
    assert not set(taken) & set(seen[: 40 - first.drawn])
    assert seen == whole[first.drawn : first.drawn + 40]


def test_an_iteration_that_is_given_up_counts_what_was_asked_for() -> None:
    order = SampleOrder(0).over(64)
    loader = DataLoader(list(range(64)), batch_size=4, sampler=order, num_workers=1, prefetch_factor=3)  # type: ignore[arg-type]
    batches = iter(loader)
    first = next(batches)
    del batches
    assert 4 <= order.drawn <= 4 * 4
    again = next(iter(loader))
    assert not set(first.tolist()) & set(again.tolist())


@pytest.fixture
def study(tmp_path: Path) -> StudyFiles:
    return StudyFiles(tmp_path / "study")


def ended(study: StudyFiles, launch: str, reading: SamplesRead, drawn: int | None, **spec: object) -> TrialSpec:
    """Let a launch begin where the others have ended, and end."""
    files = study.launch(launch)
    begun = make_spec(files.folder, launch=launch, batch_size=8, first_sample=reading.samples, **spec)
    files.folder.mkdir(parents=True)
    files.spec.write_text(begun.model_dump_json())
    result = TrialResult(launch=launch, status=TrialStatus.COMPLETE, samples_drawn=drawn)
    write_result(files, result)
    reading.add(begun, result)
    return begun


def test_what_launches_read_adds_up_and_survives_a_resume(study: StudyFiles) -> None:
    reading = SamplesRead(study)
    assert reading.samples == 0
    assert [ended(study, f"z{n}", reading, drawn).first_sample for n, drawn in enumerate((100, 0, 60))] == [0, 100, 100]
    assert reading.samples == SamplesRead(study).samples == 160
    # A launch that was killed cannot tell; it has read no more than others have.
    ended(study, "a-later-one", reading, None)
    assert reading.samples == 260


def test_a_launch_that_was_killed_together_with_the_search_counts(study: StudyFiles) -> None:
    reading = SamplesRead(study)
    ended(study, "b", reading, 100)
    files = study.launch("a")
    files.folder.mkdir(parents=True)
    files.spec.write_text(make_spec(files.folder, launch="a", batch_size=8, first_sample=100).model_dump_json())
    assert SamplesRead(study).samples == 200


def test_before_any_launch_has_told_a_guess_is_made(study: StudyFiles) -> None:
    reading = SamplesRead(study)
    ended(study, "killed", reading, None)
    assert reading.samples == 8 * GUESS_BATCHES


def test_a_script_reads_in_an_order_of_its_own(study: StudyFiles) -> None:
    reading = SamplesRead(study)
    ended(study, "script", reading, None, command=CommandRef(words=("python", "train.py"), folder="/"))
    assert reading.samples == 0


def test_ranks_divide_a_pass_among_them() -> None:
    orders = [SampleOrder(3, first=7, rank=rank, ranks=2).over(51) for rank in (0, 1)]
    assert [len(order) for order in orders] == [25, 25]
    both = [list(order) for order in orders]
    together = [index for pair in zip(*both, strict=True) for index in pair]
    alone = SampleOrder(3, first=7).over(51)
    assert together == list(alone)[:50]
    assert [order.drawn for order in orders] == [25, 25]
