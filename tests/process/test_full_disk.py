"""A full disk stops a search with one sentence; once there is room, the search resumes without loss."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from .alive import on_small_disk

HERE = Path(__file__).parent


@pytest.fixture
def on_a_small_disk(tmp_path):
    """Run a script in its own mount namespace, with a folder of 12 MiB as its first argument."""
    small = tmp_path / "small"
    small.mkdir()
    return lambda script, *arguments: on_small_disk(small, "12m", sys.executable, script, small, *arguments)


@pytest.mark.slow
def test_launches_and_the_studys_memory_say_so_and_work_again_with_room(on_a_small_disk):
    *told, remembered = on_a_small_disk(HERE / "launch_on_a_full_disk.py")
    full = [t for t in told if t["name"].startswith(("no room", "a failure on a full disk"))]
    assert len(full) == 10
    for trial in full:
        assert (trial["raised"], trial["code"]) == ("MachineError", 5), trial
        assert "is full" in trial["says"] or "No space left on device" in trial["says"]
        assert trial["advice"].startswith("free some space")
    others = [t for t in told if t not in full]
    assert [t["raised"] for t in others] == [None] * len(others), others
    ends = {t["name"]: t["status"] for t in others}
    assert (ends["a launch with room"], ends["a failure with room"]) == ("complete", "user_error")
    assert remembered["now"] == [*remembered["before"], *range(len(remembered["before"]), len(remembered["now"]))]
    assert len(remembered["now"]) > len(remembered["before"]) > 0


@pytest.mark.stress
@pytest.mark.parametrize("moments", [["measuring", "recorded"]])
def test_it_stops_the_search_with_one_sentence_and_loses_nothing(on_a_small_disk, moments):
    *runs, last, end = on_a_small_disk(HERE / "fill_the_disk.py", *moments)
    assert [run["moment"] for run in runs] == moments
    known = {}
    for run in runs:
        assert run["code"] == 5, run
        _, said, why = run["stderr"].partition("\nautotune: ")
        assert said and ("is full" in why or "No space left on device" in why), run["stderr"]
        assert "Free some space" in why and len(why.strip().splitlines()) == 2
        assert known.items() <= run["trials"].items(), "a trial was lost, or has changed"
        known = run["trials"]
    assert last["code"] == 0, last["stderr"]
    assert known.items() <= last["trials"].items()
    counted = Counter(config for config, status, _ in last["trials"].values() if status != "interrupted")
    assert counted and max(counted.values()) == 1
    # No configuration was blamed.
    assert {status for _, status, _ in last["trials"].values()} <= {"complete", "pruned", "interrupted"}
    assert end == {"profile": True, "outcome": True}


@pytest.mark.slow
def test_a_training_keeps_its_last_checkpoint_and_goes_on_with_room(on_a_small_disk, whole_profile):
    full, again = on_a_small_disk(HERE / "train_on_a_full_disk.py", whole_profile({"num_workers": 0}))
    assert full["code"] == 5, full["stderr"]
    *_, what, advice = full["stderr"].strip().splitlines()
    assert what.startswith("autotune: no checkpoint could be written: ") and "No space left on device" in what
    assert advice.strip().startswith("Free some space; the same command then goes on from the checkpoint before")
    kinds = [name.partition("-")[0] for name in full["files"]]
    assert kinds == [".lock", "checkpoint", "checkpoint", "history.jsonl", "other"]
    assert again["code"] == 0, again["stderr"]
    assert json.loads(again["stdout"])["resumed_at_step"] == 25 and json.loads(again["stdout"])["epochs"] == 3
