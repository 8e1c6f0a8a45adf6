"""`autotune.tune` in a user's script: interrupted, resumed, and applied."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import DEADLINE_S

SCRIPT = '''
"""A script with the four functions of a workload, which import torch themselves."""

import sys

import autotune

WIDTH = 64


class Vectors:
    def __init__(self, seed):
        import torch

        self.inputs = torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return self.inputs[index % 1024], index % 10


def make_model(ctx):
    from torch import nn

    return nn.Linear(WIDTH, 10)


def dataset(ctx):
    return Vectors(ctx.seed)


def optimizer(ctx, model):
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx, model, batch):
    import time

    from torch import nn

    # A larger batch is faster for sure.
    time.sleep(0.01)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    if sys.argv[1] == "tune":
        fixed = {"compile_mode": "off", "num_workers": 0, "precision": "fp32", "batch_size": 128,
                 "optimizer_impl": "for-loop", "intra_op_threads": 1}
        found = autotune.tune(make_model, dataset=dataset, optimizer=optimizer, loss=loss,
                              device="cpu", fix=fixed, budget="36s", trials=2, allow_busy=True)
    else:
        found = autotune.resume("train_workload-1")
    print(repr(found))
    profile = found.profile
    print("torch" in sys.modules, profile.batch_size, profile.config["precision"])
    data, model = dataset(type("C", (), {"seed": 0})), make_model(None)
    loader, step = profile.prepare(model, optimizer(None, model), data, lambda m, batch: loss(None, m, batch))
    print(float(step(next(iter(loader)))) > 0)
'''


def interrupted(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Interrupt a search in its first trial; return the script's command and environment."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "AUTOTUNE_STATE_DIR": str(tmp_path / "state")}
    command = [sys.executable, str(script)]
    with subprocess.Popen([*command, "tune"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        # The test's own limit ends a search that never gets there.
        while "trial 0 begins" not in (line := running.stderr.readline()):
            assert line, "the search ended before its first trial"
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()
    assert "KeyboardInterrupt: everything measured is kept; go on with autotune.resume('train_workload-1')" in rest
    assert "autotune resume train_workload-1" in rest
    # Of the search itself nothing is shown, only where it was called.
    assert "autotune/search/run.py" not in rest and "autotune/search/__init__.py" not in rest
    return command, env


@pytest.mark.slow
def test_ctrl_c_leaves_a_study_and_says_how_to_go_on(tmp_path: Path) -> None:
    interrupted(tmp_path)
    assert (tmp_path / "studies" / "train_workload-1" / "study.yaml").is_file()


@pytest.mark.stress
def test_an_interrupted_study_is_resumed(tmp_path: Path) -> None:
    command, env = interrupted(tmp_path)
    again = subprocess.run(
        [*command, "resume"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("<Study train_workload-1: ")
    assert again.stdout.splitlines()[-2:] == [f"False {again.stdout.split()[-3]} fp32", "True"]
    # The winner is found by the file that was written for it, too.
    assert list((tmp_path / "state").rglob("profile.yaml"))
