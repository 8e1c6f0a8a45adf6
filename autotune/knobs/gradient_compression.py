"""The precision in which ranks exchange gradients: as they are, or rounded to bf16 for the way.

Helps: half as many bytes, where the exchange is what limits: between machines, or without fast links between cards.

Hurts: rounding to 8 bits of mantissa before the sum, which changes what is learnt. Where the exchange is hidden behind
the backward pass, the conversions only cost time.

Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.base.records import Value
from autotune.knobs.knob import NO_EXCHANGE, Expected, Knob, Maths, Refusal, Scope

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class GradientCompression(Knob):
    name = "gradient_compression"
    about = "precision of exchanged gradients"
    scope = Scope.EXCHANGE
    place = 170
    values = ("off", "bf16")
    default = "off"
    maths = Maths.CHANGED
    inactive = NO_EXCHANGE
    refusals = (Refusal("this device only emulates bf16", lambda facts, value: not facts.probe.native_bf16, ("bf16",)),)
    expected = {"device": {"bf16": Expected(0.0, 0.1)}}

    def phrase(self, value: Value) -> str:
        return "gradients exchanged as they are" if value == "off" else f"gradients exchanged in {value}"

    def apply_exchange(self, model: DistributedDataParallel, value: Value) -> None:
        if value == "off":
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        model.register_comm_hook(None, bf16_compress_hook)


KNOB = GradientCompression()
