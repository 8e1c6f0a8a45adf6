"""Whether each step is taken to use the same parameters in the same order as the first one did.

Helps: the order in which gradients become ready is known, so that buckets follow it, and parameters that are not used
need not be looked for in each step. Checkpointed activations work with it as they are.

Hurts: a model whose graph differs from step to step (layers that are skipped at random) trains wrongly or stops with
an error.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Value
from autotune.knobs.knob import NO_EXCHANGE, Expected, Knob, Maths, Scope


class StaticGraph(Knob):
    name = "static_graph"
    about = "the same graph in each step"
    scope = Scope.EXCHANGE
    place = 150
    values = (False, True)
    default = False
    # Buckets are formed in another order; whether the graph is static is what the training check shows.
    maths = Maths.KERNELS
    inactive = NO_EXCHANGE
    expected = {"device": {True: Expected(0.01, 0.03)}}

    def exchange_options(self, value: Value) -> dict[str, Any]:
        return {"static_graph": bool(value)}


KNOB = StaticGraph()
