"""The space of a search: the knobs, values and combinations that are legal here, and why others are refused.

A `Space` is built once per study from facts (a probe of the device and the workload, the host's limits) and a request
(``--set``, ``--fix``, ``--baseline``). Every refused value has a reason: one sentence that names what would have to
change.
"""

from autotune.space.building import Choice, Space, SpaceRequest, build_space
from autotune.space.configuration import (
    AT_ONCE,
    Lessons,
    canonical,
    delivery_part,
    device_part,
    distance,
    environment,
    is_checked_by,
    is_idle,
    is_loaders,
    key,
    loader_part,
    loads_as,
    maths_part,
    memory_part,
    parse_value,
    queued_batches,
    samples_at_once,
    settings,
    simplicity,
    too_large,
    why_apart,
)

__all__ = [
    "AT_ONCE",
    "Choice",
    "Lessons",
    "Space",
    "SpaceRequest",
    "build_space",
    "canonical",
    "delivery_part",
    "device_part",
    "distance",
    "environment",
    "is_checked_by",
    "is_idle",
    "is_loaders",
    "key",
    "loader_part",
    "loads_as",
    "maths_part",
    "memory_part",
    "parse_value",
    "queued_batches",
    "samples_at_once",
    "settings",
    "simplicity",
    "too_large",
    "why_apart",
]
