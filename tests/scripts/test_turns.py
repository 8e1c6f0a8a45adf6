"""Heats in a script's own loop: between two steps it is switched, and nothing leaks from one turn into the next."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.base.layout import LaunchFiles
from autotune.base.records import Config, HeatPlan, LaunchKind, TrialResult, TrialStatus, Value
from tests.support import run_heat

from .conftest import PLAIN, SCRIPTS

REFERENCE: dict[str, Value] = {
    **PLAIN,
    "compile_mode": "off",
    "memory_format": "contiguous",
    "optimizer_impl": "for-loop",
}


@pytest.fixture
def heated(command_launch: Any, tmp_path: Path):
    """``heated(entrants, options…)``: how a heat of the script ended."""

    def run(entrants: Sequence[Config], *options: str, **plan: Any) -> TrialResult:
        heat = HeatPlan(entrants=tuple(dict(e) for e in entrants), turn_s=0.05, **plan)
        script = ("starved.py",) if plan.get("side") == "loader" else ("switched.py", str(tmp_path / "launch" / "log"))
        words = (sys.executable, str(SCRIPTS / script[0]), *script[1:], *options)
        return command_launch(words, entrants[0], kind=LaunchKind.HEAT, heat=heat)

    return run


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "launch" / "log").read_text().splitlines()]


@pytest.mark.slow
def test_every_switch_is_in_force_and_nothing_leaks(heated: Any, tmp_path: Path) -> None:
    changes: list[dict[str, Value]] = [
        {},
        {"precision": "bf16"},
        {"memory_format": "channels_last"},
        {"optimizer_impl": "fused"},
        {"optimizer_impl": "foreach"},
        {"intra_op_threads": 2},
        {"precision": "bf16", "memory_format": "channels_last", "optimizer_impl": "fused", "intra_op_threads": 2},
    ]
    entrants = [{**REFERENCE, **change} for change in changes]
    result = heated(entrants, all_rounds=True, min_rounds=2, max_rounds=4)
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert [len(e.turns) for e in result.heat.entrants] == [4] * len(entrants)
    expected = {_told(config) for config in entrants}
    seen = steps(tmp_path)
    # At first, of an optimizer that has taken no step, the state is that of the weights.
    told = {tuple(v for n, v in step.items() if n != "loss") for step in seen}
    assert told == expected
    # Each step trains, whoever's turn it is.
    losses = [step["loss"] for step in seen]
    assert sum(losses[-12:]) < sum(losses[:12])


def _told(config: Config) -> tuple[object, ...]:
    layout = config["memory_format"]
    dtype = "torch.bfloat16" if config["precision"] == "bf16" else "torch.float32"
    return dtype, layout, layout, layout, config["optimizer_impl"], config["intra_op_threads"], False


@pytest.mark.slow
def test_the_faster_one_is_told_by_how_much(heated: Any, tmp_path: Path) -> None:
    faster = {**REFERENCE, "precision": "bf16"}
    result = heated([faster, REFERENCE], all_rounds=True, min_rounds=2, max_rounds=5)
    assert result.status is TrialStatus.COMPLETE, result.cause
    heat = result.heat
    # Sleeping takes a little longer than asked for, and the rest of a step its time.
    assert 0.45 < heat.entrants[1].ratio < 0.75
    assert heat.side == "device" and heat.startup_s > 0 and heat.measured_s > 0
    assert (
        not LaunchFiles(tmp_path / "launch").commands.exists() and not LaunchFiles(tmp_path / "launch").trail.exists()
    )


@pytest.mark.slow
def test_an_entrant_is_compiled_once(heated: Any, tmp_path: Path) -> None:
    entrants = [REFERENCE, {**REFERENCE, "compile_mode": "default"}]
    result = heated(entrants, "--no-sleep", all_rounds=True, min_rounds=2, max_rounds=4)
    assert result.status is TrialStatus.COMPLETE, result.cause
    compiled = result.heat.entrants[1]
    longest = max(turn.seconds / turn.steps for turn in compiled.turns if turn is not None)
    # A second compilation would take about as long.
    assert compiled.first_step_s > 3 * longest
    assert {step["compiled"] for step in steps(tmp_path)} == {False, True}


@pytest.mark.slow
def test_what_cannot_be_switched_to_is_out_alone(heated: Any) -> None:
    # Rprop has no fused step.
    others = [{**REFERENCE, "optimizer_impl": "foreach"}, {**REFERENCE, "precision": "bf16"}]
    entrants = [REFERENCE, {**REFERENCE, "optimizer_impl": "fused"}, *others]
    result = heated(entrants, "--optimizer", "Rprop", all_rounds=True, min_rounds=2, max_rounds=4)
    assert result.status is TrialStatus.COMPLETE, result.cause
    heat = result.heat
    assert [e.status for e in heat.entrants] == [
        TrialStatus.COMPLETE,
        TrialStatus.CRASHED,
        TrialStatus.COMPLETE,
        TrialStatus.COMPLETE,
    ]
    assert "Rprop does not offer it" in heat.entrants[1].cause
    assert all(len(e.turns) == 4 for e in (heat.entrants[0], *heat.entrants[2:]))


@pytest.mark.slow
def test_weights_that_become_views_of_one_tensor_are_moved_no_more(heated: Any, tmp_path: Path) -> None:
    entrants = [REFERENCE, {**REFERENCE, "memory_format": "channels_last"}, {**REFERENCE, "optimizer_impl": "fused"}]
    result = heated(entrants, "--no-sleep", "--flat", "60", all_rounds=True, min_rounds=2, max_rounds=8)
    assert result.status is TrialStatus.COMPLETE, result.cause
    plain, last, fused = result.heat.entrants
    assert last.status is TrialStatus.CRASHED and "share their memory with other tensors" in last.cause
    assert len(plain.turns) == len(fused.turns) == 8
    seen = [step for step in steps(tmp_path) if "in_place" in step]
    assert len(seen) > 60 and all(step["in_place"] and step["moves"] for step in seen)


@pytest.mark.slow
def test_an_error_is_charged_to_whose_turn_it_is(heated: Any) -> None:
    entrants = [REFERENCE, {**REFERENCE, "optimizer_impl": "fused"}, {**REFERENCE, "precision": "bf16"}]
    result = heated(entrants, "--fails")
    assert result.status is TrialStatus.USER_ERROR and result.turn == 2
    assert "no training with so few digits" in result.cause


@pytest.mark.slow
def test_a_script_that_ends_has_told_what_it_has(heated: Any) -> None:
    entrants = [REFERENCE, {**REFERENCE, "optimizer_impl": "fused"}]
    result = heated(entrants, "--steps", "60", all_rounds=True, min_rounds=2, max_rounds=40)
    assert result.status is TrialStatus.COMPLETE, result.cause
    turns = [turn for turn in result.heat.entrants[0].turns if turn is not None]
    assert 2 <= len(turns) < 40


@pytest.mark.slow
def test_a_script_that_ends_at_once_is_too_short(heated: Any) -> None:
    result = heated([REFERENCE, {**REFERENCE, "precision": "bf16"}], "--steps", "5")
    assert result.status is TrialStatus.USER_ERROR
    assert "too few" in result.cause


def with_workers(*counts: int) -> list[dict[str, Value]]:
    working: dict[str, Value] = {"prefetch_factor": 2, "persistent_workers": False}
    return [{**REFERENCE, "num_workers": count, **(working if count else {})} for count in counts]


@pytest.mark.slow
def test_workers_are_compared_by_what_the_scripts_loader_delivers(heated: Any, tmp_path: Path) -> None:
    result = heated(with_workers(0, 1, 2, 4), side="loader", all_rounds=True, min_rounds=2, max_rounds=2)
    assert result.status is TrialStatus.COMPLETE, result.cause
    heat = result.heat
    assert heat.side == "loader" and [len(e.turns) for e in heat.entrants] == [2] * 4
    # Each sample is waited for, and workers wait side by side.
    assert 0.5 < heat.entrants[1].ratio < 1.4
    assert 1.2 < heat.entrants[2].ratio < 2.8
    assert 1.8 < heat.entrants[3].ratio < 5.5
    assert heat.switch_s > 0
    assert not LaunchFiles(tmp_path / "launch").commands.exists()


@pytest.mark.slow
def test_more_workers_than_batches_are_compared_by_whole_epochs(heated: Any) -> None:
    few = ("--samples", "24", "--epochs", "1000")
    result = heated(with_workers(0, 8), *few, side="loader", all_rounds=True, min_rounds=2, max_rounds=2)
    assert result.status is TrialStatus.COMPLETE, result.cause
    # Each of its epochs starts eight processes for three batches.
    assert len(result.heat.entrants[1].turns) == 2 and result.heat.entrants[1].ratio < 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("raises", TrialStatus.USER_ERROR, "not in a worker"),
        ("dies", TrialStatus.LOADER_WORKER_DIED, "worker"),
    ],
)
def test_what_its_workers_do_is_charged_to_whose_turn_it_is(
    heated: Any, how: str, status: TrialStatus, said: str
) -> None:
    result = heated(with_workers(0, 2), "--fails", how, side="loader", min_rounds=40, all_rounds=True)
    assert (result.status, result.turn) == (status, 1) and said in result.cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "knob", "refused"),
    [
        ("if h.dtype != torch.float32: raise ArithmeticError('too large')", "precision", None),
        ("if h.dtype != torch.float32: h = torch.complex(h, h).abs()", "precision", "bf16"),
        ("h = h.view(len(h), -1)", "memory_format", "channels_last"),
    ],
)
def test_what_a_layer_refuses_is_tried_once(
    command_launch: Any, tmp_path: Path, fails: str, knob: str, refused: str | None
) -> None:
    (tmp_path / "waves.py").write_text(
        "import torch\n"
        "class Waves(torch.nn.Module):\n"
        "    def forward(self, h):\n"
        f"        {fails}\n"
        "        return h\n"
        "net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), Waves())\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.01)\n"
        "while True:\n"
        "    net(torch.ones(2, 3, 8, 8)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    other: dict[str, Value] = {"memory_format": "channels_last"} if knob == "precision" else {"precision": "bf16"}
    failing: dict[str, Value] = {**REFERENCE, knob: refused or "bf16"}
    changes: list[dict[str, Value]] = [{}, other, {"optimizer_impl": "foreach"}]
    entrants = [REFERENCE, *({**failing, **change} for change in changes), {**REFERENCE, "optimizer_impl": "fused"}]
    plans: list[int] = []

    def launch(number: int, plan: HeatPlan) -> TrialResult:
        plans.append(len(plan.entrants))
        spec = {"folder": f"launch-{number}", "kind": LaunchKind.HEAT, "heat": plan}
        return command_launch((sys.executable, "waves.py"), plan.entrants[0], **spec)

    heat = run_heat(launch, HeatPlan(entrants=tuple(entrants), turn_s=0.02, min_rounds=2, max_rounds=2))
    # Whichever of the three has its turn first fails for all of them, or else for itself alone.
    assert plans == ([5, 2] if refused else [5, 4, 3, 2])
    assert heat.entrants[4].ratio is not None
    assert {e.refuses for e in heat.entrants[1:4]} == {knob if refused else None}
    if refused:
        (cause,) = {str(e.cause) for e in heat.entrants[1:4]}
        assert cause.startswith(f"{refused} is refused by Waves: RuntimeError: ") and cause.endswith("(waves.py:4)"), (
            cause
        )
