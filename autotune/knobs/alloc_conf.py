"""How CUDA's caching allocator obtains memory from the driver, and divides it.

``default`` allocates blocks of fixed sizes. ``expandable_segments`` maps memory into segments that can grow, so that
blocks of different sizes leave no gaps. ``max_split_size_mb`` keeps blocks above 128 MiB whole, so that no small tensor
comes to lie in a large block that is then missing in one piece.

Helps: trainings with varying tensor sizes, which otherwise run out of memory while much of it is reserved but unused.
A larger batch may fit. PyTorch recommends limiting the splitting only as a last resort before running out of memory.

Hurts: usually nothing measurable; where blocks may not be split, more of them are requested from the driver. Expandable
segments are not supported everywhere; in older versions, they rule out sharing CUDA tensors between processes.

Other settings in your own ``PYTORCH_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF`` stay as they are, among them a limit of
your own on splitting. If they turn expandable segments on, the baseline runs with them.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from autotune.base.records import Value
from autotune.knobs.knob import NEEDS_CUDA, Door, Expected, Knob, Refusal, Scope, SiteFacts

#: PyTorch 2.9 renamed the variable. If both are set, the first is in force.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPAND, _LIMIT = "expandable_segments", "max_split_size_mb"
_LIMIT_MB = 128
_STATED = re.compile(rf"\b{_EXPAND}\s*:\s*(\w+)\s*,?\s*")


class AllocConf(Knob):
    name = "alloc_conf"
    about = "CUDA allocator"
    scope = Scope.PROCESS
    place = 120
    values = ("default", _EXPAND, _LIMIT)
    default = "default"
    memory = True
    inactive = (NEEDS_CUDA,)
    refusals = (
        Refusal("your own settings limit it already", lambda facts, value: facts.probe.limits_splitting, (_LIMIT,)),
    )
    expected = {"device": {_EXPAND: Expected(0.0, 0.02), _LIMIT: Expected(0.0, 0.02)}}

    def default_here(self, facts: SiteFacts) -> Value:
        """``default``, or what the user's own variables say."""
        return _EXPAND if facts.probe.expandable_segments else "default"

    def phrase(self, value: Value) -> str:
        return "default allocator" if value == "default" else str(value)

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]]:
        # The environment says it all.
        return "process", {}

    def environment(self, value: Value) -> dict[str, str]:
        limited = value != _LIMIT or limits_splitting(os.environ)
        if (value == _EXPAND) == expands(os.environ) and limited:
            return {}
        # Both are set, so that every version finds its own.
        return dict.fromkeys(VARIABLES, _with(_settings(os.environ), value))

    def apply_process(self, value: Value) -> None:
        # libc10 may have read the variables when torch was imported, so set it directly, which is possible until CUDA
        # is initialized. Each call replaces all settings, so the user's are repeated.
        settings = _settings(os.environ)
        if _EXPAND in settings or _LIMIT in settings:
            _set(settings)

    def read_process(self) -> str:
        return _settings(os.environ)

    def restore_process(self, before: str) -> None:
        import torch

        # The allocator of a process that has used the GPU keeps its settings until the process ends.
        if not torch.cuda.is_initialized():
            _set(before)


KNOB = AllocConf()


def expands(env: Mapping[str, str]) -> bool:
    """Return whether the variables of an environment turn expandable segments on."""
    stated = _STATED.findall(_settings(env))
    return bool(stated) and stated[-1] == "True"


def limits_splitting(env: Mapping[str, str]) -> bool:
    """Return whether the variables of an environment keep large blocks whole, above whatever size."""
    return _LIMIT in _settings(env)


def setting_of(value: Value) -> str:
    """Return what the variables say for a value where a user has no settings of their own."""
    return _with("", value)


def _set(settings: str) -> None:
    import torch

    # PyTorch 2.9 renamed it.
    names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
    next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))(settings)


def _settings(env: Mapping[str, str]) -> str:
    return next((env[name] for name in VARIABLES if name in env), "")


def _with(settings: str, value: Value) -> str:
    others = _STATED.sub("", settings).strip(", ")
    limit = f"{_LIMIT}:{_LIMIT_MB}" if value == _LIMIT and _LIMIT not in others else ""
    return ",".join(part for part in (others, f"{_EXPAND}:{value == _EXPAND}", limit) if part)
