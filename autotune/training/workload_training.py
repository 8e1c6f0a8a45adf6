"""A workload's own training under a profile, in this process: its context, its loader, and its step. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Dataset

from autotune.base.ranks import own_rank
from autotune.base.records import Config, DataRef, WorkloadRef
from autotune.training import step as training
from autotune.training.applied import Applied
from autotune.training.feed import Collate, SampleOrder
from autotune.training.step import Step, Wrap
from autotune.workload import contract
from autotune.workload.contract import Context


class WorkloadTraining:
    """Loads a workload and applies the profile to this process; loader and step are made when asked for.

    Ask for the loader's first batch, or its iterator, before `build`: its workers start then, and the model should not
    be on the device yet.

    Attributes:
        workload, ctx: as `autotune.workload.contract` says. config: the profile's configuration.

    Raises:
        WorkloadError: the workload cannot be loaded.
    """

    def __init__(self, applied: Applied, ref: WorkloadRef, data: DataRef) -> None:
        applied.process()
        conditions, rank = applied.profile.conditions, own_rank()
        self.config: Config = applied.config
        self.worker_start_method: str = conditions.worker_start_method
        self.workload = contract.load(ref)
        self.ctx = Context(
            device=applied.device,
            batch_size=applied.batch_size,
            image_size=conditions.image_size,
            seed=conditions.seed,
            data=data,
            args=contract.args_of(self.workload, ref),
            knobs=training.workload_knobs(self.workload, applied.config),
            rank=rank.number,
            ranks=rank.count,
        )

    def open_loader(
        self,
        *,
        data: tuple[Dataset[Any], Collate] | None = None,
        order: SampleOrder | None = None,
        wrap: Wrap | None = None,
    ) -> Iterable[Any]:
        """Open the loader as `autotune.training.step.open_loader` does."""
        return training.open_loader(
            self.workload,
            self.ctx,
            self.config,
            worker_start_method=self.worker_start_method,
            data=data,
            order=order,
            wrap=wrap,
        )

    def build(self) -> Step:
        """Build model and optimizer on the device, as `autotune.training.step.build` does."""
        return training.build(self.workload, self.ctx, self.config)

    def samples_in(self, batch: Any) -> int:
        """Return the number of samples in a batch of each rank, all ranks together."""
        return training.samples_in(self.workload, self.ctx, batch) * self.ctx.ranks
