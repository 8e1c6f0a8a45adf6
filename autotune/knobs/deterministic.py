"""Whether only deterministic algorithms are used, so that the same training gives the same numbers on the same machine.

It is a condition, not a means to be faster: it is set where it is stated (``--fix deterministic=true``), and the report
then tells its price, as a gain below one. To learn whether a training that is deterministic today would be faster
without it, state it for today and let it be searched: ``--baseline deterministic=true --set deterministic=true,false``.

Helps: nothing but reproducing a training bit by bit.

Hurts: convolutions and scattered additions whose fastest kernels add in varying order; operations that have no
deterministic kernel raise an error. cuDNN's benchmark chooses anew in each process, so it is not tried beside ``--fix
deterministic=true``, unless it is stated.

Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

from autotune.base.records import Value
from autotune.knobs.knob import Expected, Knob, Maths, Refusal, Scope


class Deterministic(Knob):
    name = "deterministic"
    about = "only deterministic algorithms"
    scope = Scope.PROCESS
    place = 95
    values = (False, True)
    default = False
    maths = Maths.KERNELS
    memory = True
    not_outside = "a script asks for it itself, before its first operation"
    searched = False
    inactive = (Refusal(not_outside, lambda facts, value: facts.probe.own is not None),)
    expected = {"device": {True: Expected(-0.1, 0.1)}}

    def environment(self, value: Value) -> dict[str, str]:
        # cuBLAS needs workspaces of fixed sizes (https://docs.nvidia.com/cuda/cublas/#results-reproducibility).
        return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if value else {}

    def apply_process(self, value: Value) -> None:
        import torch

        torch.use_deterministic_algorithms(bool(value))

    def read_process(self) -> tuple[bool, bool]:
        import torch

        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def restore_process(self, before: tuple[bool, bool]) -> None:
        import torch

        enabled, warn_only = before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


KNOB = Deterministic()
