"""A workload searched as it trains in two ranks, to a profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.base.layout import StudyFiles
from autotune.base.records import LaunchKind
from autotune.profile import Profile, read
from autotune.study.history import read_launches

from .conftest import DEADLINE_S, SEARCH, Finished, new_project, survivors

pytestmark = pytest.mark.slow

#: A training loop of a reader's own, which prints what each rank trains on.
LOOP = """
import sys

import torch
from torch import distributed, nn

import autotune

profile = autotune.load_profile(sys.argv[1])
model = nn.Linear(4, 1)
data = [(torch.full((4,), float(i)), i) for i in range(64 * profile.batch_size)]
seen = []


def loss(model, batch):
    inputs, numbers = batch
    seen.extend(numbers.tolist())
    return model(inputs).mean()


optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader, step = profile.prepare(model, optimizer, data, loss, shuffle=True, drop_last=True)
for number, batch in zip(range(4), loader):
    step(batch)
both = [None, None]
distributed.all_gather_object(both, (seen, model.weight.tolist()))
if distributed.get_rank() == 0:
    (one, weights), (other, same) = both
    print(len(one), len(other), bool(set(one) & set(other)), weights == same)
distributed.destroy_process_group()
"""

#: The command, which trains no longer than it is told, even if the rate has not settled.
NO_LONGER = """
from autotune.training import short_training
from autotune.cli.main import main

short_training.LONGER_S = 0.0
main()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    project = new_project(tmp_path_factory.mktemp("ranks"))
    # What is left to search hardly matters beside the pause, on a busy machine, too.
    quiet = ["--keep-batch-size", "--fix", "precision=fp32", "--fix", "gradient_compression=off"]
    words = [*SEARCH, *quiet, "--nproc-per-node", "2", "--budget", "90s", "--trials", "2", "--json"]
    return Finished(project, project.run(*words))


def profile_of(trained: Finished) -> Profile:
    return read(trained.study / "profile.yaml")


def test_two_ranks_are_searched_to_a_profile(trained: Finished) -> None:
    assert trained.done.returncode == 0, trained.done.stderr
    assert "batch 32 in each of 2 ranks" in trained.done.stderr
    found, profile = json.loads(trained.done.stdout), profile_of(trained)
    assert found["best"]["speedup"] > 1.5 and profile.configuration["workload.pause"] is False
    assert profile.conditions.ranks == 2 and profile.fingerprint.values["ranks"] == 2
    assert "ddp_bucket_cap_mb" in profile.configuration
    launches = read_launches(StudyFiles(trained.study))
    measured = [r.measurement for s, r in launches if s.kind is LaunchKind.MEASURE and r.measurement is not None]
    assert len(measured) >= 4
    assert all(m.ranks == 2 and m.windows[0].samples == 64 * m.windows[0].steps for m in measured if m.batch_size == 32)
    assert not any(s.kind is LaunchKind.HEAT for s, _ in launches)
    assert not survivors(trained.study)


def test_it_trains_as_it_was_measured(trained: Finished) -> None:
    words = ["train", "--profile", "studies/my_tiny_net-1/profile.yaml", "--steps", "200", "--json"]
    command = [sys.executable, "-P", "-c", NO_LONGER, *words]
    done = subprocess.run(
        command, cwd=trained.project.folder, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert "warning: the number of ranks differs" not in done.stderr
    found, promised = json.loads(done.stdout), profile_of(trained).gives.samples_per_second
    assert found["promised_samples_per_second"] == promised and found["steps"] >= 200
    # On a busy machine, the search and the training may find it in different states.
    assert promised / 4 < found["samples_per_second"] < promised * 4


def test_a_loop_of_ones_own_trains_as_it_was_measured(trained: Finished, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*command, str(trained.study / "profile.yaml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    samples = 4 * int(profile_of(trained).configuration["batch_size"])
    assert done.stdout.split() == [str(samples), str(samples), "False", "True"]
    assert "the number of ranks differs" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["search", "--model", "my_tiny_net.py", "--nproc-per-node", "0"], 2, "--nproc-per-node"),
        (["search", "--model", "resnet18", "--nproc-per-node", "2", "--global-batch", "33"], 2, "cannot be divided"),
        (["search", "--nproc-per-node", "2", "--", "python", "train.py"], 2, "--nproc-per-node is for workloads"),
    ],
)
def test_what_is_refused(trained: Finished, words: list[str], code: int, says: str) -> None:
    done = trained.project.typed(*words)
    assert done.returncode == code and says in done.stderr, done.stderr
