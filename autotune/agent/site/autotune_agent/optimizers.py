"""The door of optimizers, and weight updates that a script makes itself."""

from __future__ import annotations

import gc
import inspect
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType
from typing import Any

from autotune_agent.facts import is_capturing
from autotune_agent.in_place import follow_formats, set_implementation
from autotune_agent.setting import Setting, safely

# Trainings that update their weights in their own code, without an optimizer of torch.optim.

#: How many parameters to look at, those nearest to the loss, and how many elements of each.
_PROBES, _ELEMENTS = 8, 64
#: The most nodes of a graph to search for parameters.
_NODES = 20_000
#: So many changes in a row must have had equally many backward passes between them.
_CHANGES = 4
#: Passes to look at before giving up.
_LOOKS = 1000
#: An optimizer of torch.optim may take its first step later: seconds to wait for it, and those if one exists.
_WAIT_S, _LONG_WAIT_S = 2.0, 30.0
#: If gradients have been computed this often and for so many seconds without a visible step, that is reported; for a
#: model that is only called, after the longer time.
_UNSEEN_AFTER, _UNSEEN_S, _CALLED_S = 20, 12.0, 30.0


class OwnCode:
    """Stands for a script's own code that updates its weights, where an optimizer is expected.

    Args:
        device: where the weights are.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self.defaults: dict[str, Any] = {}
        self.state: dict[Any, Any] = {}
        self.param_groups: list[dict[str, Any]] = [{"params": [torch.empty(0, device=device)]}]


class OwnUpdates:
    """Detects that weights change from one backward pass to another although no optimizer of torch.optim takes steps.
    If they change after a constant number of passes, each step is taken to end with the first pass after a change.

    The first step of an optimizer of torch.optim ends all this. Values are compared only until the number of passes
    between changes is known: each comparison waits for the device.

    Args:
        begin: notes that this process trains; returns whether the agent is meant for it.
        optimizers: told once of what stands for the script's code, and of each step from then on. Passes within a step
            of another optimizer, as LBFGS makes them, are not looked at.
        unseen: called once, with how the script trains, if it does so without visible steps.
    """

    def __init__(self, begin: Callable[[], bool], optimizers: OptimizerDoor, unseen: Callable[[str], None]) -> None:
        self._begin, self._optimizers, self._unseen = begin, optimizers, unseen
        self._looking = False
        self._code: OwnCode | None = None
        self._facts: dict[str, Any] = {}
        self._probes: list[Any] = []
        self._values: list[Any] = []
        #: Backward passes since the weights last changed, and how many there were between changes.
        self._since = 0
        self._gaps: deque[int] = deque(maxlen=_CHANGES)
        self._changes = 0
        #: The number of passes after which weights change; ``None`` until it is known.
        self._per: int | None = None
        #: Backward passes, calls of `torch.autograd.grad`, calls of models; and the time of the first of them.
        self._passes = self._gradients = self._calls = 0
        self._first_s: float | None = None
        self._wait_s: float | None = None
        self._told = False
        self._undo: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Look at backward passes. Called when ``import torch`` has just ended."""
        import torch

        original_backward, original_grad = torch.autograd.backward, torch.autograd.grad

        @wraps(original_backward)
        def backward(*args: Any, **kwargs: Any) -> Any:
            # During a pass, parts of a model are recomputed (activation checkpointing).
            if torch.compiler.is_compiling() or not self._looking or torch._C._current_graph_task_id() != -1:
                return original_backward(*args, **kwargs)
            safely(self._before, args[0] if args else kwargs.get("tensors"))
            original_backward(*args, **kwargs)
            safely(self._after)
            return None

        @wraps(original_grad)
        def grad(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self._looking and not self._optimizers.is_stepping:
                self._gradients += 1
                safely(self._look_out)
            return original_grad(*args, **kwargs)

        def restore() -> None:
            for name, replacement, original in (
                ("backward", backward, original_backward),
                ("grad", grad, original_grad),
            ):
                if getattr(torch.autograd, name) is replacement:
                    setattr(torch.autograd, name, original)

        self._looking = True
        torch.autograd.backward, torch.autograd.grad = backward, grad
        self._undo = restore

    def stop(self) -> None:
        """Stop looking, as an optimizer of torch.optim takes the steps."""
        if self._looking:
            self._looking = False
            self._probes, self._values = [], []
            self._undo()

    def called(self) -> None:
        """Note that a model was called to train it."""
        if self._looking and self._code is None and not self._optimizers.is_stepping:
            self._calls += 1
            self._look_out()

    def _before(self, tensors: Any) -> None:
        if self._code is not None or is_capturing() or self._optimizers.is_stepping or not self._begin():
            return
        self._passes += 1
        if self._per is None and self._passes <= _LOOKS:
            self._compare(tensors)
        self._look_out()

    def _compare(self, tensors: Any) -> None:
        """Note whether weights have changed since the last pass began."""
        parameters = self._held() or self._find(tensors)
        values = [parameter.detach().flatten()[:_ELEMENTS].clone() for parameter in parameters]
        changed = len(values) == len(self._values) and any(bool((a != b).any()) for a, b in zip(values, self._values))  # noqa: B905
        self._values = values
        self._since += 1
        if not changed:
            return
        self._changes += 1
        if self._changes > 1:
            # The gap before the first change may be incomplete.
            self._gaps.append(self._since)
        self._since = 0
        if len(self._gaps) == _CHANGES and len(set(self._gaps)) == 1:
            self._per = self._gaps[0]
            self._values = []

    def _held(self) -> list[Any]:
        """Return the parameters that are looked at, as far as they still exist."""
        return [parameter for parameter in (probe() for probe in self._probes) if parameter is not None]

    def _find(self, tensors: Any) -> list[Any]:
        """Return the parameters nearest to a loss, and remember them and the facts about them."""
        import torch

        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors or ())
        leaves = _leaves([tensor.grad_fn for tensor in roots])
        # An input that requires gradients (adversarial training) is not a weight.
        leaves = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)] or leaves
        nearest = leaves[:_PROBES]
        self._probes = [weakref.ref(leaf) for leaf in nearest]
        if leaves:
            parameters = sum(leaf.numel() for leaf in leaves)
            self._facts = {"kind": "its own", "device": leaves[0].device.type, "parameters": parameters}
        return nearest

    def _after(self) -> None:
        if self._code is not None:
            self._since += 1
        elif self._per is not None and not self._optimizers.is_stepping and self._has_waited():
            self._code = OwnCode(next((parameter.device for parameter in self._held()), "cpu"))
            self._since = self._per
            self._optimizers.adopt(self._code, self._facts)
        if self._code is not None and self._since >= (self._per or 1):
            self._since = 0
            self._optimizers.took_step(self._code)

    def _has_waited(self) -> bool:
        """Whether an optimizer of torch.optim would have taken a step by now."""
        if self._wait_s is None:
            import torch

            # `isinstance` would access `__class__`, to which some objects respond with a warning.
            has_optimizer = any(issubclass(type(instance), torch.optim.Optimizer) for instance in gc.get_objects())
            self._wait_s = _LONG_WAIT_S if has_optimizer else _WAIT_S
        return time.monotonic() - (self._first_s or 0.0) > self._wait_s

    def _look_out(self) -> None:
        """Report that the script trains without visible steps, once that is clear."""
        now = time.monotonic()
        self._first_s = now if self._first_s is None else self._first_s
        gradients = max(self._passes, self._gradients)
        if self._told or self._code is not None or now - self._first_s < _UNSEEN_S:
            return
        if max(gradients, self._calls) < _UNSEEN_AFTER or (not gradients and now - self._first_s < _CALLED_S):
            return
        # If weights do not change, gradients may be accumulated, for however long, for a step still to come.
        if self._passes and not self._changes:
            return
        if self._per is not None and (self._wait_s or 0.0) > now - self._first_s:
            return
        self._told = True
        if self._changes:
            self._unseen("its weights change, but not after equally many backward passes")
        else:
            self._unseen("it calls no backward()" if self._gradients else "it asks for no gradients")


