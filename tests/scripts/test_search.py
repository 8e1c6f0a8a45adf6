"""``autotune search -- python train.py``: a script is tuned as it stands, and then run with what was found."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from autotune.profile import read

from .conftest import SCRIPTS, Ran, Runner

pytestmark = pytest.mark.slow

#: Its loader takes three times as long as its steps, and sleeps, so that workers help whatever else runs.
SLOW_LOADER = [sys.executable, str(SCRIPTS / "steady.py"), "--step-s", "0.01", "--load-s", "0.004", "--epochs", "1000"]

#: Makes its batches itself.
BY_HAND = """
import time, torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.003)
"""


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Ran]:
    run = Runner(tmp_path_factory.mktemp("searched"))
    options = ["--budget", "140s", "--fix", "intra_op_threads=1", "--set", "num_workers=0,2", "--trials", "2"]
    plain = [sys.executable, "-P", "-m", "autotune", "search", "--json", "--allow-busy", *options]
    return run, run.run([*plain, "--fix", "compile_mode=off", "--", *SLOW_LOADER])


@pytest.mark.timeout(300)
def test_a_script_is_tuned_as_it_stands(searched: tuple[Runner, Ran]) -> None:
    run, ran = searched
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["study"] == "steady-1" and found["baseline"]["config"]["num_workers"] == 0
    assert (
        found["best"]["config"]["num_workers"] == 2
        and found["best"]["launches"] >= 2
        and found["best"]["speedup"] > 1.5
    )
    profile = read(run.folder / "studies" / "steady-1" / "profile.yaml")
    assert profile.configuration["num_workers"] == 2 and profile.gives.speedup_ci95[0] > 1


@pytest.mark.timeout(300)
def test_the_profile_is_for_the_same_script(searched: tuple[Runner, Ran]) -> None:
    run, ran = searched
    assert ran.code == 0, ran.stderr
    profile = run.folder / "studies" / "steady-1" / "profile.yaml"
    words = [
        sys.executable,
        "-P",
        "-m",
        "autotune",
        "run",
        "--profile",
        str(profile),
        "--",
        *SLOW_LOADER,
        "--steps",
        "20",
    ]
    done = run.run(words)
    assert done.code == 0 and "2 workers" in done.stderr and done.stderr.count("\n") == 1


def test_the_report_names_what_it_was_compared_with(searched: tuple[Runner, Ran]) -> None:
    run, _ = searched
    shown = run.run([sys.executable, "-P", "-m", "autotune", "report", "steady-1"])
    assert shown.code == 0, shown.stderr
    assert "steady" in shown.stdout


@pytest.mark.timeout(300)
def test_without_a_loader_rates_are_of_steps(tmp_path: Path) -> None:
    run = Runner(tmp_path)
    options = ["--budget", "60s", "--allow-busy", "--trials", "2", "--set", "optimizer_impl=for-loop,foreach"]
    fixed = [word for knob in ("precision=fp32", "compile_mode=off") for word in ("--fix", knob)]
    script = tmp_path / "by_hand.py"
    script.write_text(BY_HAND)
    plain = [sys.executable, "-P", "-m", "autotune"]
    ran = run.run([*plain, "search", *options, *fixed, "--", sys.executable, str(script)])
    assert ran.code in (0, 8), ran.stderr
    shown = run.run([*plain, "report", "by_hand-1", "--full"])
    for text in (ran.stdout, ran.stderr, shown.stdout):
        assert "steps/s" in text and "samples/s" not in text
    assert not {"batch", "loader"} & set(re.findall(r"\w+", ran.stdout + ran.stderr))
