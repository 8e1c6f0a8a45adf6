"""Whether gradients are views of the buckets in which ranks exchange them.

Helps: one copy of all gradients less, in memory and in time.

Hurts: hardly ever. Code that detaches gradients, or keeps them from one step to the next, fails.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Value
from autotune.knobs.knob import NO_EXCHANGE, Expected, Knob, Scope


class GradientAsBucketView(Knob):
    name = "gradient_as_bucket_view"
    about = "gradients are views of the buckets"
    scope = Scope.EXCHANGE
    place = 140
    values = (False, True)
    default = False
    memory = True
    memory_slope = Expected(-0.02, 0.05)
    inactive = NO_EXCHANGE
    expected = {"device": {True: Expected(0.01, 0.03)}}

    def exchange_options(self, value: Value) -> dict[str, Any]:
        return {"gradient_as_bucket_view": bool(value)}


KNOB = GradientAsBucketView()
