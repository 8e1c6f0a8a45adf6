"""What a knob is. To add one, add a file to this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from autotune.base.records import Host, Probe, Value

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

# What a knob declares of itself, and the facts of a place that it is asked about.


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
    """What a training step does besides forward, backward and update. Knobs fill it in; `autotune.training.step`
    applies it.

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


# The contract of a knob, which every file in this catalog implements.


class Knob:
    """A setting of a training.

    Each file of the catalog subclasses this, declares the properties of its knob, and creates one instance called
    ``KNOB``. The file's docstring becomes its section in ``docs/knobs.md``. Methods that apply a value import torch
    themselves, because the searching process does not import it.

    Attributes:
        name: the name in the command line, Optuna, YAML, JSON, and of the file.
        about: a few words for a table column.
        place: position in a configuration, ascending; ties are sorted by name.
        values: all values, or ``None`` if any whole number from ``minimum`` to ``maximum`` is allowed.
        maximum: beyond what any machine needs, so that a profile from elsewhere cannot ask for more.
        default: PyTorch's own value; ``None`` if it depends on the machine or the workload (`default_here`).
        said_always: whether the description of a configuration includes the knob even at PyTorch's default.
        memory: whether the peak of device memory depends on the knob.
        memory_slope: expected effect of a value other than the baseline's on the memory that grows with the batch, as a
            fraction of the baseline's peak.
        switchable: whether a running training can use another value from its next step on, with the effect that the
            value has in a training of its own. See `read_process`, `switch_model` and `is_in_force`.
        added: whether there are studies from before there was this knob; they go on without it.
        in_heats: the value that all entrants of a heat in a process of its own have, where it is legal: among several
            trainings, other values have not the effect that they have in a process of their own.
        searched: False for a condition, which takes part only where the user states values of it.
        needs: the knob without which this one has no effect: this one is inactive while the other is 0, False or "off".
        not_outside: why the agent in somebody else's script cannot set a value there (see `script_door`), as a clause.
        own_options: what options of scripts that set the knob are called.
        inactive: why the knob has no effect at all in some places.
        refusals: why single values are not possible in some places; the first that applies is reported.
        expected: expected effect of each value on the rate, relative to the baseline's value, as commonly known in the
            field; a few trials outweigh it.
    """

    name: str
    about: str
    scope: Scope
    place: int = 1000
    values: tuple[Value, ...] | None = None
    minimum: int = 1
    maximum: int = 2**12
    default: Value | None = None
    said_always: bool = False
    maths: Maths = Maths.SAME
    memory: bool = False
    memory_slope: Expected = Expected(0.0, 0.1)
    switchable: bool = False
    added: bool = False
    in_heats: Value | None = None
    searched: bool = True
    needs: str | None = None
    not_outside: str = ""
    own_options: tuple[OwnOption, ...] = ()
    inactive: tuple[Refusal, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    expected: Mapping[Part, Effects] = MappingProxyType({})

    @property
    def changes_maths(self) -> bool:
        """Whether the knob changes what a step computes, beyond rounding."""
        return self.maths is Maths.CHANGED

    @property
    def numeric(self) -> bool:
        return self.values is None

    def ladder(self, facts: SiteFacts) -> tuple[Value, ...]:
        """Every value."""
        assert self.values is not None, f"{self.name} has numbers for values, and no ladder of them"
        return self.values

    def further(self, facts: SiteFacts) -> tuple[Value, ...]:
        """Return numbers besides those of the ladder.

        Each is tried only late in the search, and only if the best so far is at most twice or half of it.
        """
        return ()

    def beyond(self, largest: Value) -> tuple[Value, ...]:
        """Return larger numbers to try if the largest offered one won; none if larger ones cannot help."""
        return (2 * int(largest), 4 * int(largest)) if self.numeric else ()

    def default_here(self, facts: SiteFacts) -> Value:
        """PyTorch's behaviour here if the knob is not set."""
        assert self.default is not None, f"{self.name} has no default"
        return self.default

    def largest_here(self, host: Host) -> int:
        """Return the largest number that may be asked for on a machine."""
        return self.maximum

    def inactive_because(self, facts: SiteFacts) -> str | None:
        """Return why the knob has no effect here; ``None`` if it has."""
        return next((r.reason for r in self.inactive if r.when(facts, False)), None)

    def refusal(self, value: Value, facts: SiteFacts, *, stated: bool = False) -> str | None:
        """Return why a value is not possible here; ``None`` if it is.

        Args:
            stated: the user asks for this very value.
        """
        too_large = self.too_large(value, facts.host)
        if too_large is not None:
            return too_large
        own = (r for r in self.refusals if not (stated and r.unless_stated))
        fitting = (r for r in own if not r.values or value in r.values)
        return next((r.reason for r in fitting if r.when(facts, value)), None)

    def too_large(self, value: Value, host: Host) -> str | None:
        """Return why a number is too large for a machine, as a clause; ``None`` if it is not."""
        largest = self.largest_here(host)
        if not self.numeric or not isinstance(value, int) or value <= largest:
            return None
        return f"with {host.cores} cores, {largest} is the most"

    def effects(self, part: Part) -> Effects:
        """Return the expected effects of the knob's values on a part of the training."""
        if self.expected:
            # The end-to-end effect is the effect on the device, unless the file says otherwise.
            return self.expected.get(part) or (self.expected.get("device", {}) if part == "whole" else {})
        own = "loader" if self.scope is Scope.LOADER else "device"
        if part not in (own, "whole"):
            return {}
        return dict.fromkeys(self.values or (None,), UNKNOWN)

    def phrase(self, value: Value) -> str:
        """Return a value in words, as part of a description."""
        if isinstance(value, bool):
            return self.name if value else f"no {self.name}"
        return f"{self.name}={spell(value)}"

    def environment(self, value: Value) -> dict[str, str]:
        """Return the environment variables to set, in the process itself, before CUDA is initialized."""
        return {}

    def apply_process(self, value: Value) -> None:
        """Apply a value to the whole process, before the GPU is used."""

    def loader_options(self, value: Value) -> dict[str, Any]:
        """Return keyword arguments for ``torch.utils.data.DataLoader``."""
        return {}

    def apply_model(self, model: nn.Module, value: Value) -> nn.Module:
        """Change a model that is already on its device, and return it."""
        return model

    def compile_model(self, model: nn.Module, value: Value) -> None:
        """Compile a model in place, after every `apply_model`."""

    def apply_optimizer(self, optimizer: torch.optim.Optimizer, value: Value) -> None:
        """Configure an optimizer before its first step."""

    def apply_step(self, plan: StepPlan, value: Value) -> None:
        """Set the plan of a training step."""

    def exchange_options(self, value: Value) -> dict[str, Any]:
        """Return keyword arguments for ``torch.nn.parallel.DistributedDataParallel``."""
        return {}

    def apply_exchange(self, model: DistributedDataParallel, value: Value) -> None:
        """Configure the exchange of gradients, before the first step."""

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]] | None:
        """Return where the agent in a script sets a value, and what it is told; ``None`` if it cannot."""
        options = self.loader_options(value)
        return ("loader", options) if options else None

    def own_outside(self, facts: Mapping[str, Any]) -> Value | None:
        """Return the value that a script has by itself; ``None`` if that was not seen.

        Args:
            facts: what the agent has seen (see `autotune_agent.watching`): ``process``, ``model``, ``optimizer``,
                ``loader`` (arguments of a `DataLoader`), each possibly empty, and ``device``, ``cpu`` or ``cuda``.
        """
        found: Value | None = facts["loader"].get(self.name)
        return found

    def read_process(self) -> Any:
        """Return what `apply_process` changes, as it is before any value is applied and before its `environment` is
        set. Whoever overrides `apply_process` overrides this and `restore_process`, too."""
        return None

    def restore_process(self, before: Any) -> None:
        """Undo `apply_process`, as far as a process that has trained can.

        Args:
            before: what `read_process` returned.
        """

    def switch_model(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> None:
        """Change a model in training and its optimizer to a value, whatever value they have."""

    def is_refused(self, value: Value, message: str) -> bool:
        """Return whether an error's message shows that something in the training refuses a value, whatever the other
        knobs are."""
        return False

    def is_in_force(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> bool:
        """Return whether process, model and optimizer are as a value demands."""
        return True


#: In `Probe.outside`, any number but the least.
OTHERS = "*"


def answer_to(knob: Knob, value: Value) -> str:
    """Return the name in `Probe.outside` of the answer that holds for a value."""
    return spell(value) if not knob.numeric or value == knob.minimum else OTHERS


def spell(value: Value | None) -> str:
    """Format a value as in the contract: ``true``, ``bf16``, ``8``; ``-`` for an inactive knob."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def doubled(start: int, limit: int) -> tuple[int, ...]:
    """Return ``start`` and its doublings up to ``limit``."""
    values = []
    while start <= limit:
        values.append(start)
        start *= 2
    return tuple(values)
