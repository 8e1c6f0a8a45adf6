"""The object that `autotune.load_profile` returns: a profile that is applied to the user's own training.

Everything is applied by `autotune.training`, as in the trials, so what was measured is what is applied. The first
method that needs torch imports it.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import profile as profiles
from autotune.errors import UsageError
from autotune.formatting import rate_text, ratio_text, settings
from autotune.layout import find_daemon
from autotune.machine.host import read_host
from autotune.profile import Profile
from autotune.profile.store import Store, look_here
from autotune.records import Value
from autotune.space import too_large

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from autotune.training import Step


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

    def __repr__(self) -> str:
        where, gives = self.profile.provenance.study, self.profile.gives
        rate = rate_text(gives.samples_per_second, gives.ci95)
        speedup = ratio_text(gives.speedup, gives.speedup_ci95)
        return (
            f"<{type(self).__name__} profile of {self.profile.workload.name} ({where}) on {self.device}: "
            f"{settings(self.config)}; {rate} samples/s, {speedup} the baseline>"
        )

    @property
    def batch_size(self) -> int:
        """Samples per step."""
        return int(self.config["batch_size"])

    def process(self) -> None:
        """Apply the settings of the whole process: threads, allocator, cuDNN, TF32.

        Raises:
            UsageError: CUDA is already initialized, and the profile has an allocator setting.
        """
        from autotune import training

        training.process(self.config)

    def loader(self, dataset: Dataset[Any], **kwargs: Any) -> DataLoader[Any]:
        """Return a DataLoader over your data set with the profile's batch size, workers, prefetching and pinning.

        Args:
            kwargs: other arguments of ``torch.utils.data.DataLoader`` (``shuffle``, ``sampler``, ``collate_fn``, …).
                They override the profile's knobs.
        """
        from torch.utils.data import DataLoader

        from autotune import training

        options = training.loader_options(self.config, worker_start_method=self.profile.conditions.worker_start_method)
        return DataLoader(dataset, **{**options, **kwargs})

    def model(self, model: nn.Module) -> nn.Module:
        """Move your model to the device in the profile's memory format, and compile it in place if the profile does."""
        from autotune import training

        return training.apply_model(model, self.config, self.device)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Apply the profile's implementation to your optimizer. Call this before its first step."""
        from autotune import training

        return training.apply_optimizer(optimizer, self.config)

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[nn.Module, Any], torch.Tensor],
        *,
        after_backward: Callable[[nn.Module], None] | None = None,
        after_step: Callable[[nn.Module], None] | None = None,
    ) -> Step:
        """Return a callable that makes a training step with a batch, and returns the loss, shape ``()``, detached.

        Args:
            loss: ``loss(model, batch) -> Tensor`` of shape ``()``, run under autocast if the precision requires it.
            after_backward: called with the model when gradients are complete and unscaled (for clipping).
            after_step: called with the model after the update of the weights (for an EMA).
        """
        from autotune.training import Step

        return Step(
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
    import torch

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
    path: str | os.PathLike[str] | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    device: str | None = None,
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
    kept, rows = Store(find_daemon().profiles).find(os.fspath(model), look_here())
    for sentence in profiles.warnings_for(rows):
        warnings.warn(f"{kept.path}: {sentence}", stacklevel=2)
    return Applied(kept.profile, device)
