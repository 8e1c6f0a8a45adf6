"""Checks that a training stays within its memory: trains until memory has settled, then runs what a real training meets
eventually: an evaluation pass and the largest sample. Running out of memory at any point raises, as in any launch."""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from autotune.base.clock import Clock
from autotune.base.records import Hold, HoldPlan, Phase, TrialSpec, TrialStatus
from autotune.child.failure import classify
from autotune.child.launch import Beats, Launch
from autotune.child.loop import checked, mark
from autotune.child.probe import leaves
from autotune.child.windows import card_of
from autotune.knobs.compile_mode import compiles
from autotune.machine.gpu import CardWatch
from autotune.training.feed import length_of
from autotune.training.step import Step, at_once, autocast, build, data_of, move, samples_in, split, step_plan
from autotune.workload import contract
from autotune.workload.contract import Context, Workload, innermost

#: Limits of the search for the largest sample of a data set.
LOOK_SAMPLES = 256
LOOK_S = 5.0


def largest_sample(workload: Workload, ctx: Context, dataset: Dataset[Any], clock: Clock) -> tuple[Any, int | None]:
    """Return ``(sample, its size in bytes)``, or ``(None, None)`` if all samples have the same shape.

    The workload names the sample, or samples spread over the data set are compared.
    """
    dataset = innermost(dataset)
    named = contract.optional(workload, "largest_sample")
    if named is not None:
        sample = named(ctx, dataset)
        return sample, _size_bytes(sample)
    if not getattr(workload, "VARYING_SHAPES", False):
        return None, None
    deadline = clock.now() + LOOK_S
    best, best_bytes = None, -1
    for sample in _spread(dataset):
        if (size := _size_bytes(sample)) > best_bytes:
            best, best_bytes = sample, size
        if clock.now() > deadline:
            break
    return best, best_bytes


