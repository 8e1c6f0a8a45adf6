"""The object that `autotune.load_profile` returns: a profile that is applied to the user's own training.

Everything is applied by `autotune.training.step`, as in the trials, so that what is applied is what was measured. The
first method that needs torch imports it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import profile as profiles
from autotune.base.errors import ProfileError, UsageError
from autotune.base.layout import find_daemon
from autotune.base.ranks import own_rank
from autotune.base.records import Value
from autotune.knobs import KNOBS
from autotune.knobs.num_workers import WORKERS
from autotune.machine.host import read_host
from autotune.profile import Profile
from autotune.profile.in_force import GONE, Row, Store, differences, look_here
from autotune.space import too_large
from autotune.space.formatting import rate_text, settings, speedup_text

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from autotune.training.process_settings import ProcessSettings
    from autotune.training.step import Step


#: Options of a loader that need workers, and those that a sampler of whole batches takes the place of.
_OF_WORKERS = (
    *(name for name, knob in KNOBS.items() if knob.needs == WORKERS),
    *("multiprocessing_context", "worker_init_fn"),
)
_OF_BATCHES = ("batch_size", "shuffle", "sampler", "drop_last")


class Applied:
    """A profile with methods that set up a training as it was measured.

    `prepare` does it all. To do it part by part, call the others in the order of a plain training: `process` first
    (before CUDA is initialized), then `loader`, `model`, `optimizer`, `step`.

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
        self.device = device or (f"cuda:{_own_card()}" if measured_on == "cuda" else "cpu")

    def __repr__(self) -> str:
        study, gives = self.profile.provenance.study, self.profile.gives
        rate = rate_text(gives.samples_per_second, gives.ci95)
        speedup = speedup_text(gives.speedup, gives.speedup_ci95, gives.unproven)
        return (
            f"<{type(self).__name__} profile of {self.profile.workload.name} ({study}) on {self.device}: "
            f"{settings(self.config)}; {rate} {self.profile.unit}, {speedup}>"
        )

    @property
    def batch_size(self) -> int:
        """Samples per step."""
        return int(self.config["batch_size"])

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer],
        dataset: Dataset[Any],
        loss: Callable[[nn.Module, Any], torch.Tensor],
        *,
        after_backward: Callable[[nn.Module], None] | None = None,
        after_step: Callable[[nn.Module], None] | None = None,
        ddp: Mapping[str, Any] | None = None,
        **loader: Any,
    ) -> tuple[DataLoader[Any], Step]:
        """Set up a whole training, in the order of a trial, and return its loader and its step.

        With several ranks, started by ``torchrun``, each gets its part of a data set that has a length, unless
        ``loader`` has a sampler, and the step averages their gradients. The batch size is that of each rank.

        The settings of the process are applied first. The loader's workers start next, before the model is moved to the
        device; the first loop over the loader goes through the batches that they have begun to make.

        Args:
            model: is moved to the device, laid out and compiled in place.
            optimizer: over the parameters of the model, before its first step; or a function that makes it from the
                model on its device.
            loss: ``loss(model, batch) -> Tensor`` of shape ``()``, run under autocast if the precision requires it.
            after_backward, after_step, ddp: see `step`.
            loader: arguments of ``torch.utils.data.DataLoader`` (``shuffle``, ``drop_last``, ``collate_fn``, …). They
                override the profile's knobs.

        Raises:
            UsageError: CUDA is already initialized, and the profile has an allocator setting; ``dataset`` is a loader,
                or ``model`` is not a module.
        """
        import torch
        from torch import nn

        from autotune.training.feed import StartedLoader

        if not isinstance(model, nn.Module):
            raise UsageError(
                f"the first argument is the model, and got {type(model).__name__}",
                advice="it is prepare(model, optimizer, dataset, loss).",
            )
        _refuse_loader(dataset)
        self.process()
        if own_rank().count > 1 and torch.device(self.device).index:
            # The thread that pins memory starts with the loader's workers, on the card that is current then.
            torch.cuda.set_device(self.device)
        batches = StartedLoader(dataset, **self._options_with(_divided(dataset, loader)))
        model = self.model(model)
        prepared = self.optimizer(optimizer(model) if callable(optimizer) else optimizer)
        return batches, self.step(model, prepared, loss, after_backward=after_backward, after_step=after_step, ddp=ddp)

    def process(self) -> ProcessSettings:
        """Apply the settings of the whole process: threads, allocators, cuDNN, TF32.

        They stay, unless this is called in a ``with`` statement, ``with profile.process():``, at whose end they are set
        back to what they were.

        Raises:
            UsageError: CUDA is already initialized, and the profile has an allocator setting.
        """
        from autotune.training import process_settings

        return process_settings.process(self.config)

    def loader(self, dataset: Dataset[Any], **kwargs: Any) -> DataLoader[Any]:
        """Return a DataLoader over your data set with the profile's batch size, workers, prefetching and pinning.

        Args:
            kwargs: other arguments of ``torch.utils.data.DataLoader`` (``shuffle``, ``sampler``, ``collate_fn``, …).
                They override the profile's knobs.
        """
        from torch.utils.data import DataLoader

        _refuse_loader(dataset)
        return DataLoader(dataset, **self._options_with(kwargs))

    def _options_with(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a loader, some of which are the user's own, without those that these rule out."""
        options = self._loader_options()
        if own.get(WORKERS) == 0:
            options = {name: value for name, value in options.items() if name not in _OF_WORKERS}
        if own.get("batch_sampler") is not None:
            options = {name: value for name, value in options.items() if name not in _OF_BATCHES}
        return {**options, **own}

    def _loader_options(self) -> dict[str, Any]:
        from autotune.training import step as training

        return training.loader_options(self.config, worker_start_method=self.profile.conditions.worker_start_method)

    def model(self, model: nn.Module) -> nn.Module:
        """Move your model to the device in the profile's memory format, and compile it in place if the profile does."""
        from autotune.training import step as training

        return training.apply_model(model, self.config, self.device)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Apply the profile's implementation to your optimizer. Call this before its first step."""
        from autotune.training import step as training

        return training.apply_optimizer(optimizer, self.config)

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[nn.Module, Any], torch.Tensor],
        *,
        after_backward: Callable[[nn.Module], None] | None = None,
        after_step: Callable[[nn.Module], None] | None = None,
        ddp: Mapping[str, Any] | None = None,
    ) -> Step:
        """Return a callable that takes a training step with a batch, and returns the loss, shape ``()``, detached.

        Args:
            loss: ``loss(model, batch) -> Tensor`` of shape ``()``, run under autocast if the precision requires it.
            after_backward: called with the model when gradients are complete and unscaled (for clipping).
            after_step: called with the model after the update of the weights (for an EMA).
            ddp: with several ranks, arguments of ``DistributedDataParallel`` that the profile does not set, such as
                ``find_unused_parameters``. A model that is already wrapped or sharded is used as it is.

        Raises:
            UsageError: ``loss`` is a module, such as ``nn.CrossEntropyLoss()``, which takes other arguments.
        """
        from torch import nn

        from autotune.training.step import Step

        if isinstance(loss, nn.Module):
            raise UsageError(
                f"loss is called as loss(model, batch), and {type(loss).__name__} takes outputs and targets",
                advice="give a function: def loss(model, batch): images, labels = batch; "
                "return criterion(model(images), labels).",
            )
        return Step(
            model,
            optimizer,
            loss,
            self.config,
            self.device,
            after_backward=after_backward,
            after_step=after_step,
            ddp=ddp or {},
        )

    def differences(self) -> list[Row]:
        """Return rows ``(what, in the profile, here)`` for what differs on this machine, as far as that can be seen.

        The card is compared by what the driver reports, and not at all if the profile was measured on a CPU. A file of
        the workload that is missing here does not count as a difference.
        """
        _, _, index = self.device.partition(":")
        here = look_here(index=int(index or 0))
        then, now = self.profile.conditions.ranks, own_rank().count
        ranks = [] if then == now else [("ranks", str(then), str(now))]
        return [*(row for row in differences(self.profile, here) if row[2] != GONE), *ranks]


