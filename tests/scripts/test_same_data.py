"""What a script's loader delivers is compared, not assumed."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from autotune import stats
from autotune.base.records import CheckPlan, DeliveryPlan, LaunchKind, Probe, TrainCheck, Value

from .conftest import PLAIN, Runner, python

#: How a data set goes on from sample to sample, and what is said of it.
HELD = {
    "nested": "the open file 'numbers.bin' (dataset.subset.dataset.of.shards)",
    "dict": "the open file 'numbers.bin' (dataset.of.shards['a'])",
    "concat": "the open file 'numbers.bin' (dataset.datasets[0].of.shards)",
    "descriptor": "the open file 'numbers.bin', and",
    "global": "a generator of random numbers of its own (rng)",
    "attribute": "a generator of random numbers of its own",
    "stream": "an iterator (numbers)",
    "cached": "keeps what it has made",
}
SAME = ("plain", "random", "lazy")


@pytest.fixture
def launch(command_launch: Any) -> Any:
    """``launch(kind, kind of launch, configuration)``: its result."""

    def run(script: str, kind: LaunchKind, check: CheckPlan | None = None, **config: Value) -> Any:
        result = command_launch(python("loading.py", script), {**PLAIN, **config}, kind=kind, check=check)
        assert result.status == "complete", result.cause
        return result

    return run


def probe(launch: Any, script: str) -> Probe:
    found = launch(script, LaunchKind.PROBE).probe
    assert isinstance(found, Probe) and found.deliveries is not None and found.deliveries.lost is None
    return found


def checked(launch: Any, script: str, own: Probe, **config: Value) -> TrainCheck:
    plan = stats.plan_beside(own.deliveries)
    assert isinstance(plan, DeliveryPlan)
    found = launch(script, LaunchKind.TRAIN_CHECK, CheckPlan(store="", steps=1, deliveries=plan), **config).check
    assert isinstance(found, TrainCheck) and found.deliveries is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("script", HELD)
def test_what_goes_on_from_sample_to_sample_refuses_workers(launch: Any, script: str) -> None:
    refused = probe(launch, script).outside
    assert HELD[script] in refused["num_workers"]["*"]
    assert "0" not in refused["num_workers"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SAME)
def test_the_same_data_are_compared_and_equal(launch: Any, script: str) -> None:
    own = probe(launch, script)
    assert own.deliveries is not None and own.deliveries.done
    assert "num_workers" not in own.outside and "persistent_workers" not in own.outside
    check = checked(launch, script, own, num_workers=2, prefetch_factor=2, persistent_workers=True)
    found = stats.compare_data(own.deliveries, check.deliveries)  # type: ignore[arg-type]
    assert (found.passed, found.reason, found.epochs) == (True, None, 2)
    assert found.batches >= 10 and found.samples == 8 * found.batches


@pytest.mark.slow
def test_where_steps_take_long_few_batches_are_compared(launch: Any) -> None:
    """A step for each batch that is noted: with sixteen of them, a probe would take a third of a minute."""
    own = probe(launch, "dear")
    assert own.deliveries is not None and own.deliveries.done
    assert [len(epoch.batches) for epoch in own.deliveries.sets[0].epochs[:2]] == [6, 4], "each is drawn twice"
    check = checked(launch, "dear", own, num_workers=2, prefetch_factor=2, persistent_workers=True)
    found = stats.compare_data(own.deliveries, check.deliveries)  # type: ignore[arg-type]
    assert (found.passed, found.reason, found.epochs, found.batches) == (True, None, 2, 10)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["nested", "global", "stream"])
def test_other_data_are_noticed_where_nothing_was_seen_to_move(launch: Any, script: str) -> None:
    own = probe(launch, script)
    check = checked(launch, script, own, num_workers=2, prefetch_factor=2, persistent_workers=False)
    assert own.deliveries is not None and check.deliveries is not None
    unseen = own.deliveries.model_copy(
        update={"sets": tuple(one.model_copy(update={"moved": (), "stores": ()}) for one in own.deliveries.sets)}
    )
    found = stats.compare_data(unseen, check.deliveries)
    assert found.passed is False and found.batches >= 10, found


@pytest.mark.slow
def test_what_a_script_changes_between_epochs_refuses_persistent_workers(launch: Any) -> None:
    own = probe(launch, "curriculum")
    assert "dataset.of.difficulty" in own.outside["persistent_workers"]["true"]
    assert "num_workers" not in own.outside
    anew = checked(launch, "curriculum", own, num_workers=2, prefetch_factor=2, persistent_workers=False)
    assert stats.compare_data(own.deliveries, anew.deliveries).passed  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_data_set_that_is_iterated_has_no_workers_that_persist(launch: Any) -> None:
    own = probe(launch, "iterated")
    assert "iterated" in own.outside["persistent_workers"]["true"]
    kept = checked(launch, "iterated", own, num_workers=2, prefetch_factor=2, persistent_workers=True)
    assert stats.compare_data(own.deliveries, kept.deliveries).passed is False  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "workers"), [("plain", 2), ("nested", 0), ("stream", 0)])
def test_a_run_sets_no_workers_that_nobody_has_compared(run: Runner, script: str, workers: int) -> None:
    ran = run.script("loading.py", script, "2", num_workers=2, prefetch_factor=2)
    assert ran.code == 0, ran.stderr
    text, number = ran.stdout.rsplit(maxsplit=1)
    first, second = json.loads(text)
    assert int(number) == workers
    if script == "stream":
        assert first == list(range(320)) and second == list(range(320, 640))
    else:
        assert sorted(first) == sorted(second) == list(range(320))


@pytest.mark.slow
def test_workers_that_persist_end_when_the_script_changes_their_data_set(run: Runner) -> None:
    ran = run.script("loading.py", "curriculum", "2", num_workers=2, prefetch_factor=2, persistent_workers=True)
    assert ran.code == 0, ran.stderr
    text, number = ran.stdout.rsplit(maxsplit=1)
    assert int(number) == 2
    assert [set(epoch) for epoch in json.loads(text)] == [{0}, {1}]
    assert "the script has changed dataset.of.difficulty" in ran.stderr


@pytest.mark.slow
def test_live_forks_no_worker_of_what_it_may_not_copy(run: Runner) -> None:
    ran = run.run(
        [
            *(sys.executable, "-P", "-m", "autotune", "run", "--live", "--expect", "20s", "--"),
            *python("loading.py", "nested", "12"),
        ]
    )
    assert ran.code == 0, ran.stderr
    text, _ = ran.stdout.rsplit(maxsplit=1)
    assert [sorted(epoch) for epoch in json.loads(text)] == [list(range(320))] * 2
