"""What the agent in a script writes, turned into steps of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.child.trail import SEEN_AFTER, SeenStep, Trail, Trained

LOADER = {"arguments": {"batch_size": 4, "num_workers": 2}, "ahead": 4, "kind": "Pictures"}


class Written:
    """A file as an agent writes it, with a step each second."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trail = Trail(path)
        self.at = 100.0

    def event(self, what: str, **facts: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"e": what, "at": self.at, **facts}) + "\n")

    def loader(self, number: int = 0, batches: int | None = 1000) -> None:
        self.event("loader", l=number, batches=batches, **LOADER)
        self.event("epoch", l=number, batches=[])

    def steps(self, count: int, *, by: int = 0, batches: int = 1, optimizer: int = 0, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.at += seconds
            self.event("step", o=optimizer, batches=[[by, batches, 4 * batches, 0.1 * batches]] if batches else [])

    def read(self, *, decide: bool = False) -> list[SeenStep]:
        return self.trail.read(decide=decide)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "trail.jsonl")


def test_there_is_nothing_before_the_script_has_begun(written: Written) -> None:
    assert written.read() == [] and written.trail.loader is None and written.trail.torch_version is None


def test_each_step_has_its_time_its_waits_and_its_samples(written: Written) -> None:
    written.event("torch", version="2.6.0", cuda=None)
    written.event("begin", pid=7)
    written.loader()
    written.steps(SEEN_AFTER - 1)
    assert written.read() == [], "another optimizer may take fewer"
    written.steps(2)
    steps = written.read()
    assert len(steps) == SEEN_AFTER, "the very first began with the script"
    assert {(s.seconds, s.wait_s, s.samples, s.whole, s.turned) for s in steps} == {(1.0, 0.1, 4, True, False)}
    assert written.trail.torch_version == "2.6.0" and written.trail.began_at == 100.0
    assert written.trail.loader is not None


def test_half_a_line_is_read_when_it_is_whole(written: Written) -> None:
    written.loader()
    written.steps(SEEN_AFTER)
    whole = written.path.read_bytes()
    written.path.write_bytes(whole[:-7])
    assert written.read() == []
    with written.path.open("ab") as file:
        file.write(whole[-7:])
    assert len(written.read()) == SEEN_AFTER - 1


def test_a_script_that_ended_early_has_taken_the_steps_that_it_took(written: Written) -> None:
    written.loader()
    written.steps(3)
    assert written.read() == []
    assert len(written.read(decide=True)) == 2


def test_gradients_of_several_batches_are_one_step(written: Written) -> None:
    written.loader()
    written.steps(SEEN_AFTER, batches=3)
    assert {(s.samples, round(s.wait_s, 6)) for s in written.read()} == {(12, 0.3)}


def test_of_several_optimizers_the_one_that_steps_least_ends_a_step(written: Written) -> None:
    written.loader()
    for _ in range(4):
        written.steps(5, optimizer=0)
        written.steps(1, optimizer=1, batches=0)
    steps = written.read()
    assert [(s.seconds, s.samples) for s in steps] == [(6.0, 20)] * 3


def trained_in(steps: list[SeenStep]) -> Trained:
    found = Trained()
    for step in steps:
        found.add(step)
    return found


def test_what_trains_is_told_for_each_batch(written: Written) -> None:
    """Three batches a step, a discriminator that trains on each, and an update that a scaler has left out."""
    written.loader()
    for number in range(20):
        for _ in range(3):
            written.at += 1.0
            written.event("step", o=0, batches=[[0, 1, 4, 0.1]], backwards=2)
        written.event("step", o=1, batches=[], backwards=1, **({"left_out": 1} if number == 9 else {}))
    found = trained_in(written.read())
    assert found.per_batch == (7 / 3, (4 * 19 + 1) / (3 * 19))
    assert found.unlike((7 / 3, 4 / 3)) is None and found.unlike(None) is None
    assert found.unlike((7 / 3, 2.0)) == "32 % of batches fail: 1.35 updates per batch instead of 2.00"
    assert found.unlike((1.0, 4 / 3)) == "2.33 backward passes per batch instead of 1.00"
    assert found.unlike((0.0, 0.0)) is None, "what is not seen is not compared"


