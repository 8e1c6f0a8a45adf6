"""Whether the process keeps the host memory that it frees, instead of giving it back to the system.

PyTorch has no cache of its own for tensors on the CPU. glibc's ``malloc`` returns large blocks to the kernel when they
are freed, and the next step takes fresh pages for its activations, each of which costs a page fault and is filled with
zeros. With ``keep``, ``malloc`` neither maps large blocks separately (``M_MMAP_MAX`` of 0) nor trims the heap
(``M_TRIM_THRESHOLD`` of -1), and a step runs in the memory of the step before it.

Helps: training on the CPU, the more, the larger the activations: ResNet-50 at 128 px on one core of an AMD EPYC, batch
64, 1.5 times as fast in fp32 and 1.25 times in bf16 with channels_last; PyTorch's MNIST example 1.24 times. Loaders
that decode and transform images, by 10 to 25 %, in forked workers as well.

Hurts: the process takes somewhat more memory (ResNet-50: 10 to 20 %), and after an evaluation or a checkpoint keeps
what that took. Another process on the host cannot use it. It has no effect on large blocks of threads other than the
main one, which have heaps of their own.

It has no effect where another allocator is preloaded (jemalloc, tcmalloc). With a GPU, only what the training process
and its workers do on the host would profit, for which more workers do the same.

Source: https://www.gnu.org/software/libc/manual/html_node/Malloc-Tunable-Parameters.html
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from autotune.agent.site.autotune_agent import in_place
from autotune.base.records import Value
from autotune.knobs.knob import Door, Expected, Knob, Refusal, Scope, SiteFacts


class Malloc(Knob):
    name = "malloc"
    about = "freed host memory"
    scope = Scope.PROCESS
    place = 115
    values = ("default", "keep")
    default = "default"
    added = True
    memory = True
    # How much memory is given back depends on what lies above it in the heap: with other trainings there, hardly any
    # is, and bf16 was 1.84 times as fast as fp32 in a heat of PyTorch's MNIST example, and 1.35 times in launches.
    in_heats = "keep"
    memory_slope = Expected(0.1, 0.1)
    inactive = (
        Refusal("the step runs on the GPU", lambda facts, value: facts.cuda),
        Refusal(in_place.NOT_GLIBCS, lambda facts, value: facts.probe.malloc is None),
    )
    refusals = (Refusal("your own variables keep it", lambda facts, value: facts.probe.malloc == "keep", ("default",)),)
    expected = {"device": {"keep": Expected(0.1, 0.15)}, "loader": {"keep": Expected(0.1, 0.1)}}

    def default_here(self, facts: SiteFacts) -> Value:
        """``default``, or what the user's own variables say."""
        return facts.probe.malloc or "default"

    def phrase(self, value: Value) -> str:
        return "kept memory" if value == "keep" else "malloc's default"

    def apply_process(self, value: Value) -> None:
        reason = in_place.set_malloc(str(value))
        # It changes nothing but the speed. A search does not get here: there, the knob has no effect.
        if reason is not None and value == "keep":
            warnings.warn(f"malloc={value} is not in force: {reason}", stacklevel=2)

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]]:
        return "process", {"malloc": str(value)}

    def own_outside(self, facts: Mapping[str, Any]) -> Value | None:
        found: Value | None = facts["process"].get("malloc")
        return found

    def read_process(self) -> str:
        return str(in_place.malloc_now())

    def restore_process(self, before: str) -> None:
        in_place.set_malloc(before)


KNOB = Malloc()
