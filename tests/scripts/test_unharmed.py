"""What a script may do with a model that has been set from outside, and what is no training yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from autotune.launcher import script_entry

from .conftest import Runner

SET = {"precision": "bf16", "memory_format": "channels_last"}
BEGIN = """
import torch
import torch.nn.functional as F


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 4, 3)

    def forward(self, images):
        return F.relu(self.layer(images))


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 3, 8, 8)).sum().backward()
        optimizer.step()


"""
SCRIPTED = """
model = Network()
train(model, 8)
scripted = torch.jit.script(model)
images = torch.ones(1, 3, 8, 8)
assert torch.equal(scripted(images), model.eval()(images))
assert "F.relu" not in scripted.code and "relu" in scripted.code


def made():
    Local = torch.Tensor

    @torch.jit.script
    class Pair:
        def __init__(self, first: Local):
            self.first = first

    return Pair(torch.ones(1)).first


assert made().item() == 1.0
"""
TRACED = """
model = Network()
traced = torch.jit.trace(model, torch.ones(1, 3, 8, 8))
assert "aten::to" not in str(traced.inlined_graph), "nothing was cast"
train(model, 8)
"""
COUNTED = """
model = Network().to("meta")
model(torch.ones(1, 3, 8, 8, device="meta"))
model = model.to_empty(device="cpu")
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
train(model, 8)
"""
LATER = """
model = Network()
model(torch.ones(1, 3, 8, 8))
with torch.autocast("cpu", dtype=torch.float16):
    assert model(torch.ones(1, 3, 8, 8)).dtype is torch.float16
train(model, 8)
"""
SPARSE = """
class Sparse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 4, 3)

    def forward(self, images):
        return self.layer(images.to_dense())


model = Sparse()
model(torch.ones(1, 3, 8, 8).to_sparse())
train(Network(), 8)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [SCRIPTED, TRACED, COUNTED, LATER, SPARSE], ids=["scripted", "traced", "counted", "later", "sparse"]
)
def test_what_works_without_goes_on_working(run: Runner, text: str) -> None:
    (run.folder / "script.py").write_text(BEGIN + text)
    ran = run(sys.executable, "-W", "ignore", "script.py", **SET)
    assert ran.code == 0, ran.stderr
    assert ran.stderr.startswith("autotune: profile.yaml: bf16, channels_last"), ran.stderr


@pytest.mark.slow
def test_a_training_goes_on_where_nothing_can_be_compiled(run: Runner) -> None:
    (run.folder / "script.py").write_text(f"{BEGIN}train(Network(), 8)\nprint('done')\n")
    without = {"CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": str(run.folder / "cache")}
    ran = run(sys.executable, "-W", "ignore", "script.py", env=without, compile_mode="default", batch_size=8)
    assert ran.stdout == "done\n" and "not compile (its compiler fails here: " in ran.stderr, ran.stderr


@pytest.mark.slow
def test_torch_may_be_there_before_the_agent(run: Runner) -> None:
    """As it is where a ``.pth`` file imports it."""
    enter = f"import sys, torch; sys.path.insert(0, {str(script_entry.FOLDER)!r}); import sitecustomize"
    (run.folder / "script.py").write_text(f"{BEGIN}train(Network(), 8)\n")
    told = script_entry.agent_plan({"precision": "bf16", "batch_size": 8}, "early", in_command={"batch_size"})
    env = {**os.environ, script_entry.PLAN: json.dumps(told)}
    words = [sys.executable, "-S", "-c", f"{enter}; exec(open('script.py').read())"]
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(words, cwd=run.folder, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert done.stderr == "autotune: early: bf16, batch 8\n"
