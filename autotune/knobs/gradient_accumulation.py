"""The number of equal parts in which a batch goes through the model, one after the other, before the weights are
updated once: gradient accumulation over micro-batches of ``batch_size / gradient_accumulation`` samples.

Helps: activations of one part are in memory at a time, so that a batch fits which would not fit in one piece, or a
faster configuration fits beside it. On a CPU a small part may stay in the caches.

Hurts: kernels get smaller work, and each part starts all of them anew; where memory suffices, one piece is usually the
fastest. The gradients are those of the whole batch if the loss is a mean over its samples. Batch normalization is an
exception: it sees the statistics of a part. So is a loss that compares samples with each other.

Searched only where the samples of an optimizer's step are stated (``--global-batch``).

Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
"""

from __future__ import annotations

from autotune.base.records import Config, Value
from autotune.knobs.knob import Expected, Knob, Maths, Refusal, Scope, SiteFacts, StepPlan, doubled


class GradientAccumulation(Knob):
    name = "gradient_accumulation"
    about = "parts of a batch, one after the other"
    scope = Scope.STEP
    place = 35
    maximum = 2**20
    # Other kernels add the same gradients up in another order.
    maths = Maths.KERNELS
    memory = True
    memory_slope = Expected(-0.4, 0.3)
    switchable = True
    not_outside = "how many batches an optimizer's step takes is the script's own"
    inactive = (
        Refusal(not_outside, lambda facts, value: facts.probe.own is not None),
        Refusal("needs --global-batch", lambda facts, value: facts.global_batch is None),
    )
    refusals = (
        Refusal(
            "does not divide the batch into equal parts",
            lambda facts, value: bool((facts.global_batch or 0) % int(value)),
        ),
    )
    expected = {"device": {None: Expected(-0.05, 0.1)}}

    def ladder(self, facts: SiteFacts) -> tuple[Value, ...]:
        """1 and its doublings, what the baseline does and its halves and doublings, as far as they divide the batch."""
        batch, today = facts.global_batch or 1, int(facts.parts or self.default_here(facts))
        halves = [today]
        while halves[-1] % 2 == 0:
            halves.append(halves[-1] // 2)
        found = {*doubled(1, batch), *halves, *doubled(today, batch)}
        return tuple(sorted(parts for parts in found if batch % parts == 0))

    def default_here(self, facts: SiteFacts) -> Value:
        """As few equal parts as are no larger than the workload's own batch."""
        batch, own = facts.global_batch or 1, facts.probe.default_batch_size
        return next(parts for parts in range(-(-batch // own), batch + 1) if batch % parts == 0)

    def phrase(self, value: Value) -> str:
        return "in one piece" if value == 1 else f"in {value} parts"

    def apply_step(self, plan: StepPlan, value: Value) -> None:
        plan.parts = int(value)


KNOB = GradientAccumulation()


def parts_of(config: Config) -> int:
    """Return the number of parts of a configuration's batch."""
    return int(config.get(KNOB.name, 1))
