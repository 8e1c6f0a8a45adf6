"""Searches without a device: replays recorded launches in virtual time."""

from autotune.search.replay.run import ReplayLauncher
from autotune.search.replay.surface import (
    PARTS,
    SURFACE_VERSION,
    Heading,
    Row,
    ShownEntrant,
    Surface,
    read_surface,
    row_of,
)

__all__ = [
    "PARTS",
    "SURFACE_VERSION",
    "Heading",
    "ReplayLauncher",
    "Row",
    "ShownEntrant",
    "Surface",
    "read_surface",
    "row_of",
]
