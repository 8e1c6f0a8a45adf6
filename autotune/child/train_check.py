"""Checks that a configuration trains: some steps from saved weights over saved batches, for their losses.

All launches of one check start from the same weights and batches, stored in a file that the first reference writes.
They differ only in what is being checked.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotune.base.errors import AutotuneError, MachineError, WorkloadError
from autotune.base.files import open_regular, write_atomic
from autotune.base.records import CheckPlan, Phase, TrainCheck, TrialSpec
from autotune.child.launch import Beats, Launch
from autotune.training.exchange import join, load_whole, own_part, same_in_all_ranks, wait_for_all
from autotune.training.feed import no_batch
from autotune.training.step import Step, at_once, autocast, build, open_loader, step_plan
from autotune.workload import contract
from autotune.workload.contract import Context, Workload


def train_check(spec: TrialSpec, plan: CheckPlan, beats: Beats) -> TrainCheck:
    """Train as a plan says, under ``spec.config``.

    A loss that is not finite is a result here, not a failure.

    Raises:
        AutotuneError: no starting point was saved.
        WorkloadError: the saved weights do not fit the model of this configuration.
        MachineError: the starting point is a file that was not written by this study.
    """
    launch = Launch(spec, beats)
    workload, ctx = launch.workload, launch.ctx
    # Read before the memory limit is set: a real training does not hold these.
    join(launch.device)
    if spec.rank:
        # The first rank may have to write it.
        wait_for_all()
    weights, batches = _start(workload, ctx, plan, spec.worker_start_method)
    if not spec.rank:
        wait_for_all()
    launch.wake()
    own_weights = plan.reference and plan.seed != 0
    step = build(workload, dataclasses.replace(ctx, seed=ctx.seed + plan.seed) if own_weights else ctx, spec.config)
    if not own_weights:
        _load_weights(step.model, weights, spec)
    weights.clear()
    before = trainable(step.model)
    # Dropout draws the same numbers in all launches, as long as their kernels draw in the same order.
    torch.manual_seed(ctx.seed + plan.seed)
    beats.enter(Phase.COMPILE)
    # Ranks train on different batches; otherwise nothing would show whether they average their gradients.
    batches = batches[spec.rank :] + batches[: spec.rank]
    losses, finite, skips = take_steps(step, batches, plan.steps, beats)
    if finite and not same_in_all_ranks(step.model):
        raise WorkloadError(
            f"after {plan.steps} steps the ranks have different weights: their gradients are not averaged",
            advice="see what parallel(ctx, m) returns, and whether all parameters are used in the loss.",
        )
    changed = changed_fraction(before, step.model)
    # The evaluation may compile once more, so it gets a phase of its own.
    beats.enter(Phase.COMPILE)
    metric, lacks = None, None
    if finite:
        try:
            metric = _metric(workload, ctx, step, spec, plan)
        except WorkloadError:
            raise
        except Exception as error:
            # A function of the user may have this name for another purpose. The losses are conclusive without it.
            lacks = f"metric(ctx, model) raised {type(error).__name__}: {error}"
    return TrainCheck(
        losses=tuple(losses), finite=finite, changed=changed, scaler_skips=skips, metric=metric, metric_lacks=lacks
    )


def _metric(workload: Workload, ctx: Context, step: Step, spec: TrialSpec, plan: CheckPlan) -> float | None:
    """Return the value of the workload's own metric for the model as it is now; ``None`` if it has none. Raises
    `WorkloadError` if it is not a finite number."""
    metric = contract.optional(workload, "metric")
    if metric is None:
        return None
    step.model.eval()
    with torch.no_grad(), autocast(step.device, step_plan(spec.config)):
        value = metric(at_once(ctx, spec.config), step.model)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise WorkloadError(f"metric(ctx, model) must return a number, not {type(value).__name__}") from None
    if not math.isfinite(number):
        raise WorkloadError(
            f"metric(ctx, model) returned {number} after {plan.steps} steps",
            advice="let it return a finite number for a model that has only begun to learn.",
        )
    return number


def take_steps(step: Step, batches: list[Any], steps: int, beats: Beats) -> tuple[list[float], bool, int]:
    """Return ``(losses, whether all are finite, number of steps skipped by GradScaler)``.

    A skipped step is repeated with the same batch and its loss is not listed: GradScaler starts with a scale that it
    expects to be too high, and a curve delayed by these steps could not be compared. At most ``steps`` steps may be
    skipped.
    """
    losses: list[float] = []
    skips = 0
    while len(losses) < steps and skips < steps:
        # On a CPU the batch is not copied to the device, and the loss function may write into it.
        batch = copy.deepcopy(batches[len(losses) % len(batches)])
        scale = step.scaler.get_scale() if step.scaler else 0.0
        loss = float(step(batch))
        if not math.isfinite(loss):
            return losses, False, skips
        # The scale decreases exactly after a step that overflowed.
        if step.scaler and step.scaler.get_scale() < scale:
            skips += 1
        else:
            losses.append(loss)
        beats.step(len(losses) + skips, loss=loss)
        if beats.phase is Phase.COMPILE:
            beats.enter(Phase.MEASURE)
    return losses, True, skips


def _start(
    workload: Workload, ctx: Context, plan: CheckPlan, worker_start_method: str
) -> tuple[dict[str, Any], list[Any]]:
    """Load the common starting point of all launches of a check: a ``state_dict`` on the CPU, and batches as the loader
    returned them. The first reference run saves it if absent; a repeated one reuses it."""
    path = Path(plan.store) / "start.pt"
    if plan.reference and plan.seed == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(_draw(workload, ctx, plan, worker_start_method), buffer)
        write_atomic(path, buffer.getvalue())
    try:
        stream = open_regular(path, own=True)
    except FileNotFoundError:
        raise AutotuneError(f"there are no weights and batches to start from in {path.parent}") from None
    except OSError as error:
        raise _not_ours(path, error.strerror or str(error)) from error
    with stream:
        if os.fstat(stream.fileno()).st_nlink > 1:
            # It may be some other file of this user.
            raise _not_ours(path, "it has another name elsewhere")
        # Batches may hold any class of the workload, so only unpickling can read them, which runs whatever the file
        # contains. The file is this user's own, and only launches of the study write to the study's folder.
        saved = torch.load(stream, map_location="cpu", weights_only=False)
    return saved["weights"], saved["batches"]


def _not_ours(path: Path, why: str) -> MachineError:
    return MachineError(
        f"{path}, which checks start from, was not written by this study: {why}",
        advice="remove it, and let nobody else write to the study's folder.",
    )


def _draw(workload: Workload, ctx: Context, plan: CheckPlan, worker_start_method: str) -> dict[str, Any]:
    """Create the initial weights and some batches."""
    loader = open_loader(workload, ctx, {"batch_size": ctx.batch_size}, worker_start_method=worker_start_method)
    torch.manual_seed(ctx.seed)
    weights = workload.model(ctx).state_dict()
    batches = list(itertools.islice(loader, plan.batches))
    if not batches:
        raise no_batch()
    return {"weights": weights, "batches": batches}


def _load_weights(model: nn.Module, weights: dict[str, Any], spec: TrialSpec) -> None:
    try:
        load_whole(model, weights)
    except RuntimeError as error:
        raise WorkloadError(
            f"{spec.workload.name}: under this configuration the model has other weights than in the reference run",
            advice="declare a knob of the workload that changes the model with `autotune.knob(…, changes_maths=True)`.",
        ) from error


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the trainable parameters, on the CPU because device memory may be tight."""
    parameters = {name: own_part(p.detach()) for name, p in model.named_parameters() if p.requires_grad}
    return {name: part.to("cpu", copy=True) for name, part in parameters.items()}


def changed_fraction(before: dict[str, torch.Tensor], model: nn.Module) -> float:
    """Return the fraction of the tensors in ``before`` that have changed in the model; 0 if there are none."""
    now = dict(model.named_parameters())
    differing = sum(not torch.equal(tensor, own_part(now[name].detach()).cpu()) for name, tensor in before.items())
    return differing / len(before) if before else 0.0
