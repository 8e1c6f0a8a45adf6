"""Whether batches in page-locked memory are copied to the device asynchronously (``non_blocking=True``).

Helps: the host queues the copy and goes on with the next kernels, instead of waiting for it. On the device the copy
still comes after the step before it: on one stream nothing overlaps. Where batches are page-locked, nearly every
training does so.

Hurts: hardly ever; the host runs ahead, and a batch in flight keeps its memory for longer. Without page-locked memory
a copy waits for the device whatever is asked for, so the knob has no effect.

Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

from __future__ import annotations

from autotune.base.records import Value
from autotune.knobs.knob import NEEDS_CUDA, Expected, Knob, Refusal, Scope, StepPlan


class NonBlocking(Knob):
    name = "non_blocking"
    about = "asynchronous copies to the device"
    scope = Scope.STEP
    # After `pin_memory`, which it refines.
    place = 75
    values = (False, True)
    # `Tensor.to` waits by default. Profiles made before this knob, and nearly all trainings that pin, do not.
    default = True
    needs = "pin_memory"
    not_outside = "how a batch is copied is the script's own"
    inactive = (NEEDS_CUDA, Refusal(not_outside, lambda facts, value: facts.probe.own is not None))
    expected = {"device": {False: Expected(-0.01, 0.02)}}

    def apply_step(self, plan: StepPlan, value: Value) -> None:
        plan.non_blocking = bool(value)


KNOB = NonBlocking()
