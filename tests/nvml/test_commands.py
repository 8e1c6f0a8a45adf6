"""Commands on a machine with three cards: which of them a script gets, and which of them can be searched on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..scripts.conftest import written  # noqa: TID252
from .conftest import card

#: A program that tells its rate, and which cards it sees. It stands in for the launcher of ranks.
PROGRAM = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES" > {seen}
while :; do echo "100 images/s"; sleep 0.05; done
"""


@pytest.fixture
def seen(tmp_path_factory) -> Path:
    """The file that the program writes, outside of the folder in which it runs: launches see a view of that."""
    return tmp_path_factory.mktemp("outside") / "seen"


@pytest.fixture
def typed(driver, tmp_path: Path, seen: Path):
    """``typed(words)``: run a command of autotune on that machine."""
    driver.says(*(card(f"GPU-{name}") for name in "abc"))
    (tmp_path / "train.py").touch()
    program = tmp_path / "torchrun"
    program.write_text(PROGRAM.format(seen=seen))
    program.chmod(0o755)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in {**os.environ, **driver.env}.items() if name != "CUDA_VISIBLE_DEVICES"}
        command = [sys.executable, "-P", "-m", "autotune", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.mark.slow
def test_a_launch_of_a_script_sees_as_many_cards_as_its_launcher_starts_ranks(typed, seen):
    told = ["--rate", "(?P<rate>[0-9]+) images/s", "--map", "num_workers=--workers {num_workers}"]
    command = ["./torchrun", "--nproc-per-node=2", "train.py"]
    ran = typed("space", *told, "--baseline", "num_workers=1", "--", *command)
    assert ran.returncode == 0, ran.stderr
    assert seen.read_text() == "GPU-a,GPU-b\n"


def test_a_run_says_what_its_search_has_not_seen(typed, tmp_path):
    profile = written(tmp_path)
    profile.write_text(profile.read_text().replace('device: "cpu"', 'device: "cuda:0"'))
    ran = typed("run", "--profile", str(profile), "--", "true")
    assert (ran.returncode, ran.stderr) == (
        0,
        "autotune: profile.yaml: the script sees 3 cards, and in the search it saw 1: what uses all was not measured; "
        "CUDA_VISIBLE_DEVICES hides the others\n",
    )
    profile.write_text(profile.read_text().replace("seed: 0", "seed: 0\n  cards: 3"))
    ran = typed("run", "--profile", str(profile), "--", "true")
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
def test_a_search_for_energy_is_refused_before_anything_is_launched(typed, driver, tmp_path):
    driver.says(card("GPU-a"), card("GPU-b", energy=None), card("GPU-c"))
    search = ("search", "--objective", "energy", "--no-input", "--model", "resnet18", "--nproc-per-node", "2")
    ran = typed(*search, "--device", "cuda")
    assert ran.returncode == 2
    assert "--objective energy is not possible here: the driver tells no energy of GPU-b" in " ".join(
        ran.stderr.split()
    )
    assert not list(tmp_path.glob("studies/*/trials")), "a search that fails before its first trial leaves no study"