def _leaves(nodes: list[Any]) -> list[Any]:
    """Return the tensors whose gradients a graph accumulates, the nearest first."""
    todo = deque(node for node in nodes if node is not None)
    seen = set(todo)
    leaves = []
    while todo and len(seen) < _NODES:
        node = todo.popleft()
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)
    return leaves


# The door of the optimizers: the global hooks around their steps.

#: The attribute by which `torch.amp.GradScaler` recognizes an optimizer that handles scale and overflow itself.
_SCALES = "_step_supports_amp_scaling"


class OptimizerDoor:
    """Sets ``foreach`` and ``fused`` of optimizers before their first step, and counts steps.

    Args:
        begin: notes that this process trains; returns whether the agent is meant for it.
        stepped: called after each step with the optimizer and the number of steps that it has taken.
    """

    def __init__(self, settings: list[Setting], begin: Callable[[], bool], stepped: Callable[[Any, int], None]) -> None:
        self._settings = settings
        self._begin = begin
        self._stepped = stepped
        #: Facts about the optimizer that was seen first.
        self.own: dict[str, Any] = {}
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: The script's own arguments of each.
        self._first: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        #: Whether, as the script has it, a gradient scaler leaves scale and overflow to the optimizer.
        self._scales: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # The hooks of a subclass whose step calls that of its parent run twice.
        self._inside: Any = None

    def install(self) -> None:
        """Act before and after the steps of all optimizers."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            safely(self._begins, optimizer, sys._getframe(1))

    def _begins(self, optimizer: Any, frame: FrameType) -> None:
        # A step that has raised never ends, and is not among the callers of the next one.
        if self._inside is None or not _is_nested(frame):
            self._inside = optimizer
        if optimizer in self._steps or not self._begin():
            return
        self._steps[optimizer] = 0
        defaults = optimizer.defaults
        self._first[optimizer] = {name: defaults[name] for name in ("foreach", "fused") if name in defaults}
        self._scales[optimizer] = bool(getattr(optimizer, _SCALES, False))
        follow_formats(optimizer)
        self.own = self.own or _facts(optimizer)
        for setting in self._settings:
            setting.try_to(partial(self._ask if setting.ask else self._set, optimizer, setting.arguments))

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer is in the middle of a step."""
        return self._inside is not None

    def steps_of(self, optimizer: Any) -> int | None:
        """Return the steps that an optimizer has taken; ``None`` before its first."""
        return self._steps.get(optimizer)

    def adopt(self, code: OwnCode, facts: dict[str, Any]) -> None:
        """Count the steps of a script's own code, for which nothing can be set."""
        self._steps[code] = 0
        self._first[code] = {}
        self.own = self.own or facts
        for setting in self._settings:
            setting.try_to(partial(_why_not, code, setting.arguments))

    def took_step(self, code: OwnCode) -> None:
        """Note a step of a script's own code."""
        self._steps[code] += 1
        self._stepped(code, self._steps[code])

    @property
    def fewest(self) -> Any:
        """The optimizer that has taken the fewest steps, the last of several."""
        return min(reversed(list(self._steps)), key=lambda optimizer: self._steps[optimizer] or float("inf"))

    def switch(self, told: dict[str, Any]) -> None:
        """Set all optimizers to something else, between two steps, and give their state the layout of the weights.

        Args:
            told: the arguments to be in force; empty for the script's own.
        """
        for optimizer in list(self._steps):
            follow_formats(optimizer)
            reason = self._set(optimizer, told or self._first[optimizer], steps=False)
            if reason is not None:
                raise RuntimeError(reason)

    def _ask(self, optimizer: Any, told: dict[str, Any], *, steps: bool = True) -> str | None:
        """Return why an optimizer cannot work with some arguments, as a clause; ``None`` if it can.

        Args:
            steps: whether it is about to take a step, for which a scaler may have given it what only fused kernels use.
        """
        if steps and not told.get("fused") and hasattr(optimizer, "found_inf"):
            return "the script's gradient scaler relies on the fused step"
        return _why_not(optimizer, told)

    def _set(self, optimizer: Any, told: dict[str, Any], *, steps: bool = True) -> str | None:
        reason = self._ask(optimizer, told, steps=steps)
        if reason is None:
            set_implementation(optimizer, told)
            if told.get("fused") and self._first[optimizer].get("fused"):
                # Fused is the script's own choice; restore what belongs to it.
                setattr(optimizer, _SCALES, self._scales[optimizer])
        return reason

    def forget_gradients(self) -> None:
        """Set all gradients to zero, so that each optimizer's next step, and a scaler, find some."""
        import torch

        for optimizer in list(self._steps):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            safely(self._ended, optimizer)

    def _ended(self, optimizer: Any) -> None:
        if self._inside is optimizer:
            self._inside = None
            if optimizer in self._steps:
                self._steps[optimizer] += 1
                self._stepped(optimizer, self._steps[optimizer])


