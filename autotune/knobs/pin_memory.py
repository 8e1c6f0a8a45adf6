"""Page-locked host memory for batches.

Helps: large batches on a GPU: the driver reads page-locked memory directly, and the host need not wait for the copy
(``non_blocking``). From pageable memory the training waits for each copy (ResNet-50 in fp32 on an H200, batches of 32
at 224 px: 1,260 to 1,510 images/s, where 1,780 run without copies).

Hurts: a thread of the training process copies every batch to pinned memory, which costs CPU time, and pinned
memory is not available to other processes on the host. A small model on small samples gains nothing.

Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Value
from autotune.knobs.knob import NEEDS_CUDA, Expected, Knob, OwnOption, Scope, StepPlan


class PinMemory(Knob):
    name = "pin_memory"
    about = "page-locked host memory"
    scope = Scope.LOADER
    place = 70
    values = (False, True)
    default = False
    own_options = (
        OwnOption(("pin_memory", "pin_mem", "dataloader_pin_memory"), like=r".*pin_?mem.*", sets=True),
        OwnOption(("no_pin_memory", "no_pin_mem"), sets=False),
    )
    inactive = (NEEDS_CUDA,)
    # What copying costs counts as the device's: no other batch is worked on meanwhile.
    expected = {
        "device": {True: Expected(0.1, 0.15)},
        "loader": {True: Expected(0.0, 0.05)},
        "whole": {True: Expected(0.05, 0.1)},
    }

    def loader_options(self, value: Value) -> dict[str, Any]:
        return {"pin_memory": bool(value)}

    def apply_step(self, plan: StepPlan, value: Value) -> None:
        # What `non_blocking` says comes after this; profiles made before there was such a knob say nothing.
        plan.non_blocking = bool(value)


KNOB = PinMemory()
