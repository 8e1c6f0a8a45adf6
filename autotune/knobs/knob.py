"""What a knob is: the contract of every file in this catalog."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from autotune.records import Host, Probe, Value

if TYPE_CHECKING:
    import torch
    from torch import nn


class Scope(StrEnum):
    """The part of a training that a knob acts on."""

    PROCESS = "process"
    MODEL = "model"
    STEP = "step"
    OPTIMIZER = "optimizer"
    LOADER = "loader"
    WORKLOAD = "workload"


class Maths(StrEnum):
    """What a knob does to the numbers that a step computes.

    ``SAME``: nothing. ``KERNELS``: the same function by other kernels, equal but for rounding as long as these are
    right. ``CHANGED``: another function.
    """

    SAME = "same"
    KERNELS = "kernels"
    CHANGED = "changed"


@dataclass(frozen=True)
class SiteFacts:
    """What a knob may look at to say what is possible here.

    Attributes:
        batch_size: the baseline's.
    """

    probe: Probe
    host: Host
    batch_size: int

    @property
    def cuda(self) -> bool:
        return self.probe.device != "cpu"


@dataclass(frozen=True)
class Refusal:
    """Why values of a knob are not possible in some places.

    Attributes:
        reason: one clause that names what is missing.
        when: whether it applies to a value here.
        values: the values it is about; empty: all.
    """

    reason: str
    when: Callable[[SiteFacts, Value], bool]
    values: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Expected:
    """A normal prior: mean and standard deviation.

    Of a rate, both are in natural logarithms: a mean of 0.1 expects about 10 % more samples per second.
    """

    mean: float
    sd: float


#: ``device``: the device's own rate, ``loader``: the loader's own, ``whole``: end to end, where nothing tells them
#: apart.
Part = Literal["device", "loader", "whole"]
#: By value; ``None`` stands for each doubling of a number.
Effects = Mapping[Value | None, Expected]
#: A knob about whose effect its file says nothing.
UNKNOWN = Expected(0.0, 0.2)
NEEDS_CUDA = Refusal("needs a CUDA device", lambda facts, value: not facts.cuda)


@dataclass
class StepPlan:
    """What a training step does besides forward, backward and update. Knobs fill it in; `autotune.training` obeys.

    Attributes:
        autocast: the dtype of ``torch.autocast``; ``None`` leaves it off.
        scale_loss: whether a GradScaler guards against underflow.
        non_blocking: whether batches are copied to the device without waiting.
        channels_last: whether images in a batch, ``(N, C, H, W)``, are laid out with their channels last.
        cudagraphs: whether the compiled model replays CUDA graphs, which overwrite their output at each replay.
    """

    autocast: torch.dtype | None = None
    scale_loss: bool = False
    non_blocking: bool = False
    channels_last: bool = False
    cudagraphs: bool = False


class Knob:
    """One thing that can be set.

    A file of the catalog subclasses this, says what holds for its knob, and makes one instance called ``KNOB``. The
    file's docstring is its page in ``docs/knobs.md``. Methods that apply a value import torch themselves: the process
    that searches has none.

    Attributes:
        name: as the command line, Optuna, YAML and JSON spell it, and the name of the file.
        about: a few words for a column.
        place: where it stands among the others in a configuration, ascending; equal places go by name.
        values: every value it can have, or ``None`` where any whole number from ``minimum`` on is one.
        default: PyTorch's own value; ``None`` where that depends on the machine or the workload (`default_here`).
        said_always: whether a description of a whole configuration names it even at PyTorch's default.
        memory: whether the peak of device memory depends on it.
        memory_slope: what a value other than the baseline's is expected to add to the memory that grows with the batch,
            as a fraction of the baseline's peak.
        switchable: whether a running training can take up another value at its next step.
        needs: the knob without which this one means nothing: it is inactive while that is 0, False or "off".
        inactive: why the knob means nothing at all in some places.
        refusals: why single values are not possible in some places; the first that applies is told.
        expected: what each value is expected to do to the rate, relative to the baseline's value, as common knowledge
            of the field; trials soon outweigh it.
    """

    name: str
    about: str
    scope: Scope
    place: int = 1000
    values: tuple[Value, ...] | None = None
    minimum: int = 1
    default: Value | None = None
    said_always: bool = False
    maths: Maths = Maths.SAME
    memory: bool = False
    memory_slope: Expected = Expected(0.0, 0.1)
    switchable: bool = False
    needs: str | None = None
    inactive: tuple[Refusal, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    expected: Mapping[Part, Effects] = MappingProxyType({})

    @property
    def changes_maths(self) -> bool:
        """Whether a step computes something else, beyond rounding, when the knob changes."""
        return self.maths is Maths.CHANGED

    @property
    def numeric(self) -> bool:
        return self.values is None

    def ladder(self, facts: SiteFacts) -> tuple[Value, ...]:
        """Every value."""
        assert self.values is not None, f"{self.name} has numbers for values, and no ladder of them"
        return self.values

    def default_here(self, facts: SiteFacts) -> Value:
        """What PyTorch does here when the knob is not set."""
        assert self.default is not None, f"{self.name} has no default"
        return self.default

    def inactive_because(self, facts: SiteFacts) -> str | None:
        """Why the knob means nothing here, or ``None``."""
        return next((r.reason for r in self.inactive if r.when(facts, False)), None)

    def refusal(self, value: Value, facts: SiteFacts) -> str | None:
        """Why a value is not possible here, or ``None``."""
        fitting = (r for r in self.refusals if not r.values or value in r.values)
        return next((r.reason for r in fitting if r.when(facts, value)), None)

    def effects(self, part: Part) -> Effects:
        """What is expected of the knob's values in a part of the training."""
        if self.expected:
            # End to end a knob does what it does to the device, unless its file says otherwise.
            return self.expected.get(part) or (self.expected.get("device", {}) if part == "whole" else {})
        own = "loader" if self.scope is Scope.LOADER else "device"
        if part not in (own, "whole"):
            return {}
        return dict.fromkeys(self.values or (None,), UNKNOWN)

    def phrase(self, value: Value) -> str:
        """A value in words, as a part of a description."""
        if isinstance(value, bool):
            return self.name if value else f"no {self.name}"
        return f"{self.name}={spell(value)}"

    def environment(self, value: Value) -> dict[str, str]:
        """Variables that must be set before CUDA is initialized."""
        return {}

    def apply_process(self, value: Value) -> None:
        """Set what belongs to the whole process, before anything touches the GPU."""

    def loader_options(self, value: Value) -> dict[str, Any]:
        """Keyword arguments of ``torch.utils.data.DataLoader``."""
        return {}

    def apply_model(self, model: nn.Module, value: Value) -> nn.Module:
        """Change a model that is on its device already, and return it."""
        return model

    def compile_model(self, model: nn.Module, value: Value) -> None:
        """Compile a model in place, once every `apply_model` has been called."""

    def apply_optimizer(self, optimizer: torch.optim.Optimizer, value: Value) -> None:
        """Set an optimizer up, before its first step."""

    def apply_step(self, plan: StepPlan, value: Value) -> None:
        """Say what a training step does differently."""


def spell(value: Value | None) -> str:
    """A value as the contract writes it: ``true``, ``bf16``, ``8``; ``-`` for an inactive knob."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def doubled(start: int, limit: int) -> tuple[int, ...]:
    """``start``, twice that, and so on up to ``limit``."""
    values = []
    while start <= limit:
        values.append(start)
        start *= 2
    return tuple(values)
