"""A short training under a profile, in a plain loop: what `autotune train` runs. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat

import torch

from autotune import training
from autotune import workload as contract
from autotune.applied import Applied
from autotune.errors import UsageError
from autotune.records import DataRef, WorkloadRef
from autotune.workload import Context


@dataclass(frozen=True)
class TrainingRate:
    """The rate of a short training.

    Attributes:
        samples_per_s: rate of the counted steps by the wall clock, including loader waits.
        counted_steps: number of steps after the first ones, which compile, warm up, and consume prefetched batches.
        first_step_s: duration of the first step in seconds.
        last_loss: loss of the last step.
    """

    samples_per_s: float
    counted_steps: int
    first_step_s: float
    last_loss: float


def train(
    applied: Applied,
    ref: WorkloadRef,
    data: DataRef,
    *,
    steps: int,
    on_step: Callable[[int, float | None], None],
) -> TrainingRate:
    """Train a workload under a profile for some steps, in a plain loop without the instruments of a trial.

    Args:
        on_step: called with the number of the step and the rate so far, about once a second.

    Raises:
        WorkloadError: the workload cannot be loaded, or its data set does not fill a batch.
        UsageError: fewer than three steps.
    """
    if steps < 3:
        raise UsageError("--steps must be at least 3: the first steps are not counted")
    applied.process()
    workload = contract.load(ref)
    ctx = Context(
        device=applied.device,
        batch_size=applied.batch_size,
        image_size=applied.profile.conditions.image_size,
        seed=applied.profile.conditions.seed,
        data=data,
        args=contract.args_of(workload, ref),
        knobs=training.workload_knobs(workload, applied.config),
    )
    loader = training.open_loader(
        workload, ctx, applied.config, worker_start_method=applied.profile.conditions.worker_start_method
    )
    # The worker processes start here, before the model is on the device.
    batches = chain(iter(loader), chain.from_iterable(repeat(loader)))
    step = training.build(workload, ctx, applied.config)
    skipped = min(max(3, loader.num_workers * (loader.prefetch_factor or 0)), steps // 2)
    stopwatch = _Stopwatch(applied.device, skipped, on_step)
    loss = torch.zeros(())
    for _ in range(steps):
        batch = next(batches)
        loss = step(batch)
        stopwatch.count(training.samples_in(workload, ctx, batch))
    return stopwatch.stop(float(loss))


class _Stopwatch:
    """Times the steps of a training, without the first ``skipped`` ones, and reports about once a second."""

    def __init__(self, device: str, skipped: int, on_step: Callable[[int, float | None], None]) -> None:
        self._device = device
        self._skipped = skipped
        self._on_step = on_step
        self._steps = 0
        self._samples = 0
        self._first_step_s = 0.0
        # Restarted after the skipped steps.
        self._began = self._reported = time.monotonic()

    def count(self, samples: int) -> None:
        """Count a step with this number of samples."""
        self._steps += 1
        if self._steps == 1:
            _synchronize(self._device)
            self._first_step_s = time.monotonic() - self._began
        if self._steps > self._skipped:
            self._samples += samples
        elif self._steps == self._skipped:
            _synchronize(self._device)
            self._began = time.monotonic()
        now = time.monotonic()
        if now - self._reported >= 1.0:
            self._reported = now
            self._on_step(self._steps, self._samples / (now - self._began) if self._samples else None)

    def stop(self, last_loss: float) -> TrainingRate:
        """Return the rate, once the device has finished."""
        _synchronize(self._device)
        rate = self._samples / (time.monotonic() - self._began)
        return TrainingRate(rate, self._steps - self._skipped, self._first_step_s, last_loss)


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
