"""Whether each step begins with the first rank's buffers sent to all others (running means of batch normalization).

Helps: switched off, each step has one message less. In training mode, batch normalization does not read them: losses
and gradients stay as they are.

Hurts: switched off, each rank has running means of its own, of its own samples. What is evaluated and saved are those
of the first rank, which have seen a part of the samples only.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Value
from autotune.knobs.knob import NO_EXCHANGE, Expected, Knob, Maths, Scope


class BroadcastBuffers(Knob):
    name = "broadcast_buffers"
    about = "the first rank's buffers are sent to all"
    scope = Scope.EXCHANGE
    place = 160
    values = (True, False)
    default = True
    # What is evaluated and saved has other running means.
    maths = Maths.KERNELS
    inactive = NO_EXCHANGE
    expected = {"device": {False: Expected(0.01, 0.02)}}

    def exchange_options(self, value: Value) -> dict[str, Any]:
        return {"broadcast_buffers": bool(value)}


KNOB = BroadcastBuffers()
