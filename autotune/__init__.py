"""autotune finds the fastest way to run a PyTorch training on the machine at hand, and proves it.

The names below are loaded when first used: importing autotune imports neither torch nor anything heavy.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.applied import Applied as Applied
    from autotune.applied import load_profile as load_profile
    from autotune.errors import AutotuneError as AutotuneError
    from autotune.tuning import Study as Study
    from autotune.tuning import open_study as open_study
    from autotune.tuning import resume as resume
    from autotune.tuning import tune as tune
    from autotune.workload import Context as Context
    from autotune.workload import Workload as Workload
    from autotune.workload import knob as knob

__version__ = "0.1.0"

_HOMES = {
    "Applied": "autotune.applied",
    "AutotuneError": "autotune.errors",
    "Context": "autotune.workload",
    "Workload": "autotune.workload",
    "knob": "autotune.workload",
    "load_profile": "autotune.applied",
    "open_study": "autotune.tuning",
    "resume": "autotune.tuning",
    "Study": "autotune.tuning",
    "tune": "autotune.tuning",
}
__all__ = [
    "Applied",
    "AutotuneError",
    "Context",
    "Study",
    "Workload",
    "__version__",
    "knob",
    "load_profile",
    "open_study",
    "resume",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with warnings.catch_warnings():
            # Optuna's progress bar, which is not used here, misses widgets in a notebook.
            warnings.filterwarnings("ignore", "IProgress not found")
            return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autotune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
