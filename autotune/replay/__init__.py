"""Searches without a device: replays recorded launches in virtual time."""

from autotune.replay.launcher import ReplayLauncher
from autotune.replay.surface import (
    SURFACE_VERSION,
    Heading,
    Row,
    Surface,
    read_surface,
    row_of,
)

__all__ = [
    "SURFACE_VERSION",
    "Heading",
    "ReplayLauncher",
    "Row",
    "Surface",
    "read_surface",
    "row_of",
]
