"""``autotune search -- python train.py``: a script is tuned as it stands, and then run with what was found."""

from __future__ import annotations

import json
import sys

import pytest

from autotune.profile import read

from .conftest import SCRIPTS, Ran, Runner

#: Its loader takes three times as long as its steps, and sleeps, so that workers help whatever else runs.
SLOW_LOADER = [sys.executable, str(SCRIPTS / "steady.py"), "--step-s", "0.01", "--load-s", "0.004", "--epochs", "1000"]


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