def _refuse_loader(dataset: object) -> None:
    """Refuse a loader where a data set is expected, which would only fail in a worker.

    Raises:
        UsageError: it is a loader.
    """
    from torch.utils.data import DataLoader

    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"the profile makes the loader itself, of a data set, and got {type(dataset).__name__}",
            advice="give its data set (loader.dataset), and what else the loader was made with as keyword arguments.",
        )


def _own_card() -> int:
    """Return the number of this rank's card among those that it sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # A launcher may show each rank only its own card.
    return own_rank().local if visible is None or "," in visible else 0


def _divided(dataset: Dataset[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a loader; with several ranks, they include the sampler of this one."""
    from torch.utils.data import IterableDataset

    rank = own_rank()
    if rank.count < 2 or isinstance(dataset, IterableDataset) or {"sampler", "batch_sampler"} & options.keys():
        return options
    from autotune.training.exchange import RankSampler

    shuffle = bool(options.get("shuffle", False))
    drop_last = bool(options.get("drop_last", False))
    sampler = RankSampler(dataset, rank.count, rank.number, shuffle=shuffle, drop_last=drop_last)
    return {**options, "shuffle": False, "sampler": sampler}


def differences_in_words(applied: Applied) -> list[str]:
    """Return what `Applied.differences` mean for the promised rate, one sentence for each kind."""
    return profiles.warnings_for(applied.differences())


def load_profile(
    path: str | os.PathLike[str] | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    strict: bool = False,
) -> Applied:
    """Read a profile and prepare to apply it. Give either ``path`` or ``model``.

    If it was measured on another machine, or something has changed since, a warning says what differs.

    Args:
        path: a ``profile.yaml``.
        model: a model searched for on this machine, as for ``--model``. If it was only searched for on another
            machine, the nearest profile is used.
        batch_size: with ``model``, the batch size that the profile is to have.
        device: a torch device string; by default, the kind of device of the measurement.
        strict: raise an error where there would be a warning.

    Raises:
        ProfileError: the file is not a profile that this version can read, or the model was never searched for here, or
            not with that batch size; or, with ``strict``, something differs.
        UsageError: both ``path`` and ``model`` are given, or neither; or the profile requires more workers than this
            machine can bear.
    """
    if (path is None) == (model is None):
        raise UsageError("load_profile takes the path of a profile, or model=…")
    if path is not None and batch_size is not None:
        raise UsageError("batch_size says which of a model's profiles to load, and a path names one already")
    if path is not None:
        place, profile = Path(path), profiles.read(Path(path))
    else:
        assert model is not None
        entry, _ = Store(find_daemon().profiles).find(os.fspath(model), look_here(), batch_size)
        place, profile = entry.path, entry.profile
    applied = Applied(profile, device)
    sentences = differences_in_words(applied)
    if strict and sentences:
        # A traceback shows the message alone.
        raise ProfileError(f"{place} does not hold here: {' '.join(sentences)}", advice="search on this machine.")
    for sentence in sentences:
        warnings.warn(f"{place}: {sentence}", stacklevel=2)
    return applied
