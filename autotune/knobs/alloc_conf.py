"""How CUDA's caching allocator obtains memory from the driver.

``default`` allocates blocks of fixed sizes. ``expandable_segments`` maps memory into segments that can grow, so that
blocks of different sizes leave no gaps.

Helps: trainings with varying tensor sizes, which otherwise run out of memory while much of it is reserved but unused.
A larger batch may fit.

Hurts: usually nothing measurable. It is not supported everywhere; in older versions, it rules out sharing CUDA tensors
between processes.

Other settings in your own ``PYTORCH_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF`` stay as they are. If they turn
expandable segments on, the baseline runs with them.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from autotune.knobs.knob import NEEDS_CUDA, Door, Expected, Knob, Scope, SiteFacts
from autotune.records import Value

#: PyTorch 2.9 renamed the variable. If both are set, the first is in force.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_KEY = "expandable_segments"
_STATED = re.compile(rf"\b{_KEY}\s*:\s*(\w+)\s*,?\s*")


class AllocConf(Knob):
    name = "alloc_conf"
    about = "CUDA allocator"
    scope = Scope.PROCESS
    place = 120
    values = ("default", _KEY)
    default = "default"
    memory = True
    inactive = (NEEDS_CUDA,)
    expected = {"device": {_KEY: Expected(0.0, 0.02)}}

    def default_here(self, facts: SiteFacts) -> Value:
        """``default``, or what the user's own variables say."""
        return _KEY if facts.probe.expandable_segments else "default"

    def phrase(self, value: Value) -> str:
        return "default allocator" if value == "default" else str(value)

    def at_door(self, value: Value) -> tuple[Door, dict[str, Any]]:
        # The environment says it all.
        return "process", {}

    def environment(self, value: Value) -> dict[str, str]:
        wanted = value == _KEY
        if wanted == expands(os.environ):
            return {}
        # Both are set, so that every version finds its own.
        return dict.fromkeys(_VARIABLES, _with(_settings(os.environ), wanted))

    def apply_process(self, value: Value) -> None:
        import torch

        # libc10 may have read the variables when torch was imported, so set it directly, which is possible until CUDA
        # is initialized. Each call replaces all settings, so the user's are repeated. PyTorch 2.9 renamed this, too.
        settings = _settings(os.environ)
        if _KEY in settings:
            names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
            next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))(settings)


KNOB = AllocConf()


def expands(env: Mapping[str, str]) -> bool:
    """Return whether the variables of an environment turn expandable segments on."""
    stated = _STATED.findall(_settings(env))
    return bool(stated) and stated[-1] == "True"


def _settings(env: Mapping[str, str]) -> str:
    return next((env[name] for name in _VARIABLES if name in env), "")


def _with(settings: str, expandable: bool) -> str:
    others = _STATED.sub("", settings).strip(", ")
    return ",".join(part for part in (others, f"{_KEY}:{expandable}") if part)
