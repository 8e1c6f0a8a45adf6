"""How CUDA's caching allocator obtains memory from the driver.

``default`` allocates blocks of fixed sizes. ``expandable_segments`` maps memory into segments that can grow, so that
blocks of different sizes leave no gaps.

Helps: trainings with varying tensor sizes, which otherwise run out of memory while much of it is reserved but unused.
A larger batch may fit.

Hurts: usually nothing measurable. It is not supported everywhere; in older versions, it rules out sharing CUDA tensors
between processes.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

from __future__ import annotations

from autotune.knobs.knob import NEEDS_CUDA, Expected, Knob, Scope
from autotune.records import Value

_SETTINGS = {"expandable_segments": "expandable_segments:True"}


class AllocConf(Knob):
    name = "alloc_conf"
    about = "CUDA allocator"
    scope = Scope.PROCESS
    place = 120
    values = ("default", "expandable_segments")
    default = "default"
    memory = True
    inactive = (NEEDS_CUDA,)
    expected = {"device": {"expandable_segments": Expected(0.0, 0.02)}}

    def phrase(self, value: Value) -> str:
        return "default allocator" if value == "default" else str(value)

    def environment(self, value: Value) -> dict[str, str]:
        setting = _SETTINGS.get(str(value))
        # PyTorch 2.9 renamed the variable; both names are set, so that every version finds its own.
        return {} if setting is None else {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}

    def apply_process(self, value: Value) -> None:
        import torch

        setting = _SETTINGS.get(str(value))
        if setting is None:
            return
        # libc10 may have read the variables when torch was imported, so set it directly. PyTorch 2.9 renamed this, too.
        names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
        next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))(setting)


KNOB = AllocConf()
