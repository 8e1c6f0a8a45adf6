"""How many MiB of gradients the ranks exchange at a time (``bucket_cap_mb`` of DistributedDataParallel).

Helps: buckets that are exchanged while the rest of the backward pass computes. Smaller ones begin earlier, larger ones
cost fewer messages: with many ranks, or between machines, larger ones are usually faster.

Hurts: one bucket for all gradients is exchanged when the backward pass is over, and nothing overlaps. Each bucket is
memory beside the gradients, unless `gradient_as_bucket_view` shares it.

Source: https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Value
from autotune.knobs.knob import NO_EXCHANGE, Expected, Knob, Maths, Scope


class DdpBucketCapMb(Knob):
    name = "ddp_bucket_cap_mb"
    about = "MiB of gradients exchanged at a time"
    scope = Scope.EXCHANGE
    place = 130
    values = (5, 25, 100, 400)
    default = 25
    # The sum over ranks is formed in other pieces.
    maths = Maths.KERNELS
    inactive = NO_EXCHANGE
    expected = {
        "device": {
            5: Expected(-0.02, 0.05),
            25: Expected(0.0, 0.0),
            100: Expected(0.0, 0.05),
            400: Expected(-0.01, 0.05),
        }
    }

    def phrase(self, value: Value) -> str:
        return f"buckets of {value} MiB"

    def exchange_options(self, value: Value) -> dict[str, Any]:
        return {"bucket_cap_mb": int(value)}


KNOB = DdpBucketCapMb()
