"""How the optimizer iterates over the parameters.

``for-loop`` updates one tensor after the other; ``foreach`` passes lists of tensors to kernels that update many at
once; ``fused`` does the whole update of many tensors in one kernel. PyTorch's default is ``foreach`` on CUDA and
``for-loop`` on a CPU.

Helps: models with many small parameters, where launching kernels costs more than the arithmetic.

Hurts: ``foreach`` keeps intermediate lists, which raises the memory peak by about the size of the parameters. In a
large model forward and backward dominate the step, and the choice makes no difference.

Source: https://docs.pytorch.org/docs/stable/optim.html#algorithms
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.agent.site.autotune_agent import in_place
from autotune.base.records import Value
from autotune.knobs.knob import Door, Expected, Knob, Maths, OwnOption, Refusal, Scope, SiteFacts

if TYPE_CHECKING:
    import torch
    from torch import nn


class OptimizerImpl(Knob):
    name = "optimizer_impl"
    about = "how the optimizer visits parameters"
    scope = Scope.OPTIMIZER
    place = 100
    values = ("for-loop", "foreach", "fused")
    maths = Maths.KERNELS
    memory = True
    switchable = True
    own_options = (
        OwnOption(("fused", "fused_optimizer", "fused_adam", "fused_adamw"), like=r".*fused.*", sets="fused"),
        OwnOption(("foreach", "foreach_optimizer"), like=r".*foreach.*", sets="foreach"),
    )
    refusals = (
        Refusal(
            "this workload's optimizer does not offer it on this device",
            lambda facts, value: value not in facts.probe.optimizer_impls,
        ),
    )
    expected = {"device": {"foreach": Expected(0.02, 0.05), "fused": Expected(0.03, 0.06)}}

    def default_here(self, facts: SiteFacts) -> Value:
        """The implementation of the workload's own optimizer."""
        return facts.probe.own_optimizer_impl

    def phrase(self, value: Value) -> str:
        return f"{value} optimizer"

    def apply_optimizer(self, optimizer: torch.optim.Optimizer, value: Value) -> None:
        in_place.set_implementation(optimizer, _flags(value))

    def own_outside(self, facts: Mapping[str, Any]) -> Value | None:
        own = facts["optimizer"]
        if own.get("fused"):
            return "fused"
        own_choice = facts["device"] == "cuda" and "foreach" in own if own.get("foreach") is None else own["foreach"]
        return "foreach" if own_choice else "for-loop"

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]]:
        return "optimizer", _flags(value)

    def switch_model(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> None:
        self.apply_optimizer(optimizer, value)

    def is_in_force(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> bool:
        flags = [
            (name, group[name]) for group in optimizer.param_groups for name in ("foreach", "fused") if name in group
        ]
        return all(bool(flag) == (name == value) for name, flag in flags)


KNOB = OptimizerImpl()


def _flags(value: Value) -> dict[str, bool]:
    return {name: value == name for name in ("foreach", "fused")}


def own_impl(optimizer: torch.optim.Optimizer, device: torch.device | str) -> str:
    """Return the value that an optimizer was created with."""
    import torch

    defaults = optimizer.defaults
    if defaults.get("fused"):
        return "fused"
    if defaults.get("foreach") is None:
        return "foreach" if torch.device(device).type == "cuda" and "foreach" in defaults else "for-loop"
    return "foreach" if defaults["foreach"] else "for-loop"


def impls_offered(optimizer: torch.optim.Optimizer, device: torch.device | str) -> tuple[str, ...]:
    """Return the values that an optimizer supports on a device."""
    import torch
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    offered = ["for-loop"]
    if "foreach" in optimizer.defaults:
        offered.append("foreach")
    kind = torch.device(device).type
    has_kernels = "fused" in optimizer.defaults and kind in _get_fused_kernels_supported_devices()
    if has_kernels and not (kind == "cuda" and _fused_on_cpus_only(type(optimizer))):
        offered.append("fused")
    return tuple(offered)


def _fused_on_cpus_only(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer refuses its fused kernels on CUDA, as Adagrad does in some versions, at its step."""
    begin = getattr(kind, "_init_group", None)
    try:
        return begin is not None and "cuda_unsupported=True" in inspect.getsource(begin)
    except (OSError, TypeError):
        return False
