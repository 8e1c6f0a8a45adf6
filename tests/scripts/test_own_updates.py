"""Scripts that update their weights themselves: seen where it can be seen, and told soon where it cannot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.base.records import HeatPlan, LaunchKind, TrialStatus

from .conftest import PLAIN, Runner, code

SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset

class Momentum:
    def __init__(self, weights):
        self.weights = list(weights)
        self.moments = [torch.zeros_like(w) for w in self.weights]
    def step(self):
        with torch.no_grad():
            for w, m in zip(self.weights, self.moments):
                m.mul_(0.9).add_(w.grad)
                w -= 0.01 * m

net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
weights = list(net.parameters())
momentum = Momentum(weights)
matrix = torch.randn(192, 2, requires_grad=True)
loader = DataLoader(TensorDataset(torch.randn(160, 3, 8, 8)), batch_size=8)
taken = 0
for epoch in range({epochs}):
    for x, in loader:
        taken += 1
        time.sleep(0.005)
        {step}
"""
BY_HAND = """net.zero_grad()
        net(x).square().mean().backward()
        for w in weights: w.data.add_(w.grad, alpha=-0.01)"""
BY_A_CLASS = """net(x).square().mean().backward()
        momentum.step()
        for w in weights: w.grad.data.zero_()"""
ADDED_UP = """net(x).square().mean().backward()
        if taken % 3 == 0:
            momentum.step()
            net.zero_grad()"""
WITHOUT_A_MODULE = """(x.flatten(1) @ matrix).square().mean().backward()
        with torch.no_grad(): matrix -= 0.01 * matrix.grad
        matrix.grad = None"""


def script(step: str, epochs: int = 100_000) -> tuple[str, ...]:
    return code(SCRIPT.format(step=step, epochs=epochs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "samples"),
    [(BY_HAND, 8), (BY_A_CLASS, 8), (ADDED_UP, 24), (WITHOUT_A_MODULE, 8)],
    ids=["by hand", "by a class", "added up", "without a module"],
)
def test_steps_are_seen_by_the_weights(launched: Any, step: str, samples: int) -> None:
    result = launched(*script(step))
    assert result.status is TrialStatus.COMPLETE, result.cause
    found = result.measurement
    assert found.batch_size == samples and found.epoch_samples == 160 and 100 < found.steady_per_s < 1600


@pytest.mark.slow
def test_its_configuration_is_switched_and_its_optimizer_is_its_own(command_launch: Any) -> None:
    plain = {**PLAIN, "compile_mode": "off", "memory_format": "contiguous", "optimizer_impl": "for-loop"}
    changes = [{}, {"precision": "bf16"}, {"memory_format": "channels_last"}, {"optimizer_impl": "fused"}]
    entrants = tuple({**plain, **change} for change in changes)
    plan = HeatPlan(entrants=entrants, turn_s=0.02, all_rounds=True, min_rounds=2, max_rounds=2)
    result = command_launch(script(BY_A_CLASS), plain, kind=LaunchKind.HEAT, heat=plan)
    assert result.heat is not None, result.cause
    statuses = [entrant.status for entrant in result.heat.entrants]
    assert statuses == [TrialStatus.COMPLETE] * 3 + [TrialStatus.CRASHED]
    assert "the script updates its weights itself" in str(result.heat.entrants[3].cause)


@pytest.mark.slow
def test_a_profile_is_applied_and_says_what_is_not(run: Runner) -> None:
    ran = run(*script(BY_HAND, epochs=30), precision="bf16", optimizer_impl="fused")
    assert ran.code == 0
    assert ran.stderr == (
        "autotune: profile.yaml: bf16; not fused optimizer (the script updates its weights itself)\n"
    ), ran.stderr


UNSEEN = """gradients = torch.autograd.grad(net(x).square().mean(), weights)
        with torch.no_grad():
            for w, g in zip(weights, gradients): w -= 0.01 * g"""


@pytest.mark.slow
def test_updates_that_cannot_be_seen_are_told(launched: Any) -> None:
    result = launched(*script(UNSEEN))
    assert result.status is TrialStatus.USER_ERROR and result.wall_s < 40
    assert result.cause == "the script trains, and no optimizer of PyTorch takes a step: it calls no backward()"
    assert "--rate" in result.advice


@pytest.mark.slow
def test_gradients_may_be_added_up_for_long(launched: Any) -> None:
    added = "net(x).mean().backward()\n        if taken % 3000 == 0: optimizer.step(); optimizer.zero_grad()"
    text = SCRIPT.replace("taken = 0", "taken = 0; optimizer = torch.optim.SGD(net.parameters(), lr=0.1)")
    result = launched(*code(text.format(step=added, epochs=130)))
    assert result.cause == "the script ended and no optimizer of PyTorch has taken a step", result.cause


@pytest.mark.slow
def test_a_script_that_cannot_be_entered_is_told(launched: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(step=BY_HAND, epochs=100_000))
    result = launched("bash", "-c", f"PYTHONPATH=src '{sys.executable}' train.py")
    assert result.status is TrialStatus.USER_ERROR and result.wall_s < 40
    assert "could not enter it: something on the way to it replaces PYTHONPATH" in result.cause


LONG_STEP = """
import time, torch
net = torch.nn.Linear(9, 2)
optimizer = torch.optim.LBFGS(
    net.parameters(), max_iter=30, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
)
x = torch.randn(8, 9)
calls = 0

def closure():
    global calls
    calls += 1
    time.sleep(0.6)
    optimizer.zero_grad()
    loss = (net(x).cos() - x[:, :2]).square().mean()
    if calls % 2:
        net(x).square().mean().backward()
    loss.backward()
    return loss

optimizer.step(closure)
"""


@pytest.mark.slow
def test_what_changes_within_a_long_step_of_an_optimizer_is_no_update_of_the_scripts_own(launched: Any) -> None:
    result = launched(*code(LONG_STEP))
    assert result.status is TrialStatus.USER_ERROR and "no optimizer" not in str(result.cause), result.cause
