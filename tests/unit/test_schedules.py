"""The learning rates of the built-in workloads that schedule theirs."""

from __future__ import annotations

import pytest
import torch

from autotune.base.records import DataRef
from autotune.workload import contract
from autotune.workload.catalog import find_workload
from autotune.workload.contract import Context


@pytest.mark.parametrize("name", ["resnet50", "classifier_small"])
@pytest.mark.parametrize("steps", [60, 1000])
def test_it_rises_to_the_optimizers_own_and_falls_to_nearly_nothing(name: str, steps: int) -> None:
    workload = contract.load(find_workload(name, {}))
    ctx = Context("cpu", 64, 40, 0, DataRef(kind="none"))
    optimizer = workload.optimizer(ctx, torch.nn.Linear(1, 1))
    highest = optimizer.param_groups[0]["lr"]
    schedule = contract.optional(workload, "schedule")
    assert schedule is not None
    scheduler, seen = schedule(ctx, optimizer, steps), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(seen) == pytest.approx(highest, rel=1e-3) and seen[0] < 0.4 * highest
    # It rises without a break, then falls without one.
    peak = seen.index(max(seen))
    assert seen[: peak + 1] == sorted(seen[: peak + 1]) and seen[peak:] == sorted(seen[peak:], reverse=True)
    assert seen[-1] < 0.01 * highest


def test_cells_are_validated_on_others_than_are_trained_on_and_without_augmentation() -> None:
    workload = contract.load(find_workload("classifier_small", {}))
    ctx = Context("cpu", 64, 40, 0, DataRef(kind="none"), args={"classes": "8", "validation": ""})
    make = contract.optional(workload, "validation")
    assert make is not None
    trained, validated = workload.dataset(ctx), make(ctx)
    assert len(validated) == 256
    assert torch.equal(validated[3][0], validated[3][0]) and not torch.equal(trained[3][0], trained[3][0])
    assert not set(trained.files) & set(validated.files)  # type: ignore[attr-defined]