def _is_nested(frame: FrameType) -> bool:
    """Return whether code was called, however deep, by the same code: PyTorch's wrapper around the steps of all
    optimizers."""
    outer = frame.f_back
    while outer is not None and outer.f_code is not frame.f_code:
        outer = outer.f_back
    return outer is not None


def _facts(optimizer: Any) -> dict[str, Any]:
    defaults = optimizer.defaults
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "kind": type(optimizer).__name__,
        **{name: defaults[name] for name in ("foreach", "fused") if name in defaults},
        "device": parameters[0].device.type,
        "parameters": sum(p.numel() for p in parameters),
    }


def _why_not(optimizer: Any, told: dict[str, Any]) -> str | None:
    """Return why an optimizer cannot work with some arguments; ``None`` if it can."""
    import torch
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    kind = type(optimizer)
    if isinstance(optimizer, OwnCode):
        return "the script updates its weights itself" if any(told.values()) else None
    wanted = [name for name, value in told.items() if value]
    if any(name not in optimizer.defaults for name in wanted):
        return f"{kind.__name__} does not offer it"
    if not str(getattr(kind.step, "__module__", "")).startswith("torch.optim"):
        return f"{kind.__name__} has a step of its own"
    if not wanted:
        return None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        return "some gradients are sparse"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "the step is to be differentiable"
        if told.get("foreach") and isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable"):
            return "the learning rate is a tensor"
    if told.get("fused"):
        devices = _get_fused_kernels_supported_devices()
        if not all(torch.is_floating_point(p) and p.device.type in devices for p in parameters):
            return "not all parameters are floats on a device with fused kernels"
        if any(p.device.type == "cuda" for p in parameters) and _only_on_cpus(kind):
            return f"{kind.__name__} has fused kernels for CPUs only"
    return None


def _only_on_cpus(kind: Any) -> bool:
    """Return whether an optimizer's step refuses its fused kernels on CUDA, as Adagrad's does in some versions."""
    init_group = getattr(kind, "_init_group", None)
    if init_group is None:
        return False
    try:
        return "cuda_unsupported=True" in inspect.getsource(init_group)
    except OSError:
        return bool(kind.__name__ == "Adagrad")
