"""The memory layout of image tensors and convolution weights.

``contiguous`` stores ``(N, C, H, W)`` in that order; ``channels_last`` stores the channels of a pixel side by side. The
format applies to weights and input batches.

Helps: convolutions in bf16 or fp16 on GPUs with tensor cores, whose kernels need channels last and otherwise transpose
inputs and outputs (about 1.5 times the rate for a ResNet); on CPUs with oneDNN, about 15 %.

Hurts: models with many operations that support only the contiguous layout and copy back and forth. The knob has no
effect without 4-dimensional weights.

Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.knobs.knob import Door, Expected, Knob, Maths, OwnOption, Refusal, Scope, StepPlan
from autotune.records import Value

if TYPE_CHECKING:
    import torch
    from torch import nn


class MemoryFormat(Knob):
    name = "memory_format"
    about = "layout of image tensors"
    scope = Scope.MODEL
    place = 40
    values = ("contiguous", "channels_last")
    own_options = (OwnOption(("channels_last", "nhwc"), like=r".*channels_?last.*", sets="channels_last"),)
    default = "contiguous"
    maths = Maths.KERNELS
    memory = True
    switchable = True
    refusals = (
        Refusal(
            "the model has no 4-dimensional weights",
            lambda facts, value: not facts.probe.has_images,
            ("channels_last",),
        ),
    )
    expected = {"device": {"channels_last": Expected(0.05, 0.2)}}

    def phrase(self, value: Value) -> str:
        return str(value)

    def apply_model(self, model: nn.Module, value: Value) -> nn.Module:
        import torch

        if value != "channels_last":
            return model
        return model.to(memory_format=torch.channels_last)

    def switch_model(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> None:
        layout = _layout(value)
        model.to(memory_format=layout)
        # Buffers of the optimizer keep the strides they were made with, and would be converted in every step.
        for state in optimizer.state.values():
            for name, held in state.items():
                if has_format(held):
                    state[name] = held.contiguous(memory_format=layout)

    def is_in_force(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> bool:
        layout = _layout(value)
        held = [*model.parameters(), *(h for state in optimizer.state.values() for h in state.values())]
        return all(tensor.is_contiguous(memory_format=layout) for tensor in held if has_format(tensor))

    def own_outside(self, facts: Mapping[str, Any]) -> Value | None:
        return "channels_last" if facts["model"].get("channels_last") else self.default

    def at_door(self, value: Value) -> tuple[Door, dict[str, Any]]:
        return "model", {"memory_format": str(value)}

    def apply_step(self, plan: StepPlan, value: Value) -> None:
        plan.channels_last = value == "channels_last"


KNOB = MemoryFormat()


def _layout(value: Value) -> torch.memory_format:
    import torch

    return torch.channels_last if value == "channels_last" else torch.contiguous_format


def has_format(held: object) -> bool:
    """Return whether something is a tensor with a memory format, (N, C, H, W)."""
    import torch

    return isinstance(held, torch.Tensor) and held.dim() == 4


def has_images(model: nn.Module) -> bool:
    """Return whether a model has 4-dimensional weights, so that channels_last has an effect."""
    return any(p.dim() == 4 for p in model.parameters())
