"""The memory layout of image tensors and convolution weights.

``contiguous`` stores ``(N, C, H, W)`` in that order; ``channels_last`` stores the channels of a pixel side by side, and
``channels_last_3d`` those of a voxel in ``(N, C, D, H, W)``. The format applies to weights and input batches.

Helps: convolutions in bf16 or fp16 on GPUs with tensor cores, whose kernels need channels last and otherwise transpose
inputs and outputs (about 1.5 times the rate for a ResNet); on CPUs with oneDNN, about 15 %.

Hurts: models with many operations that support only the contiguous layout and copy back and forth. The knob has no
effect without 4-dimensional weights, or 5-dimensional ones.

Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.agent.site.autotune_agent import in_place
from autotune.base.records import Value
from autotune.knobs.knob import Door, Expected, Knob, Maths, OwnOption, Refusal, Scope, StepPlan

if TYPE_CHECKING:
    import torch
    from torch import nn

#: How PyTorch begins to say that a ``view`` would have to copy (aten/src/ATen/native/TensorShape.cpp).
_NO_VIEW = "view size is not compatible with input tensor's size and stride"


class MemoryFormat(Knob):
    name = "memory_format"
    about = "layout of image tensors"
    scope = Scope.MODEL
    place = 40
    values = ("contiguous", "channels_last", "channels_last_3d")
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
        Refusal(
            "the model has no 5-dimensional weights",
            lambda facts, value: not facts.probe.has_volumes,
            ("channels_last_3d",),
        ),
        # `Module.to`, which profiles are exported with, asks for one format of all of them.
        Refusal(
            in_place.MIXED,
            lambda facts, value: facts.probe.mixed_formats,
            ("channels_last", "channels_last_3d"),
        ),
        Refusal(
            in_place.SHARED,
            lambda facts, value: facts.probe.shared_memory,
            ("channels_last", "channels_last_3d"),
        ),
    )
    expected = {"device": {"channels_last": Expected(0.05, 0.2), "channels_last_3d": Expected(0.05, 0.2)}}

    def phrase(self, value: Value) -> str:
        return str(value)

    def apply_model(self, model: nn.Module, value: Value) -> nn.Module:
        if value != "contiguous":
            in_place.lay_out(model, str(value))
        return model

    def switch_model(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> None:
        in_place.lay_out(model, str(value))
        in_place.follow_formats(optimizer)

    def is_in_force(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> bool:
        layout = in_place.torch_format(str(value))
        held = [*model.parameters(), *(h for state in optimizer.state.values() for h in state.values())]
        has_format = (tensor for tensor in held if in_place.may_have_format(tensor, str(value)))
        return all(tensor.is_contiguous(memory_format=layout) for tensor in has_format)

    def own_outside(self, facts: Mapping[str, Any]) -> Value | None:
        return next((name for name in in_place.DIMENSIONS if facts["model"].get(name)), self.default)

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]]:
        return "model", {"memory_format": str(value)}

    def is_refused(self, value: Value, message: str) -> bool:
        """Whether a ``view`` of something that is laid out otherwise has failed."""
        return value != self.default and _NO_VIEW in message

    def apply_step(self, plan: StepPlan, value: Value) -> None:
        plan.channels_last = dimensions_of(value)


KNOB = MemoryFormat()


def has_images(model: nn.Module) -> bool:
    """Return whether a model has 4-dimensional weights, so that channels_last has an effect."""
    return any(p.dim() == 4 for p in model.parameters())


def has_volumes(model: nn.Module) -> bool:
    """Return whether a model has 5-dimensional weights, so that channels_last_3d has an effect."""
    return any(p.dim() == 5 for p in model.parameters())


def mixes_formats(model: nn.Module) -> bool:
    """Return whether a model has weights or buffers of four and of five dimensions, which no one format is for."""
    return bool(in_place.mixes_dimensions(model))


def shares_memory(model: nn.Module) -> bool:
    """Return whether weights, gradients or buffers that a format is for do not have their memory alone."""
    return bool(in_place.shares_memory(model))


def dimensions_of(value: Value) -> int:
    """Return the number of dimensions of the tensors that a format is for; 0 for none."""
    return int(in_place.dimensions_of(str(value)))
