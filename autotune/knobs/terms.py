"""What a knob declares of itself, and the facts of a place that it is asked about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from autotune.base.records import Host, Probe, Value

if TYPE_CHECKING:
    import torch


class Scope(StrEnum):
    """The part of a training that a knob acts on."""

    PROCESS = "process"
    MODEL = "model"
    STEP = "step"
    OPTIMIZER = "optimizer"
    LOADER = "loader"
    WORKLOAD = "workload"
    #: The exchange of gradients between ranks.
    EXCHANGE = "exchange"


class Maths(StrEnum):
    """What a knob does to the numbers that a step computes.

    ``SAME``: nothing. ``KERNELS``: the same function, computed by other kernels; results are equal except for rounding,
    provided the kernels are correct. ``CHANGED``: another function.
    """

    SAME = "same"
    KERNELS = "kernels"
    CHANGED = "changed"


@dataclass(frozen=True)
class SiteFacts:
    """Facts from which a knob decides what is possible here.

    Attributes:
        batch_size: the baseline's batch size.
        global_batch: samples of an optimizer's step, if the user has stated them; then the batch size is this.
        parts: in how many parts the user runs it today, if stated.
        pinned: values that the whole search has, as the user has stated.
    """

    probe: Probe
    host: Host
    batch_size: int
    global_batch: int | None = None
    parts: int | None = None
    pinned: Mapping[str, Value] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.probe.device != "cpu"

    @property
    def ranks(self) -> int:
        """The number of ranks whose gradients are exchanged; of a script that is its own affair."""
        return self.probe.ranks if self.probe.own is None else 1

    @property
    def images_vary(self) -> bool:
        """Whether the shapes of images vary: as was seen, or else as the workload declares."""
        seen = self.probe.images_vary
        return self.probe.varying_shapes if seen is None else seen


@dataclass(frozen=True)
class Refusal:
    """Why values of a knob are not possible in some places.

    Attributes:
        reason: a clause that names what is missing.
        when: returns whether the refusal applies to a value here.
        values: values that can be refused; empty for all.
        unless_stated: the value is not tried by the search's own choice, but a user who states it has it measured.
    """

    reason: str
    when: Callable[[SiteFacts, Value], bool]
    values: tuple[Value, ...] = ()
    unless_stated: bool = False


@dataclass(frozen=True)
class OwnOption:
    """What options of scripts that set a knob are commonly called: without dashes in front, with underscores.

    Attributes:
        names: names that leave no doubt.
        like: a pattern of names that may be meant.
        sets: the value that a switch sets; ``None`` for an option that takes a value.
        choices: what the words stand for, if the option chooses by words.
    """

    names: tuple[str, ...] = ()
    like: str = r"(?!)"
    sets: Value | None = None
    choices: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """A normal prior: mean and standard deviation.

    For a rate, both are in natural logarithms: a mean of 0.1 means about 10 % more samples per second.
    """

    mean: float
    sd: float


#: ``device``: the device's own rate; ``loader``: the loader's own; ``whole``: end to end, if the two are not known
#: separately.
Part = Literal["device", "loader", "whole"]
#: Effects by value; ``None`` stands for each doubling of a number.
Effects = Mapping[Value | None, Expected]
#: Where the agent in a script sets something: see the package ``autotune_agent``.
Door = Literal["process", "loader", "optimizer", "model"]
#: Prior of a knob whose file states no effect.
UNKNOWN = Expected(0.0, 0.2)
ONE_RANK = "there is one rank, which exchanges nothing"
#: Why no knob of the exchange between ranks has an effect.
NO_EXCHANGE = (
    Refusal(ONE_RANK, lambda facts, value: facts.ranks < 2),
    Refusal("the workload's own parallel(ctx, m) is in its place", lambda facts, value: facts.probe.own_exchange),
)
NEEDS_CUDA = Refusal("needs a CUDA device", lambda facts, value: not facts.cuda)


@dataclass
class StepPlan:
    """What a training step does besides forward, backward and update. Knobs fill it in; `autotune.training.step` applies it.

    Attributes:
        autocast: dtype of ``torch.autocast``; ``None`` disables it.
        scale_loss: whether a GradScaler guards against underflow.
        non_blocking: whether batches are copied to the device asynchronously.
        channels_last: the number of dimensions of the tensors in a batch that are laid out with their channels last: 4
            for images ``(N, C, H, W)``, 5 for volumes ``(N, C, D, H, W)``, 0 for none.
        cudagraphs: whether the compiled model replays CUDA graphs, each of which overwrites the output of the last.
        parts: number of equal parts in which a batch goes through the model.
    """

    autocast: torch.dtype | None = None
    scale_loss: bool = False
    non_blocking: bool = False
    channels_last: int = 0
    cudagraphs: bool = False
    parts: int = 1
