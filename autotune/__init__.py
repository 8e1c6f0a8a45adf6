"""autotune finds the fastest way to run a PyTorch training on the machine at hand, and proves it.

The names below are loaded when first used: importing autotune imports neither torch nor anything heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.applied import Applied as Applied
    from autotune.applied import load_profile as load_profile
    from autotune.errors import AutotuneError as AutotuneError
    from autotune.search import tune as tune
    from autotune.workload import Context as Context
    from autotune.workload import Workload as Workload

__version__ = "0.1.0"

_HOMES = {
    "Applied": "autotune.applied",
    "AutotuneError": "autotune.errors",
    "Context": "autotune.workload",
    "Workload": "autotune.workload",
    "load_profile": "autotune.applied",
    "tune": "autotune.search",
}
__all__ = ["Applied", "AutotuneError", "Context", "Workload", "__version__", "load_profile", "tune"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autotune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
