"""The door of the optimizers: the global hooks around their steps."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from autotune_agent.applying import follow_formats, set_implementation
from autotune_agent.own_updates import OwnCode
from autotune_agent.setting import Setting, safely

#: The attribute by which `torch.amp.GradScaler` knows it.
_SCALES = "_step_supports_amp_scaling"


class OptimizerDoor:
    """Sets ``foreach`` and ``fused`` of optimizers before their first step, and counts steps.

    Args:
        begin: notes that this process trains; returns whether the agent is for it.
        stepped: called after each step with the optimizer and the number of steps that it has taken.
    """

    def __init__(self, settings: list[Setting], begin: Callable[[], bool], stepped: Callable[[Any, int], None]) -> None:
        self._settings = settings
        self._begin = begin
        self._stepped = stepped
        #: Facts of the optimizer that was seen first.
        self.own: dict[str, Any] = {}
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: What each has by itself.
        self._first: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        #: Whether a gradient scaler leaves scale and overflow to it, as the script has it.
        self._scales: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # A subclass whose step calls that of its parent is hooked twice.
        self._inside: Any = None

    def install(self) -> None:
        """Act before and after the steps of all optimizers."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            safely(self._begins, optimizer)

    def _begins(self, optimizer: Any) -> None:
        if self._inside is None:
            self._inside = optimizer
        if optimizer in self._steps or not self._begin():
            return
        self._steps[optimizer] = 0
        own = optimizer.defaults
        self._first[optimizer] = {name: own[name] for name in ("foreach", "fused") if name in own}
        self._scales[optimizer] = bool(getattr(optimizer, _SCALES, False))
        follow_formats(optimizer)
        self.own = self.own or _facts(optimizer)
        for setting in self._settings:
            setting.try_to(partial(self._ask if setting.ask else self._set, optimizer, setting.arguments))

    @property
    def is_stepping(self) -> bool:
        """Whether one is in the middle of a step."""
        return self._inside is not None

    def steps_of(self, optimizer: Any) -> int | None:
        """Return the steps that an optimizer has taken; ``None`` before its first."""
        return self._steps.get(optimizer)

    def adopt(self, code: OwnCode, facts: dict[str, Any]) -> None:
        """Count the steps of a script's own code, which nothing can be set of."""
        self._steps[code] = 0
        self._first[code] = {}
        self.own = self.own or facts
        for setting in self._settings:
            setting.try_to(partial(_why_not, code, setting.arguments))

    def took_step(self, code: OwnCode) -> None:
        """Note a step of it."""
        self._steps[code] += 1
        self._stepped(code, self._steps[code])

    @property
    def fewest(self) -> Any:
        """The optimizer that has taken the fewest steps, the last of several."""
        return min(reversed(list(self._steps)), key=lambda optimizer: self._steps[optimizer] or float("inf"))

    def switch(self, told: dict[str, Any]) -> None:
        """Set all optimizers to something else, between two steps, and give their state the layout of the weights.

        Args:
            told: what is to be in force; nothing if that is as the script has it.
        """
        for optimizer in list(self._steps):
            follow_formats(optimizer)
            reason = self._set(optimizer, told or self._first[optimizer], steps=False)
            if reason is not None:
                raise RuntimeError(reason)

    def _ask(self, optimizer: Any, told: dict[str, Any], *, steps: bool = True) -> str | None:
        """Return why an optimizer cannot work in a way, as a clause.

        Args:
            steps: it is about to take a step, for which a scaler may have given it what only fused kernels take.
        """
        if steps and not told.get("fused") and hasattr(optimizer, "found_inf"):
            return "the script's gradient scaler relies on the fused step"
        return _why_not(optimizer, told)

    def _set(self, optimizer: Any, told: dict[str, Any], *, steps: bool = True) -> str | None:
        reason = self._ask(optimizer, told, steps=steps)
        if reason is None:
            set_implementation(optimizer, told)
            if told.get("fused") and self._first[optimizer].get("fused"):
                # It is the script's own, with all that belongs to it.
                setattr(optimizer, _SCALES, self._scales[optimizer])
        return reason

    def forget_gradients(self) -> None:
        """Make all gradients zero, so that the next step of each optimizer, and a scaler, find them."""
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


def _facts(optimizer: Any) -> dict[str, Any]:
    own = optimizer.defaults
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "kind": type(optimizer).__name__,
        **{name: own[name] for name in ("foreach", "fused") if name in own},
        "device": parameters[0].device.type,
        "parameters": sum(p.numel() for p in parameters),
    }


def _why_not(optimizer: Any, told: dict[str, Any]) -> str | None:
    """Return why an optimizer cannot work in a way; ``None`` if it can."""
    import torch
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    kind = type(optimizer)
    if isinstance(optimizer, OwnCode):
        return "the script updates its weights itself" if any(told.values()) else None
    asked = [name for name, value in told.items() if value]
    if any(name not in optimizer.defaults for name in asked):
        return f"{kind.__name__} does not offer it"
    if not str(getattr(kind.step, "__module__", "")).startswith("torch.optim"):
        return f"{kind.__name__} has a step of its own"
    if not asked:
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
    """Return whether an optimizer refuses its fused kernels on CUDA, as Adagrad does in some versions, at its step."""
    begin = getattr(kind, "_init_group", None)
    if begin is None:
        return False
    try:
        return "cuda_unsupported=True" in inspect.getsource(begin)
    except OSError:
        return bool(kind.__name__ == "Adagrad")
