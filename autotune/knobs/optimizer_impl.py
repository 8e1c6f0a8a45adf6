"""How the optimizer visits the parameters.

``for-loop`` updates one tensor after the other; ``foreach`` hands lists of tensors to kernels that update many at once;
``fused`` does the whole update in one kernel for many tensors. PyTorch's default is foreach on CUDA and the loop on a
CPU.

Helps: models with many small parameters, where launching a kernel for each costs more than the arithmetic.

Hurts: foreach keeps intermediate lists and takes about the size of the parameters more memory at its peak. The step of
a large model is dominated by forward and backward, and then nothing shows.

Source: https://docs.pytorch.org/docs/stable/optim.html#algorithms
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.knobs.knob import Expected, Knob, Maths, Refusal, Scope, SiteFacts
from autotune.records import Value

if TYPE_CHECKING:
    import torch


class OptimizerImpl(Knob):
    name = "optimizer_impl"
    about = "how the optimizer visits parameters"
    scope = Scope.OPTIMIZER
    place = 100
    values = ("for-loop", "foreach", "fused")
    maths = Maths.KERNELS
    memory = True
    switchable = True
    refusals = (
        Refusal(
            "this workload's optimizer does not offer it on this device",
            lambda facts, value: value not in facts.probe.optimizer_impls,
        ),
    )
    expected = {"device": {"foreach": Expected(0.02, 0.05), "fused": Expected(0.03, 0.06)}}

    def default_here(self, facts: SiteFacts) -> Value:
        """What the workload's own optimizer runs with."""
        return facts.probe.own_optimizer_impl

    def phrase(self, value: Value) -> str:
        return f"{value} optimizer"

    def apply_optimizer(self, optimizer: torch.optim.Optimizer, value: Value) -> None:
        # PyTorch's optimizers read ``foreach`` and ``fused`` from their parameter groups at every step; rebuilding the
        # optimizer would need its constructor's signature.
        for group in (optimizer.defaults, *optimizer.param_groups):
            for name, wanted in (("foreach", value == "foreach"), ("fused", value == "fused")):
                if name in group:
                    group[name] = wanted
        # GradScaler hands scale and overflow flag to optimizers that say they take them: fused ones do, others assert.
        if value == "fused" or hasattr(optimizer, "_step_supports_amp_scaling"):
            optimizer._step_supports_amp_scaling = value == "fused"  # type: ignore[attr-defined]


KNOB = OptimizerImpl()


def own_impl(optimizer: torch.optim.Optimizer, device: torch.device | str) -> str:
    """The value that an optimizer runs with as its owner made it."""
    import torch

    defaults = optimizer.defaults
    if defaults.get("fused"):
        return "fused"
    if defaults.get("foreach") is None:
        return "foreach" if torch.device(device).type == "cuda" and "foreach" in defaults else "for-loop"
    return "foreach" if defaults["foreach"] else "for-loop"


def impls_offered(optimizer: torch.optim.Optimizer, device: torch.device | str) -> tuple[str, ...]:
    """The values that an optimizer offers on a device."""
    import torch
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    offered = ["for-loop"]
    if "foreach" in optimizer.defaults:
        offered.append("foreach")
    if "fused" in optimizer.defaults and torch.device(device).type in _get_fused_kernels_supported_devices():
        offered.append("fused")
    return tuple(offered)
