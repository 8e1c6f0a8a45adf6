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

from autotune.base.records import Value
from autotune.knobs.knob import Door, Expected, Knob, Maths, OwnOption, Scope, SiteFacts, doubled

#: The largest batch considered, as a multiple of the baseline's. On a CPU more than 4 gains nothing, and each step
#: takes seconds. On a GPU, memory is the limit, but what is above 16 is tried only if the values below it pay.
MOST_ON_CPU, MOST_ON_CUDA, MOST_AT_ALL = 4, 16, 256
#: Beyond `MOST_ON_CUDA`, a batch must leave this many steps in an epoch, and the device must hold it with activations
#: of this many times its own size. Few trainings need less.
FEWEST_STEPS, ACTIVATIONS = 16, 16
#: Values between two others are multiples of this, because matrix units work on blocks.
BLOCK = 8


class BatchSize(Knob):
    name = "batch_size"
    about = "samples per step"
    scope = Scope.WORKLOAD
    place = 30
    maximum = 2**30
    maths = Maths.CHANGED
    memory = True
    switchable = True
    # To search it is the user's decision, so no name says enough.
    own_options = (OwnOption(like=r"b|bs|batch|.*batch_?size.*"),)
    expected = {"device": {None: Expected(0.08, 0.12)}, "loader": {None: Expected(0.0, 0.05)}}

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]]:
        """Where it is compared with the script's own; it is not set."""
        return "loader", {"batch_size": int(value)}

    def ladder(self, facts: SiteFacts) -> tuple[Value, ...]:
        """Half the baseline's, the baseline's, and its doublings up to 4 times that on a CPU, 16 times on a GPU.
        There, beside the best so far, also what lies halfway between two of these, and doublings beyond, as long as an
        epoch has 16 steps and the memory may hold the batch."""
        batch = facts.batch_size
        rungs = (batch // 2, *doubled(batch, batch * (MOST_ON_CUDA if facts.cuda else MOST_ON_CPU)))
        return tuple(rung for rung in rungs if self.minimum <= rung <= self.maximum)

    def further(self, facts: SiteFacts) -> tuple[Value, ...]:
        """On a GPU: see `ladder`. On a CPU, launches differ by more than these values may gain."""
        if not facts.cuda:
            return ()
        ladder = [int(rung) for rung in self.ladder(facts)]
        beyond = doubled(2 * ladder[-1], _largest(facts))
        halfway = (3 * rung // 2 for rung in (*ladder, *beyond)[:-1] if rung % 2 == 0)
        return (*beyond, *(batch for batch in halfway if batch % BLOCK == 0))

    def default_here(self, facts: SiteFacts) -> Value:
        """The workload's own batch size."""
        return facts.batch_size

    def phrase(self, value: Value) -> str:
        return f"batch {value}"

    def loader_options(self, value: Value) -> dict[str, Any]:
        return {"batch_size": int(value)}


def _largest(facts: SiteFacts) -> int:
    """Return the largest batch size that the memory may hold and of which an epoch has enough; 0 if not known."""
    probe = facts.probe
    if not (probe.sample_bytes and probe.device_memory_bytes and probe.dataset_samples):
        return 0
    held = probe.device_memory_bytes // (ACTIVATIONS * probe.sample_bytes)
    return min(facts.batch_size * MOST_AT_ALL, held, probe.dataset_samples // (FEWEST_STEPS * facts.ranks))


KNOB = BatchSize()
