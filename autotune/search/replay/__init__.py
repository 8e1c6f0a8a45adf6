"""Searches without a device: replays recorded launches in virtual time."""

from autotune.search.replay.launcher import ReplayLauncher
from autotune.search.replay.rows import PARTS, Row, ShownEntrant, row_of
from autotune.search.replay.surface import SURFACE_VERSION, Heading, Surface, read_surface

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
