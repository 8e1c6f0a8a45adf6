"""autotune finds the fastest way to run a PyTorch training on the machine at hand, and proves it.

The names below are loaded when first used: importing autotune imports neither torch nor anything heavy.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from autotune.base.version import __version__ as __version__

if TYPE_CHECKING:
    from autotune.base.errors import AutotuneError as AutotuneError
    from autotune.base.records import Goal as Goal
    from autotune.base.records import Measurement as Measurement
    from autotune.base.records import NotScored as NotScored
    from autotune.search.tuning import Study as Study
    from autotune.search.tuning import open_study as open_study
    from autotune.search.tuning import resume as resume
    from autotune.search.tuning import tune as tune
    from autotune.training.applied import Applied as Applied
    from autotune.training.applied import load_profile as load_profile
    from autotune.workload.contract import Context as Context
    from autotune.workload.contract import Workload as Workload
    from autotune.workload.contract import knob as knob


_HOMES = {
    "Applied": "autotune.training.applied",
    "AutotuneError": "autotune.base.errors",
    "Goal": "autotune.base.records",
    "Measurement": "autotune.base.records",
    "NotScored": "autotune.base.records",
    "Context": "autotune.workload.contract",
    "Workload": "autotune.workload.contract",
    "knob": "autotune.workload.contract",
    "load_profile": "autotune.training.applied",
    "open_study": "autotune.search.tuning",
    "resume": "autotune.search.tuning",
    "Study": "autotune.search.tuning",
    "tune": "autotune.search.tuning",
}
__all__ = [
    "Applied",
    "AutotuneError",
    "Context",
    "Goal",
    "Measurement",
    "NotScored",
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
