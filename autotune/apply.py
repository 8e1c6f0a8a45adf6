"""A profile at work: the object that `autotune.load_profile` gives. Imports torch.

Everything goes through `autotune.training`, which is what the trials ran, so what was measured is what is applied.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
from autotune.workload import Context


class Applied:
    """A profile whose methods set up a training the way it was measured.

    Use them in the order of a plain training: `process` first of all (before CUDA wakes), then `loader`, `model`,
    `optimizer`, `step`.

    Attributes:
        profile: the profile as data.
        config: the configuration in contract spelling.
        device: a torch device string.
    """

    def __init__(self, profile: Profile, device: str | None = None) -> None:
        self.profile = profile
        self.config: dict[str, Value] = dict(profile.configuration)
        measured_on = profile.conditions.device.split(":")[0]
        self.device = device or ("cuda:0" if measured_on == "cuda" else "cpu")

    @property
    def batch_size(self) -> int:
        """Samples per step."""
        return int(self.config["batch_size"])

    def process(self) -> None:
        """Set what belongs to the whole process: threads, allocator, cuDNN, TF32.

        Raises:
            UsageError: CUDA is already initialized, and the profile has an allocator setting.
        """
        training.process(self.config)

    def loader(self, dataset: Dataset[Any], **kwargs: Any) -> DataLoader[Any]:
        """A DataLoader over your data set with the profile's batch size, workers, prefetch and pinning.

        Args:
            kwargs: anything else ``torch.utils.data.DataLoader`` takes (``shuffle``, ``sampler``, ``collate_fn``, …);
                a knob of the profile given here overrides it.
        """
        options = training.loader_options(self.config, worker_start_method=self.profile.conditions.worker_start_method)
        return DataLoader(dataset, **{**options, **kwargs})

    def model(self, model: nn.Module) -> nn.Module:
        """Your model on the device, in the profile's memory format, compiled in place where the profile says so."""
        return training.apply_model(model, self.config, self.device)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Your optimizer with the profile's implementation. Call it before the first step."""
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
        """A function that takes a batch, makes one training step, and returns the loss, shape ``()``, detached.

        Args:
            loss: ``loss(model, batch) -> Tensor`` of shape ``()``; runs under autocast where the profile says so.
            after_backward: called with the model when gradients are complete and unscaled (clipping).
            after_step: called with the model when the weights have changed (EMA).
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
        """Rows ``(what, in the profile, here)`` for what differs here, as far as this process can see."""
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
    """Read a profile and get it ready to be applied.

    Args:
        path: a ``profile.yaml``.
        model: instead of it, what was searched for on this machine, as ``--model`` takes it. Where it was searched for
            on another machine only, or something has changed since, the nearest is taken, with a warning.
        device: a torch device string; the kind of device it was measured on, if not given.

    Raises:
        ProfileError: the file is no profile this version can read, or this model was never searched for here.
        UsageError: both of path and model are given, or neither.
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
    """How fast a short training went.

    Attributes:
        samples_per_s: over the counted steps, by the wall clock, loader waits included.
        counted_steps: those after the first ones, which compile, warm up, and live on the loader's head start.
        last_loss: of the last step.
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
    """Train a workload under a profile for some steps: a plain loop, nothing of the trial's stopwatch in it.

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
    iterator = iter(loader)
    step = training.build(workload, ctx, applied.config)

    skipped = min(max(3, loader.num_workers * (loader.prefetch_factor or 0)), steps // 2)
    first_step_s, counted, samples = 0.0, 0, 0
    loss = torch.zeros(())
    # The clock starts over behind the skipped steps.
    began = said = time.monotonic()
    for number in range(1, steps + 1):
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = iter(loader)
            batch = next(iterator)
        loss = step(batch)
        if number == 1:
            _wait(applied.device)
            first_step_s = time.monotonic() - began
        if number <= skipped:
            if number == skipped:
                _wait(applied.device)
                began = time.monotonic()
        else:
            counted += 1
            samples += training.samples_in(workload, ctx, batch)
        now = time.monotonic()
        if now - said >= 1.0:
            said = now
            on_step(number, samples / (now - began) if samples else None)
    _wait(applied.device)
    return TrainingRate(samples / (time.monotonic() - began), counted, first_step_s, float(loss))


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
