"""Applies a profile: the object that `autotune.load_profile` returns. Imports torch.

Everything is applied by `autotune.training`, as in the trials, so what was measured is what is applied.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autotune import profile as profiles
from autotune import training
from autotune import workload as contract
from autotune.errors import UsageError
from autotune.layout import find_daemon
from autotune.machine.host import read_host
from autotune.profile import Profile
from autotune.profile.store import Store, look_here
from autotune.records import DataRef, Value, WorkloadRef
from autotune.space import too_large
from autotune.workload import Context


class Applied:
    """A profile with methods that set up a training as it was measured.

    Call them in the order of a plain training: `process` first (before CUDA is initialized), then `loader`, `model`,
    `optimizer`, `step`.

    Attributes:
        profile: the profile as data.
        config: the configuration, as spelled in the contract.
        device: a torch device string.
    """

    def __init__(self, profile: Profile, device: str | None = None) -> None:
        self.profile = profile
        self.config: dict[str, Value] = dict(profile.configuration)
        excess = too_large(self.config, read_host())
        if excess is not None:
            raise UsageError(f"the profile cannot be applied here: {excess}", advice="search on this machine.")
        measured_on = profile.conditions.device.split(":")[0]
        self.device = device or ("cuda:0" if measured_on == "cuda" else "cpu")

    @property
    def batch_size(self) -> int:
        """Samples per step."""
        return int(self.config["batch_size"])

    def process(self) -> None:
        """Apply the settings of the whole process: threads, allocator, cuDNN, TF32.

        Raises:
            UsageError: CUDA is already initialized, and the profile has an allocator setting.
        """
        training.process(self.config)

    def loader(self, dataset: Dataset[Any], **kwargs: Any) -> DataLoader[Any]:
        """Return a DataLoader over your data set with the profile's batch size, workers, prefetching and pinning.

        Args:
            kwargs: other arguments of ``torch.utils.data.DataLoader`` (``shuffle``, ``sampler``, ``collate_fn``, …).
                They override the profile's knobs.
        """
        options = training.loader_options(self.config, worker_start_method=self.profile.conditions.worker_start_method)
        return DataLoader(dataset, **{**options, **kwargs})

    def model(self, model: nn.Module) -> nn.Module:
        """Move your model to the device in the profile's memory format, and compile it in place if the profile does."""
        return training.apply_model(model, self.config, self.device)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Apply the profile's implementation to your optimizer. Call this before its first step."""
        return training.apply_optimizer(optimizer, self.config)

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[nn.Module, Any], torch.Tensor],
        *,
        after_backward: Callable[[nn.Module], None] | None = None,
        after_step: Callable[[nn.Module], None] | None = None,
    ) -> training.Step:
        """Return a callable that makes a training step with a batch, and returns the loss, shape ``()``, detached.

        Args:
            loss: ``loss(model, batch) -> Tensor`` of shape ``()``, run under autocast if the precision requires it.
            after_backward: called with the model when gradients are complete and unscaled (for clipping).
            after_step: called with the model after the update of the weights (for an EMA).
        """
        return training.Step(
            model,
            optimizer,
            loss,
            self.config,
            self.device,
            after_backward=after_backward,
            after_step=after_step,
        )

    def differences(self) -> list[tuple[str, str, str]]:
        """Return rows ``(what, in the profile, here)`` for all differences that this process can see."""
        then = self.profile.fingerprint.values
        return [(n, str(then[n]), str(now)) for n, now in _here(self.device).items() if n in then and then[n] != now]


def _here(device: str) -> dict[str, Value | None]:
    host = read_host()
    cuda = device.startswith("cuda") and torch.cuda.is_available()
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cpu_model": host.cpu_model,
        "cores": host.cores,
        "gpu_model": torch.cuda.get_device_name(device) if cuda else None,
        "worker_start_method": multiprocessing.get_start_method(),
    }


def load_profile(
    path: str | os.PathLike[str] | None = None, *, model: str | None = None, device: str | None = None
) -> Applied:
    """Read a profile and prepare to apply it. Give either ``path`` or ``model``.

    Args:
        path: a ``profile.yaml``.
        model: a model searched for on this machine, as for ``--model``. If it was only searched for on another
            machine, or something has changed since, the nearest profile is used, with a warning.
        device: a torch device string; by default, the kind of device of the measurement.

    Raises:
        ProfileError: the file is not a profile that this version can read, or the model was never searched for here.
        UsageError: both ``path`` and ``model`` are given, or neither; or the profile asks for more workers than this
            machine can stand.
    """
    if (path is None) == (model is None):
        raise UsageError("load_profile takes the path of a profile, or model=…")
    if path is not None:
        return Applied(profiles.read(Path(path)), device)
    assert model is not None
    kept, rows = Store(find_daemon().profiles).find(model, look_here())
    for sentence in profiles.warnings_for(rows):
        warnings.warn(f"{kept.path}: {sentence}", stacklevel=2)
    return Applied(kept.profile, device)


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
