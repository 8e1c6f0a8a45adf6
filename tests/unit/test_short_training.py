"""`autotune train` on a workload whose loader is much slower than its step, and whose queue is full when it begins."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autotune import profile as profiles
from autotune.base.records import MeasurePlan
from autotune.cli.main import run
from autotune.training import short_training
from autotune.training.feed import Drain
from autotune.workload.catalog import find_workload
from tests.support import make_profile

#: Two workers make 100 batches of one sample a second at best; a step takes 1 ms. The first step gives them time to
#: fill a queue of 32 batches.
PROMISED_PER_S = 100.0
LOADER_BOUND = {"sample_s": "0.02", "step_s": "0.001", "first_step_s": "0.8"}


@pytest.fixture
def trained(
    tmp_path: Path, workloads: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """``trained(args, steps, as_json=True)``: what `autotune train` prints."""
    monkeypatch.setattr(short_training, "PLAN", MeasurePlan(target_halfwidth=0.1, max_measure_s=4.0))
    # The workload counts its steps, from its import on.
    monkeypatch.delitem(sys.modules, "steady", raising=False)

    def train(args: dict[str, str], steps: int, *, as_json: bool = True) -> Any:
        workload = workloads / "steady.py"
        own = {"name": "steady", "path": str(workload), "args": args}
        configuration = {"batch_size": 1, "num_workers": 2, "prefetch_factor": 16}
        profile = make_profile(
            workload={**own, "sha256": find_workload(str(workload), args).sha256},
            configuration=configuration,
            gives={"samples_per_second": PROMISED_PER_S, "ci95": [99.0, 101.0]},
            conditions={"image_size": None, "data": "none", "epoch_samples": None},
        )
        profiles.write(profile, tmp_path / "profile.yaml")
        given = [word for name, value in args.items() for word in ("--arg", f"{name}={value}")]
        command = ["train", "--profile", str(tmp_path / "profile.yaml"), "--steps", str(steps), *given]
        # What it sets for its own process does not outlast it.
        with mock.patch.dict(os.environ):
            assert run([*command, "--json"] if as_json else command) == 0
        printed = capsys.readouterr().out
        return json.loads(printed.splitlines()[-1]) if as_json else printed

    return train


@pytest.mark.slow
def test_a_full_queue_is_not_counted(trained: Any) -> None:
    found = trained(LOADER_BOUND, steps=5)
    # The steps that draw on the queue run several times as fast. On a busy machine no rate may be known.
    assert 0 < found["samples_per_second"] < 1.1 * PROMISED_PER_S
    assert found["ratio"] or "varied so much" in found["incomparable"] or "had not settled" in found["incomparable"]
    assert found["steps"] > 32 and 5 < found["counted_steps"] < found["steps"]
    low, high = found["ci95"]
    assert low <= found["samples_per_second"] <= high


def test_a_queue_that_is_still_draining_gives_no_rate(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_training, "LONGER_S", 0.0)
    # How long a real queue lasts depends on what else runs here.
    monkeypatch.setattr(Drain, "over", lambda *_: False)
    found = trained(LOADER_BOUND, steps=5)
    assert found["samples_per_second"] is None and found["ratio"] is None
    assert found["incomparable"] == "the loader's queue was still draining after 5 steps"


@pytest.mark.slow
def test_steps_that_have_not_settled_are_not_compared(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_training, "LONGER_S", 1.0)
    printed = trained({"step_s": "0.05", "growth_s": "0.01"}, steps=5, as_json=False)
    assert "ratio     none: the time of a step had not settled after " in printed
    assert "a larger --steps (such as " in printed