def test_one_batch_of_a_few_may_be_that_of_another_step(written: Written) -> None:
    written.loader()
    for count in (1, 1, 1, 2, 1, 1):
        written.at += 1.0
        written.event("step", o=0, batches=[[0, count, 4 * count, 0.1]], backwards=1)
    assert trained_in(written.read()).unlike((1.0, 1.0)) is None


def test_samples_that_no_backward_pass_has_seen_do_not_count(written: Written) -> None:
    written.loader()
    for backwards, count in [(2, 2)] * 10 + [(1, 3), (0, 1), (2, 2)]:
        written.at += 1.0
        written.event("step", o=0, batches=[[0, count, 4 * count, 0.1]], backwards=backwards)
    assert [step.samples for step in written.read()] == [8] * 9 + [4, 0, 8]


def test_the_turn_of_an_epoch_is_no_step(written: Written) -> None:
    written.loader(batches=8)
    written.steps(8)
    written.event("epoch", l=0, batches=[])
    written.steps(4)
    steps = written.read()
    assert [s.whole for s in steps] == [True] * 6 + [False] + [False] + [True] * 3
    assert [s.turned for s in steps] == [False] * 7 + [True] + [False] * 3


@pytest.mark.parametrize("gradients", [False, True])
def test_an_evaluation_is_no_step_and_no_turn(written: Written, gradients: bool) -> None:
    """Some evaluate with gradients off around the model alone, so that their loader seems to be one to train with."""
    written.loader()
    written.steps(SEEN_AFTER)
    if gradients:
        written.loader(1)
        written.at += 30.0
        written.event("step", o=0, batches=[[1, 20, 80, 2.0], [0, 1, 4, 0.1]])
    else:
        written.event("epoch", l=None, batches=[])
        written.steps(1, seconds=30.0)
    written.steps(40)
    steps = written.read()
    assert [s.seconds for s in steps if s.whole] == [1.0] * (SEEN_AFTER - 1 + 40)
    assert not any(s.turned for s in steps)


def test_a_loop_over_resident_data_has_steps_without_samples(written: Written) -> None:
    written.steps(SEEN_AFTER, batches=0)
    assert {(s.samples, s.whole, s.wait_s) for s in written.read()} == {(None, True, 0.0)}


def test_the_devices_clock_counts_where_there_is_one(written: Written) -> None:
    written.loader()
    for number in range(SEEN_AFTER):
        written.at += 0.01
        written.event("step", o=0, batches=[[0, 1, 4, 0.1]], device=0.5 * number)
    assert {s.seconds for s in written.read()} == {0.5}


def test_what_ends_it_is_told_at_once(written: Written) -> None:
    written.event("raised", pid=7, chain=[["builtins.ValueError", [], "mine", {}]])
    assert written.read() == [] and written.trail.raised == [["builtins.ValueError", [], "mine", {}]]


def test_two_loaders_may_deliver_for_each_step(written: Written) -> None:
    written.loader(0)
    written.loader(1)
    for _ in range(SEEN_AFTER):
        written.at += 1.0
        written.event("step", o=0, batches=[[0, 1, 4, 0.1], [1, 1, 8, 0.2]])
    assert {(s.samples, round(s.wait_s, 6), s.whole) for s in written.read()} == {(12, 0.3, True)}


def test_a_loader_that_is_made_anew_for_each_epoch(written: Written) -> None:
    for number in range(3):
        written.loader(number, batches=100)
        written.steps(100, by=number)
    steps = written.read()
    assert sum(s.whole for s in steps) > 3 * 80


def test_another_optimizer_may_take_over(written: Written) -> None:
    written.loader()
    written.steps(10, optimizer=0)
    assert len(written.read()) == 9
    written.steps(30, optimizer=1)
    assert written.read() == []
    written.steps(100, optimizer=1)
    assert len(written.read()) > 90


def test_the_exception_of_the_training_counts_and_not_that_of_its_launcher(written: Written) -> None:
    written.event("begin", pid=8)
    written.event("raised", pid=7, chain=[["a.Failed", [], "", {}]])
    written.event("raised", pid=8, chain=[["builtins.ValueError", [], "mine", {}]])
    written.read()
    assert written.trail.raised is not None and written.trail.raised[0][2] == "mine"
