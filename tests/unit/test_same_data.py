"""What a loader delivers is compared with what it delivers under other settings."""

from __future__ import annotations

import json
import logging
import math
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune import stats
from autotune.base.records import Delivered, DeliveredBatch, DeliveredEpoch, deliveries_of
from autotune.launcher import script_entry

sys.path.append(str(script_entry.FOLDER))
from autotune_agent import dataset_state

SCRIPT = Path(__file__).parent / "made_up_sets.py"


def cases(first: int, count: int, *more: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(first), str(count), *more], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == count
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [50, pytest.param(500, marks=[pytest.mark.stress, pytest.mark.timeout(1200)])])
def test_what_passes_is_the_same_data(count: int) -> None:
    found = cases(0, count)
    assert [case for case in found if case["passed"] and not case["safe"]] == []
    # It is no refusal of everything.
    assert any(case["passed"] for case in found)


@pytest.mark.slow
@pytest.mark.parametrize("count", [14, pytest.param(100, marks=[pytest.mark.stress, pytest.mark.timeout(600)])])
def test_data_sets_without_state_are_not_refused(count: int) -> None:
    assert [case for case in cases(1000, count, "plain") if not case["passed"]] == []


def test_workers_that_read_all_of_an_iterated_set_are_noticed() -> None:
    def delivered(*digests: str) -> Delivered:
        batches = tuple(DeliveredBatch(samples=None, digests={"": digest}) for digest in digests)
        return Delivered(kind="Lines", iterable=True, workers=2, epochs=(DeliveredEpoch(batches=batches),))

    assert stats.times_read(delivered("a", "a", "b", "b")) == 2
    assert stats.times_read(delivered("a", "b", "c", "d")) == 1
    assert stats.times_read(delivered("a", "a", "a", "a")) == 1


class Held:
    """Attributes as given."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


@pytest.mark.parametrize(
    ("grown", "again_s", "is_one"),
    [(("kept",), 0.03, True), (("kept",), 0.08, False), ((), 0.03, False)],
    ids=["a third of the time", "hardly less", "nothing kept"],
)
def test_a_cache_is_told_by_what_it_keeps_and_saves(grown: tuple[str, ...], again_s: float, is_one: bool) -> None:
    seen = Delivered(kind="Photos", iterable=False, grown=grown, first_s=(0.1,) * 5, again_s=(again_s,) * 4 + (0.2,))
    assert (stats.is_cached(seen) is not None) is is_one


def test_what_has_not_changed_is_not_said_to_have() -> None:
    held = Held(nan=math.nan, log=logging.getLogger("looked at"), numbers=list(range(1000)), some={1, 2})
    before = dataset_state.walk({"dataset": held})
    held.log.isEnabledFor(logging.INFO)
    assert dataset_state.walk({"dataset": held}).changed_since(before) == []
    held.numbers[999] = 0
    assert dataset_state.walk({"dataset": held}).changed_since(before) == ["all(dataset.numbers)"]


def test_a_look_at_connections_leaves_their_mode_as_it_is() -> None:
    before = socket.getdefaulttimeout()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            socket.setdefaulttimeout(10)
            try:
                places = dataset_state.open_places()
                one.sendall(b"sample")
                moved = dataset_state.moved_places(places, dataset_state.open_places())
            finally:
                socket.setdefaulttimeout(before)
            assert one.getblocking() and any("127.0.0.1" in what for what in moved)


def test_a_pipe_goes_on_whenever_it_is_looked_at() -> None:
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as child:
        held = Held(lines=child.stdout)
        assert "the open file" in str(dataset_state.walk({"dataset": held}).is_held())


def test_a_second_loader_with_the_same_indices_shows_a_cache_of_its_own() -> None:
    """A validation set is read in order after a training set that was."""

    def made(loader: int, indices: list[int], *seconds: float) -> list[dict[str, Any]]:
        begun = {"kind": "Set", "iterable": False, "workers": 0, "persist": False}
        return [
            {"e": "loader", "l": loader, **begun},
            *({"e": "made", "l": loader, "pid": 1, "i": indices, "s": s, "used": []} for s in seconds),
        ]

    first, second = deliveries_of([*made(0, [0, 1], 0.2, 0.2), *made(1, [0, 1], 0.4, 0.1)]).sets
    assert (first.first_s, second.first_s, second.again_s) == ((0.2,), (0.4,), (0.1,))
