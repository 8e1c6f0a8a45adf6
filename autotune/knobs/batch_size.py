"""The number of samples in a training step.

Helps: a larger batch keeps a device busy whose kernels are too small to fill it, and spreads the fixed cost of a step
over more samples. On GPUs, throughput usually rises until the arithmetic units are saturated.

Hurts: activation memory grows in proportion, and once the device is saturated the rate stays the same. Training with
another batch size gives other results: the learning rate may have to change with it (linear scaling with warm-up, Goyal
et al., "Accurate, large minibatch SGD", 2017). Therefore the best at the user's own batch size is always reported, too.

Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

from __future__ import annotations

from typing import Any

from autotune.knobs.knob import Expected, Knob, Maths, Scope, SiteFacts, doubled
from autotune.records import Value

#: The largest batch considered, as a multiple of the baseline's. On a CPU more than 4 gains nothing, and each step
#: takes seconds; on a GPU, memory is the limit.
MOST_ON_CPU, MOST_ON_CUDA = 4, 16


class BatchSize(Knob):
    name = "batch_size"
    about = "samples per step"
    scope = Scope.WORKLOAD
    place = 30
    maximum = 2**30
    maths = Maths.CHANGED
    memory = True
    switchable = True
    expected = {"device": {None: Expected(0.08, 0.12)}, "loader": {None: Expected(0.0, 0.05)}}

    def ladder(self, facts: SiteFacts) -> tuple[Value, ...]:
        """Half the baseline's, the baseline's, and its doublings up to 4 times that on a CPU, 16 times on a GPU."""
        batch = facts.batch_size
        rungs = (batch // 2, *doubled(batch, batch * (MOST_ON_CUDA if facts.cuda else MOST_ON_CPU)))
        return tuple(rung for rung in rungs if self.minimum <= rung <= self.maximum)

    def default_here(self, facts: SiteFacts) -> Value:
        """The workload's own batch size."""
        return facts.batch_size

    def phrase(self, value: Value) -> str:
        return f"batch {value}"

    def loader_options(self, value: Value) -> dict[str, Any]:
        return {"batch_size": int(value)}


KNOB = BatchSize()
