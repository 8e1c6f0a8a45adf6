"""What only a real card can show. `python -m benchmarks.card` runs these tests too."""

import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import pytest
import torch

from autotune.base.records import CheckPlan, CommandRef, HoldPlan, LaunchKind, Phase, TrialStatus
from autotune.machine.gpu import gpus
from autotune.search.subject import command_name, command_ref
from autotune.training.step import Step, apply_optimizer

from ..process.alive import wait_until  # noqa: TID252

pytestmark = pytest.mark.gpu
GIB, NEAR_BYTES = 2**30, 2**26
#: Until a killed process's memory is back, in seconds.
BACK_S = 30.0
TWO_RANKS = Path(__file__).parent.parent.parent / "benchmarks" / "card" / "two_ranks.py"


def test_running_out_of_memory_under_a_limit_while_the_model_is_built(launch):
    result, _ = launch(args={"hold_bytes": str(GIB)}, memory_limit_bytes=GIB // 2)
    assert (result.status, result.phase) == (TrialStatus.OOM, Phase.BUILD), result.cause
    assert result.peak_bytes is not None and result.peak_bytes <= GIB // 2
    after, _ = launch(name="after")
    assert after.status is TrialStatus.COMPLETE, after.cause


def test_fp16_trains_as_fp32_does(launch, tmp_path):
    def check(config, *, reference):
        plan = CheckPlan(store=str(tmp_path / "store"), reference=reference)
        name = f"reference-{reference}"
        result, _ = launch(config, name=name, kind=LaunchKind.TRAIN_CHECK, check=plan)
        assert result.status is TrialStatus.COMPLETE, result.cause
        return result.check

    fp32 = check({}, reference=True)
    fp16 = check({"precision": "fp16"}, reference=False)
    assert fp16.finite and fp16.changed == 1.0
    assert fp16.losses[-1] < 0.8 * fp16.losses[0]
    assert mean(abs(a - b) for a, b in zip(fp16.losses, fp32.losses, strict=True)) < 0.05


def test_steps_that_overflow_leave_fused_momentum_alone():
    """Fused SGD on CUDA takes a momentum that a first step with an overflow did not write as written."""

    def train(implementation):
        torch.manual_seed(0)
        # What a freed block held is what a tensor that nobody writes holds next.
        torch.full((2**20,), float("nan"), device="cuda")
        model = torch.nn.Linear(256, 256).cuda()
        config = {"precision": "fp16", "optimizer_impl": implementation}
        optimizer = apply_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), config)
        step = Step(model, optimizer, lambda m, x: m(x).square().sum(), config, "cuda")
        images = torch.randn(64, 256, device="cuda")
        losses = [float(step(images)) for _ in range(20)]
        assert step.scaler.get_scale() < 65536, "no step overflowed"
        return losses

    assert train("fused") == pytest.approx(train("foreach"), rel=1e-2)


def test_the_events_of_steps_agree_with_the_clock_on_the_wall(launch):
    result, files = launch(args={"products": "40"})
    assert result.status is TrialStatus.COMPLETE, result.cause
    times = [float(line) for line in (files.folder / "times").read_text().split()]
    by_clock_s = median(after - before for before, after in pairwise(times))
    assert median(result.measurement.step_s) == pytest.approx(by_clock_s, rel=0.02)


def test_the_allocator_is_the_configuration_s(launch):
    """There and back, in one search's launcher."""
    for number, setting in enumerate(("default", "expandable_segments", "default")):
        result, files = launch({"alloc_conf": setting}, name=f"launch-{number}")
        assert result.status is TrialStatus.COMPLETE, result.cause
        expandable, _, segments = (files.folder / "segments").read_text().split()
        assert int(segments) > 0
        assert (int(expandable) > 0) == (setting != "default"), setting


def test_cuda_graphs_and_an_evaluation_whose_batches_change(launch):
    plan = HoldPlan(min_s=1.0, max_s=20.0)
    result, _ = launch({"compile_mode": "reduce-overhead"}, kind=LaunchKind.HOLD, hold=plan)
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert (result.hold.evaluated, result.hold.settled) == ("evaluate", True)


def test_the_memory_of_a_killed_launch_is_back_before_the_next(launch, card, tmp_path):
    def used_bytes():
        return next(one.memory_used_bytes for one in gpus() if one.uuid == card.uuid)

    idle_bytes = used_bytes()
    seen = {}

    def kill(beat):
        if beat.phase is Phase.MEASURE and not seen:
            seen["held"] = used_bytes() - idle_bytes
            os.kill(int((tmp_path / "killed" / "pid").read_text()), signal.SIGKILL)

    result, _ = launch(args={"hold_bytes": str(4 * GIB)}, name="killed", on_beat=kill)
    assert result.status is TrialStatus.KILLED, result.cause
    assert seen["held"] > 4 * GIB
    wait_until(lambda: used_bytes() <= idle_bytes + NEAR_BYTES, BACK_S)
    after, _ = launch(name="after")
    assert after.status is TrialStatus.COMPLETE, after.cause


@pytest.mark.parametrize("exchanges", [True, False], ids=["gradients over NCCL", "no exchange"])
def test_two_ranks_on_two_cards(launch, two_cards, exchanges):
    kind = LaunchKind.MEASURE if exchanges else LaunchKind.DEVICE_ONLY
    config = {"num_workers": 2, **({"pin_memory": True} if two_cards else {})}
    result, _ = launch(config, cards=two_cards, ranks=2, kind=kind, exchanges=exchanges)
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert result.measurement.ranks == len(result.measurement.rank_wait_fractions) == 2
    # Whoever else is on either card would be told.
    assert all(window.around.foreign_processes in (None, 0) for window in result.measurement.windows)


def test_a_script_of_two_ranks_on_two_cards(launch, two_cards, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = CommandRef(words=(*torchrun, str(TWO_RANKS)), folder=str(tmp_path))
    result, _ = launch(cards=two_cards, command=command, workload=command_ref(command, command_name(command.words)))
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert result.measurement.samples_per_s > 0
    assert all(window.around.foreign_processes in (None, 0) for window in result.measurement.windows)