def _spread(dataset: Dataset[Any]) -> Iterator[Any]:
    """Yield up to `LOOK_SAMPLES` samples or somewhat more, spread over the data set if it can be indexed."""
    if isinstance(dataset, IterableDataset):
        yield from itertools.islice(dataset, LOOK_SAMPLES)
        return
    count = len(dataset)  # type: ignore[arg-type]
    for index in range(0, count, max(1, count // LOOK_SAMPLES)):
        yield dataset[index]


def _size_bytes(sample: Any) -> int:
    """Return the size of a sample in bytes: tensors, arrays, and numbers and strings not yet converted to tensors."""
    size = 0
    for _, part in leaves(sample):
        own = getattr(part, "nbytes", None)
        if isinstance(own, int):
            size += own
        elif isinstance(part, str | bytes):
            size += len(part)
        elif isinstance(part, int | float):
            size += 8
    return size


#: Number of batches in the evaluation pass.
EVALUATED = 2
#: Timing an evaluation takes at most this long, and this many turns of either mode.
EVALUATION_S, EVALUATION_TURNS = 3.0, 20
#: No turn begins after this part of the time that the launch has.
TIMING_PART = 0.6
#: Number of steps with the largest sample, and of training steps after them.
LARGEST_STEPS = 2
LAST_STEPS = 2
#: Resident memory creeps because the C allocator returns memory at its own pace. On a CPU, growth below this
#: fraction of the peak, or below this number of bytes, is ignored. CUDA reserves whole segments and needs no tolerance.
CREEP = 0.01
GRAIN_BYTES = 2**20


def hold(spec: TrialSpec, plan: HoldPlan, beats: Beats) -> Hold:
    """Train under ``spec.config`` according to a plan and return its memory use. Raises as `checked` does."""
    clock, launch = beats.clock, Launch(spec, beats)
    workload, ctx = launch.workload, launch.ctx
    dataset, collate = data = data_of(workload, ctx)
    loader = launch.open_loader(data=data)
    # As in a plain loop, start the workers before initializing the device.
    batches = _endless(loader, iter(loader))
    launch.wake()
    run = HoldRun(launch, build(workload, ctx, spec.config))

    run.step(next(batches), first=True)
    launch.memory.first_step_over()
    began = clock.now()
    settled = run.settle(batches, plan)
    seconds = clock.now() - began
    epoch = length_of(loader)
    sustained = run.sustain(batches, plan.sustain_s, epoch) if launch.device.type == "cuda" else Sustained()
    # With a sharded model, no rank can evaluate while the others train.
    evaluates = spec.ranks == 1 or contract.optional(workload, "parallel") is None
    evaluated = _evaluate(run, workload, at_once(ctx, spec.config), batches) if evaluates else None
    sample, largest_bytes = largest_sample(workload, ctx, dataset, clock)
    if largest_bytes is not None:
        batch = collate([sample] * ctx.batch_size)
        for number in range(LARGEST_STEPS):
            # Its shape is new, so the step may compile.
            run.step(batch, first=number == 0)
        del batch, sample
    for _ in range(LAST_STEPS):
        run.step(next(batches))
    peak_bytes = run.peak_bytes
    # Timed last, because what a model keeps from inference mode cannot be used in training. It must not cost the
    # launch, whose time is limited.
    limit_s = math.inf if spec.limits.total_s is None else TIMING_PART * spec.limits.total_s
    ends = min(clock.now() + EVALUATION_S, beats.began + limit_s)
    timed: dict[str, float] = {}
    if evaluated is not None:
        timed = _time_evaluation(run, workload, at_once(ctx, spec.config), evaluated, next(batches), ends)
    return Hold(
        steps=run.steps,
        seconds=seconds,
        settled=settled,
        peak_bytes=peak_bytes,
        first_step_bytes=launch.memory.first_step_bytes,
        capacity_bytes=launch.memory.capacity_bytes,
        alloc_retries=launch.memory.alloc_retries,
        evaluated=evaluated,
        evaluation_per_s=timed.get("no_grad"),
        inference_gain=timed["inference"] / timed["no_grad"] if len(timed) > 1 else None,
        largest_bytes=largest_bytes,
        sustained_per_s=sustained.per_s,
        sustained_s=sustained.seconds,
        sm_clock_mhz=sustained.clock_mhz,
    )


@dataclass(frozen=True)
class Sustained:
    """The rate of a training that had gone on for some time, and the card's clock then; ``None`` if unknown."""

    per_s: float | None = None
    seconds: float = 0.0
    clock_mhz: int | None = None


class HoldRun:
    """The steps of one launch."""

    def __init__(self, launch: Launch, training_step: Step) -> None:
        self.launch = launch
        self.spec = launch.spec
        self.beats = launch.beats
        self.memory = launch.memory
        self.clock = launch.beats.clock
        self.training_step = training_step
        card = card_of(launch.spec)
        self.card = CardWatch(card) if card else None
        self.steps = 0

    @property
    def peak_bytes(self) -> int:
        """Peak memory. On CUDA this is reserved memory, because other processes cannot use fragments either."""
        reserved = self.memory.peak_reserved_bytes
        return self.memory.peak_bytes if reserved is None else reserved

    def step(self, batch: Any, *, first: bool = False) -> None:
        """Run one training step. The first step of a kind may compile, so it gets the compile phase's time limit."""
        self._enter(first)
        value = checked(self.training_step(batch))
        self.steps += 1
        self.beats.step(self.steps, loss=value)

    def sustain(self, batches: Iterator[Any], seconds: float, epoch_batches: int | None) -> Sustained:
        """CUDA: train for some time as a plain loop does, and return the rate.

        Each step is waited for once the next one is queued, so that the device always has work. The wait is for its
        end, not its loss: a copy to the host would queue behind the next step.
        """
        began = self.clock.now()
        #: For each step: an event after it, its samples, and whether its batch was the first of an epoch.
        ends: list[tuple[torch.cuda.Event, int, bool]] = []
        losses: list[torch.Tensor] = []
        while self.clock.now() - began < seconds:
            turned = epoch_batches is not None and (self.steps + bool(ends)) % epoch_batches == 0
            batch = next(batches)
            losses.append(self.training_step(batch))
            event = mark()
            ends.append((event, samples_in(self.launch.workload, self.launch.ctx, batch) * self.spec.ranks, turned))
            if len(ends) > 1:
                ends[-2][0].synchronize()
                self.steps += 1
                self.beats.step(self.steps)
        # Read while the card works: its clocks change as soon as it is idle.
        clock_mhz = self.card.sm_clock_mhz() if self.card else None
        for loss in losses:
            checked(loss)
        self.steps += bool(ends)
        # Without the turns of epochs. The first step only marks where the time begins.
        counted, counted_s = 0, 0.0
        for (start, _, _), (end, samples, turned) in pairwise(ends):
            if not turned:
                counted += samples
                counted_s += start.elapsed_time(end) / 1e3
        return Sustained(counted / counted_s if counted_s > 0 else None, self.clock.now() - began, clock_mhz)

    def settle(self, batches: Iterator[Any], plan: HoldPlan) -> bool:
        """Train until the peak stops growing; return whether it did.

        If time runs out before ``plan.settled_steps`` steps without growth, the peak counts as settled if it did not
        grow during the second half of the steps taken.
        """
        cpu = self.training_step.device.type == "cpu"
        began = self.clock.now()
        peak, quiet, taken = self.peak_bytes, 0, 0
        while True:
            self.step(next(batches))
            taken += 1
            now_bytes = self.peak_bytes
            if now_bytes > peak + (max(GRAIN_BYTES, CREEP * peak) if cpu else 0):
                peak, quiet = now_bytes, 0
            else:
                quiet += 1
            seconds = self.clock.now() - began
            if quiet >= plan.settled_steps and seconds >= plan.min_s:
                return True
            if seconds >= plan.max_s:
                return quiet >= max(1, taken / 2)

    def forward(
        self,
        compute: Callable[[nn.Module, Any], object],
        batch: Any,
        *,
        first: bool,
        without: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
    ) -> None:
        """Run only the forward pass of ``compute``, without gradients, as an evaluation does."""
        self._enter(first)
        plan, device = step_plan(self.spec.config), self.training_step.device
        batch = move(batch, device, non_blocking=plan.non_blocking, channels_last=plan.channels_last)
        for part in [batch] if plan.parts == 1 else split(batch, self.launch.ctx.batch_size, plan.parts):
            with without(), autocast(device, plan):
                compute(self.training_step.model, part)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.beats.step(self.steps)

    def _enter(self, first: bool) -> None:
        phase = Phase.COMPILE if first else Phase.MEASURE
        if self.beats.phase is not phase:
            self.beats.enter(phase)


def _computing(workload: Workload, ctx: Context, how: str) -> Callable[[nn.Module, Any], object]:
    """Return what an evaluation, as in `Hold.evaluated`, computes of a model and a batch."""
    evaluation = contract.optional(workload, "evaluate") if how == "evaluate" else None
    return lambda m, batch: workload.loss(ctx, m, batch) if evaluation is None else evaluation(ctx, m, batch)


def _evaluate(run: HoldRun, workload: Workload, ctx: Context, batches: Iterator[Any]) -> str:
    """Evaluate some batches and return how, as in `Hold.evaluated`. The model is left in training mode."""
    model = run.training_step.model

    def go(how: str) -> str:
        model.train(how == "train")
        for number in range(EVALUATED):
            run.forward(_computing(workload, ctx, how), next(batches), first=number == 0)
        return how

    try:
        if contract.optional(workload, "evaluate") is not None:
            return go("evaluate")
        try:
            return go("eval")
        except Exception as error:
            # Some models, such as detection models, return no losses in evaluation mode.
            if classify(error, run.spec).status is TrialStatus.OOM:
                raise
        return go("train")
    finally:
        model.train()


def _time_evaluation(
    run: HoldRun, workload: Workload, ctx: Context, evaluated: str, batch: Any, ends: float
) -> dict[str, float]:
    """Return the rates of computing an evaluation, in samples/s: "no_grad", and "inference" if that works.

    The two take turns on one batch, in case the machine is drifting. Fetching batches is not included.

    Args:
        ends: `clock` reading after which no turn begins.
    """
    compute = _computing(workload, ctx, evaluated)
    model, samples = run.training_step.model, samples_in(workload, run.launch.ctx, batch)
    modes: dict[str, Callable[[], AbstractContextManager[Any]]] = {"no_grad": torch.no_grad}
    if not compiles(run.spec.config):
        # A compiled model would be compiled once more for it.
        modes["inference"] = torch.inference_mode

    seconds: dict[str, list[float]] = {name: [] for name in modes}
    model.train(evaluated == "train")
    for number in range(EVALUATION_TURNS + 1):
        for name in list(modes):
            if run.clock.now() > ends:
                break
            began = run.clock.now()
            try:
                run.forward(compute, batch, first=number == 0, without=modes[name])
            except Exception:
                # The evaluation itself has been shown to work above. Some models do not support inference mode, which
                # is logged.
                if name == "no_grad":
                    raise
                traceback.print_exc()
                del modes[name], seconds[name]
                continue
            # The first turn may compile.
            if number:
                seconds[name].append(run.clock.now() - began)
    return {name: samples / median(taken) for name, taken in seconds.items() if len(taken) > 1}


def _endless(loader: Iterable[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield batches epoch after epoch, the first epoch from ``iterator``."""
    while True:
        yield from iterator
        # Like a plain loop, drop the old iterator and its workers before starting the next.
        del iterator
        iterator = iter(loader)
