"""Sets of cores: as text, and as equal shares of those that this process may use."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse a list as ``taskset -c`` takes it, such as ``0-3,8``; return the numbers, ascending.

    Raises:
        ValueError: the text is not such a list.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is neither a core nor a range of cores")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part!r} is an empty range")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def cores_text(cores: Sequence[int]) -> str:
    """Return the shortest text that `parse_cores` reads as these cores."""
    parts: list[tuple[int, int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1] = parts[-1][0], core
        else:
            parts.append((core, core))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def allowed_cores() -> frozenset[int]:
    """Return the cores that this process may use."""
    return frozenset(os.sched_getaffinity(0))


def equal_shares(cores: frozenset[int], count: int, *, cpus: Path = _CPUS) -> list[tuple[int, ...]]:
    """Return equal shares of some cores, each ascending. Left over are fewer than ``count`` of them.

    Neighbours stay together: first the hardware threads of a core, then the cores of a package.

    Args:
        cpus: where the kernel tells of processors (Documentation/admin-guide/cputopology.rst).
    """
    size = len(cores) // count
    ordered = sorted(cores, key=lambda core: (*_place(cpus / f"cpu{core}" / "topology", core), core))
    return [tuple(sorted(ordered[i * size : (i + 1) * size])) for i in range(count)]


def _place(topology: Path, core: int) -> tuple[int, int]:
    """Return the numbers of the package and of the physical core of a processor."""
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, core
