"""The part that all kinds of launch share: loading the workload and initializing the device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Dataset

from autotune.workload import contract
from autotune.child.beats import Beats
from autotune.child.memory import DeviceMemory
from autotune.base.errors import MachineError
from autotune.machine.cuda import trouble
from autotune.machine.gpu import NvmlUnavailable, gpus
from autotune.machine.nvml import cuda_version
from autotune.training.process_settings import process
from autotune.base.records import Config, Phase, TrialSpec
from autotune.training.sample_order import SampleOrder
from autotune.training.stopwatch import Collate
from autotune.training.step import Wrap, open_loader, workload_knobs
from autotune.workload.contract import Context, Workload

#: On a CPU, a heat may take this many times the memory that one training may.
HEAT_ROOM = 2


class Launch:
    """A launch with its workload loaded. Nothing is on the device yet, and no worker has started.

    Args:
        applied: what is applied to the process before; ``None``: the spec's configuration.

    Attributes:
        ctx: the context passed to the workload's functions.
        order: of the samples, for all loaders of the launch.
        memory: available after `wake`.

    Raises:
        MachineError: torch cannot use the requested device.
    """

    memory: DeviceMemory

    def __init__(self, spec: TrialSpec, beats: Beats, applied: Config | None = None) -> None:
        self.spec = spec
        self.beats = beats
        process(spec.config if applied is None else applied)
        beats.enter(Phase.LOAD)
        self.device = _device(spec)
        if self.device.index:
            # The thread that pins memory begins with the loader's workers, on the card that is current then. On the
            # first one, a rank of another would open a second context.
            torch.cuda.set_device(self.device)
        self.workload = contract.load(spec.workload)
        self.ctx = _context(spec, self.workload, self.device)
        self.order = SampleOrder(spec.seed, spec.first_sample, rank=spec.rank, ranks=spec.ranks)
        beats.samples_drawn = lambda: self.order.drawn * spec.ranks

    def open_loader(
        self, *, data: tuple[Dataset[Any], Collate] | None = None, wrap: Wrap | None = None
    ) -> Iterable[Any]:
        """Open the loader under the spec's configuration. Its workers start with the first ``iter``.

        It begins with samples that no launch of the study has read before (see `SampleOrder`).

        Raises:
            WorkloadError: the data set does not fill one batch.
        """
        return open_loader(
            self.workload,
            self.ctx,
            self.spec.config,
            worker_start_method=self.spec.worker_start_method,
            data=data,
            order=self.order,
            seed=order_seed(self.spec),
            wrap=wrap,
        )

    def wake(self) -> None:
        """Enter the build phase: initialize the device and start counting and limiting memory."""
        self.beats.enter(Phase.BUILD)
        limit_bytes = self.spec.memory_limit_bytes
        if limit_bytes is not None and self.spec.heat is not None and self.device.type == "cpu":
            # What one entrant has freed, the C library and oneDNN keep; alone, the next one would not have it.
            limit_bytes *= HEAT_ROOM
        self.memory = DeviceMemory(self.device, limit_bytes)
        self.memory.enforce()
        self.beats.memory_bytes = lambda: self.memory.peak_bytes


def order_seed(spec: TrialSpec) -> int:
    """Return the seed of a launch's own random numbers, from 0 to 2**63 - 1. It follows from the study's seed and the
    launch's name."""
    own = f"/{spec.rank}" if spec.rank else ""
    digest = hashlib.blake2b(f"{spec.seed}/{spec.launch}{own}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _device(spec: TrialSpec) -> torch.device:
    """Return the torch device of a launch without initializing CUDA, because loader workers are forked before that.

    If the launcher made one card the only visible one, it is ``cuda:0`` whatever its name.
    """
    name = spec.devices[spec.rank] if len(spec.devices) > 1 else spec.devices[0]
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MachineError(
            f"torch {torch.__version__} cannot use {name}",
            advice=_trouble() or "see what `autotune doctor` says of the GPU; --device cpu leaves it alone.",
        )
    alone = "CUDA_VISIBLE_DEVICES" in spec.env
    index = spec.rank if alone or ":" not in name else int(name.rsplit(":", 1)[1])
    if index >= torch.cuda.device_count():
        raise MachineError(f"there is no cuda:{index}: torch sees {torch.cuda.device_count()} device(s)")
    return torch.device("cuda", index)


def _trouble() -> str | None:
    """Return why torch cannot use the driver, and what to do, as far as their versions tell."""
    cards = gpus()
    if isinstance(cards, NvmlUnavailable) or not cards:
        return None
    driver = cards[0].driver_version
    # A library that is newer than the driver works on some cards only, and here torch has just failed.
    return trouble(torch.version.cuda, driver) or trouble(torch.version.cuda, driver, library=cuda_version())


def _context(spec: TrialSpec, workload: Workload, device: torch.device) -> Context:
    return Context(
        device=str(device),
        batch_size=int(spec.config.get("batch_size", spec.batch_size)),
        image_size=spec.image_size,
        seed=spec.seed,
        data=spec.data,
        args=contract.args_of(workload, spec.workload),
        knobs=workload_knobs(workload, spec.config),
        rank=spec.rank,
        ranks=spec.ranks,
    )
