"""Knobs, what of them is legal here and why not, and the canonical key of a configuration. Knows no Optuna.

A `Space` is made once per study from facts (a probe of the device and the workload, the host's limits) and
a request (``--set``, ``--fix``, ``--baseline``). Every refused value carries its reason, in one sentence that names
what would have to change.
"""

from autotune.space.building import SpaceRequest, build_space
from autotune.space.knobs import (
    CUDAGRAPH_MODES,
    KNOBS,
    NEEDS_WORKERS,
    Knob,
    Scope,
    canonical,
    device_part,
    distance,
    environment,
    key,
    loader_part,
    parse_value,
    spell,
)
from autotune.space.legal import Choice, Space
from autotune.space.lessons import Lessons, memory_part

__all__ = [
    "CUDAGRAPH_MODES",
    "KNOBS",
    "NEEDS_WORKERS",
    "Choice",
    "Knob",
    "Lessons",
    "Scope",
    "Space",
    "SpaceRequest",
    "build_space",
    "canonical",
    "device_part",
    "distance",
    "environment",
    "key",
    "loader_part",
    "memory_part",
    "parse_value",
    "spell",
]
