"""Launches that take place in a script which an earlier one has started: a search in which starting is dear."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.base.clock import SystemClock
from autotune.base.records import CommandRef, HeatPlan, LaunchKind, PhaseLimits, TrialResult, TrialStatus, Value
from autotune.launcher import ProcessLauncher
from tests.support import make_spec

from .conftest import PLAIN, PLAN, Runner

OWN: dict[str, Value] = {
    **PLAIN,
    "compile_mode": "off",
    "memory_format": "contiguous",
    "optimizer_impl": "for-loop",
    "persistent_workers": False,
}
BF16 = {**OWN, "precision": "bf16"}

#: Takes a step of 20 ms, or of 10 ms under autocast. `--start-s` is spent before it trains.
SCRIPT = """
import argparse, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--start-s", type=float, default=0.0)
parser.add_argument("--step-s", type=float, default=0.02)
parser.add_argument("--first-s", type=float, default=0.0)
parser.add_argument("--optimizer", default="SGD")
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()

class Sleep(nn.Module):
    def forward(self, outputs):
        time.sleep(options.first_s)
        options.first_s = 0.0
        time.sleep(options.step_s / (2 if outputs.dtype == torch.bfloat16 else 1))
        return outputs

torch.set_num_threads(1)
time.sleep(options.start_s)
model = nn.Sequential(nn.Conv2d(3, 8, 3), Sleep(), nn.Flatten(), nn.Linear(288, 10))
optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(800, 3, 8, 8), torch.arange(800) % 10)
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=options.workers)
for epoch in range(1000):
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
"""


class Study:
    """Launches of the script, one after the other, in folders of their own."""

    def __init__(self, launcher: ProcessLauncher, folder: Path) -> None:
        self.launcher, self.folder = launcher, folder
        (folder / "train.py").write_text(SCRIPT)
        self.options: tuple[str, ...] = ()

    def __call__(self, name: str, kind: LaunchKind, config: dict[str, Value] = OWN, **spec: Any) -> TrialResult:
        words = (sys.executable, "train.py", *self.options)
        asked = make_spec(
            self.folder / name,
            launch=name,
            command=CommandRef(words=words, folder=str(self.folder)),
            config=config,
            kind=kind,
            plan=PLAN,
            **spec,
        )
        return self.launcher.run(asked, on_beat=lambda beat: None, stop=lambda: False)


@pytest.fixture
def study(study_mark: str, tmp_path: Path) -> Iterator[Study]:
    launcher = ProcessLauncher(study_mark, SystemClock())
    yield Study(launcher, tmp_path)
    launcher.close()
    assert not launcher.keeps


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kept(study: Study) -> int:
    """Let the script be kept; return its pid."""
    found = study("probe", LaunchKind.PROBE, keeps=True)
    assert found.status is TrialStatus.COMPLETE and found.within is None, found.cause
    assert found.probe is not None and found.probe.deliveries is not None
    assert len(found.probe.deliveries.sets[0].epochs) == 2
    assert study.launcher.keeps
    events = (study.folder / "probe" / "trail.jsonl").read_text().splitlines()
    return next(int(json.loads(line)["pid"]) for line in events if '"begin"' in line)


@pytest.mark.slow
def test_launches_take_place_in_it_one_after_another(study: Study) -> None:
    pid = kept(study)
    own = study("trial-0", LaunchKind.MEASURE, follows=True)
    assert own.status is TrialStatus.COMPLETE and own.within.startswith("probe:"), own.cause
    # A step takes 20 ms and little more, in epochs of their own length again.
    assert 200 < own.measurement.samples_per_s < 420 and own.measurement.epoch_samples == 800
    # It has the start of the process that it took place in, and would have to make one of its own.
    assert own.measurement.startup_s > 0.2 and own.alone_s > own.wall_s + own.measurement.startup_s

    heat = study("heat-1", LaunchKind.HEAT, heat=HeatPlan(entrants=(OWN, BF16), turn_s=0.1, max_rounds=4), follows=True)
    assert (heat.status, heat.within) == (TrialStatus.COMPLETE, own.within), heat.cause
    assert 1.3 < heat.heat.entrants[1].ratio / heat.heat.entrants[0].ratio < 2.3

    lower = study("trial-1", LaunchKind.MEASURE, BF16, follows=True)
    assert (lower.status, lower.within) == (TrialStatus.COMPLETE, own.within), lower.cause
    assert 1.3 < lower.measurement.samples_per_s / own.measurement.samples_per_s < 2.3
    # What one launch has set is nothing of the next.
    again = study("trial-2", LaunchKind.MEASURE, follows=True)
    assert 0.8 < again.measurement.samples_per_s / own.measurement.samples_per_s < 1.25
    assert is_alive(pid)

    apart = study("trial-3", LaunchKind.MEASURE)
    assert (apart.status, apart.within) == (TrialStatus.COMPLETE, None), apart.cause
    assert not is_alive(pid) and not study.launcher.keeps
    assert not (study.folder / "probe" / "trail.jsonl").exists()
    assert not (study.folder / "probe" / "commands.pipe").exists()


@pytest.mark.slow
def test_what_becomes_of_it_says_nothing_of_a_configuration(study: Study) -> None:
    pid = kept(study)
    os.kill(pid, signal.SIGKILL)
    found = study("trial-0", LaunchKind.MEASURE, follows=True)
    assert (found.status, found.within) == (TrialStatus.COMPLETE, None), found.cause


@pytest.mark.slow
def test_one_that_hangs_is_ended_and_the_launch_made_anew(study: Study) -> None:
    pid = kept(study)
    os.kill(pid, signal.SIGSTOP)
    found = study("trial-0", LaunchKind.MEASURE, follows=True, limits=PhaseLimits(compile_s=5.0))
    assert (found.status, found.within) == (TrialStatus.COMPLETE, None), found.cause
    assert not is_alive(pid)


@pytest.mark.slow
def test_what_it_cannot_be_switched_to_has_a_launch_of_its_own(study: Study) -> None:
    # Rprop has no fused step.
    study.options = ("--optimizer", "Rprop")
    kept(study)
    found = study("trial-0", LaunchKind.MEASURE, {**OWN, "optimizer_impl": "fused"}, follows=True)
    assert found.within is None and not study.launcher.keeps


@pytest.mark.slow
def test_nothing_is_kept_that_was_not_asked_for(study: Study) -> None:
    assert study("probe", LaunchKind.PROBE).status is TrialStatus.COMPLETE
    assert not study.launcher.keeps
    found = study("trial-0", LaunchKind.MEASURE, follows=True)
    assert (found.status, found.within) == (TrialStatus.COMPLETE, None), found.cause


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "4"])
def test_one_slow_step_makes_no_slow_training(study: Study, workers: str) -> None:
    study.options = ("--first-s", "4", "--workers", workers)
    kept(study)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "4"])
def test_of_long_steps_one_epoch_is_noted_and_goes_on(study: Study, workers: str) -> None:
    # Six batches that are noted take more than three seconds; another epoch would take as long again. Four workers have
    # eight or more ready by then.
    study.options = ("--step-s", "0.7", "--workers", workers)
    probed = study("probe", LaunchKind.PROBE, keeps=True)
    assert probed.probe is not None, probed.cause
    (noted,) = probed.probe.deliveries.sets
    assert len(noted.epochs) == 1 and len(noted.epochs[0].batches) == 6
    assert "no second epoch was seen" in str(probed.probe.outside["persistent_workers"])
    found = study("trial-0", LaunchKind.MEASURE, follows=True)
    assert found.status is TrialStatus.COMPLETE and found.within.startswith("probe:"), found.cause
    # No epoch has ended early.
    assert found.measurement.epoch_samples == 800 and found.measurement.epoch_turn_s is None


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_search_says_what_is_likely_where_a_launch_takes_long(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = Runner(tmp_path)
    options = ["--budget", "40s", "--allow-busy", "--json", "--fix", "compile_mode=off", "--fix", "batch_size=8"]
    command = [sys.executable, "train.py", "--start-s", "6"]
    ran = run.run([sys.executable, "-P", "-m", "autotune", "search", *options, "--", *command])
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["best"]["config"]["precision"] == "bf16"
    low, high = found["best"]["speedup_ci95"]
    assert 1 < low < high and 1.3 < found["best"]["speedup"] < 2.3
    # It has begun once for the probe, the baseline and all that was compared with it.
    folder = tmp_path / "studies" / found["study"]
    results = [json.loads(path.read_text()) for path in folder.glob("*/*/result.json")]
    (name,) = {r["within"] for r in results if r["launch"].startswith(("heat", "0000"))}
    assert name.startswith("probe-1:")
