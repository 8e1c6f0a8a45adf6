"""The number of CPU threads that one PyTorch operation uses.

Helps: training on the CPU. While operations are large, the rate is nearly proportional to the number of cores.

Hurts: more threads than cores, and loader workers that compete for the same cores. On a GPU the step does not run on
the CPU, and the knob has no effect.

Source: https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#cpu-oversubscription
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.base.records import Value
from autotune.knobs.knob import Door, Expected, Knob, Refusal, Scope, SiteFacts, doubled

if TYPE_CHECKING:
    import torch
    from torch import nn


class IntraOpThreads(Knob):
    name = "intra_op_threads"
    about = "threads inside one operation (CPU)"
    scope = Scope.PROCESS
    place = 110
    switchable = True
    inactive = (Refusal("the step runs on the GPU", lambda facts, value: facts.cuda),)
    expected = {"device": {None: Expected(0.4, 0.3)}, "loader": {None: Expected(-0.05, 0.15)}}

    def ladder(self, facts: SiteFacts) -> tuple[Value, ...]:
        """1 and its doublings up to PyTorch's own number of threads, and that number."""
        return tuple(sorted({*doubled(1, facts.probe.cores), facts.probe.cores}))

    def beyond(self, largest: Value) -> tuple[Value, ...]:
        """None: more threads than cores only take turns."""
        return ()

    def default_here(self, facts: SiteFacts) -> Value:
        """One thread for each allowed core; one in all with several ranks, as ``torchrun`` has it."""
        return facts.probe.cores if facts.ranks == 1 else 1

    def phrase(self, value: Value) -> str:
        return f"{value} thread" if value == 1 else f"{value} threads"

    def apply_process(self, value: Value) -> None:
        import torch

        torch.set_num_threads(int(value))

    def own_outside(self, facts: Mapping[str, Any]) -> Value | None:
        found: Value | None = facts["process"].get("threads")
        return found

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]]:
        return "process", {"threads": int(value)}

    def read_process(self) -> int:
        import torch

        return torch.get_num_threads()

    def restore_process(self, before: int) -> None:
        import torch

        torch.set_num_threads(before)

    def is_in_force(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> bool:
        import torch

        return torch.get_num_threads() == int(value)


KNOB = IntraOpThreads()
