"""A surface: the measured space of one workload on one machine, stored as JSON lines.

The first line is a `Heading`, every other line a `Row`, one recorded launch. Lines are only ever appended. Field names
carry their units (``_s``, ``_bytes``, ``_per_s``: samples per second); unknown values are omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from autotune.base.errors import UsageError
from autotune.base.files import read_regular
from autotune.knobs.num_workers import workers_of
from autotune.base.records import (
    LaunchKind,
    MeasurePlan,
    Record,
    Side,
    TrialStatus,
    Value,
)
from autotune.search.replay.rows import Row
from autotune.space import Choice, Space, device_part, key

#: No space that somebody has measured takes more.
_MOST_BYTES = 2**28
#: Version of the file format. The first had no heats.
SURFACE_VERSION = 2
K = TypeVar("K")


class Heading(Record):
    """The first line of a surface.

    Attributes:
        surface: the version of the format.
        name, workload: the surface's display name, and what was trained.
        made: ``recorded`` on a machine, or ``generated`` from formulas. Results of the two are never mixed.
        machine: one line with the machine, its versions and the date.
        device: contract name. batch_size, image_size: of the baseline.
        memory_bytes: device memory available to a launch; ``None``: more than any needed.
        plan: how each launch measured.
        knobs: the values of each active knob that occur. Some combinations may not have been launched.
        baseline: the configuration of trial 0.
    """

    surface: int = SURFACE_VERSION
    name: str
    made: str = "recorded"
    machine: str
    workload: str
    device: str
    batch_size: int
    image_size: int | None = None
    memory_bytes: int | None = None
    plan: MeasurePlan
    knobs: dict[str, tuple[Value, ...]]
    baseline: dict[str, Value]


@dataclass(frozen=True)
class Surface:
    """A surface as it was read."""

    heading: Heading
    rows: tuple[Row, ...]

    @cached_property
    def launches(self) -> Mapping[str, tuple[Row, ...]]:
        """The measure launches of each configuration key, in chronological order."""
        return _grouped((key(r.config), r) for r in self.rows if r.kind is LaunchKind.MEASURE)

    @cached_property
    def ceilings(self) -> Mapping[tuple[LaunchKind, str], tuple[Row, ...]]:
        """The device-only and loader-only launches, by kind and key of the part of the configuration they depend on."""
        rows = [r for r in self.rows if r.kind in (LaunchKind.DEVICE_ONLY, LaunchKind.LOADER_ONLY)]
        return _grouped(((r.kind, key(r.config)), r) for r in rows)

    @cached_property
    def heats(self) -> Mapping[Side, tuple[Row, ...]]:
        """The heats of each side that ended well."""
        return _grouped((r.side, r) for r in self.rows if r.side is not None and r.status is TrialStatus.COMPLETE)

    @cached_property
    def has_heats(self) -> bool:
        """Whether heats were recorded of each side that has something to compare."""
        configs = [r.config for r in self.rows if r.kind is LaunchKind.MEASURE]
        varied: dict[Side, int] = {
            "device": len({key(device_part(config)) for config in configs}),
            "loader": len({workers_of(config) for config in configs}),
        }
        return bool(self.heats) and all(side in self.heats for side, count in varied.items() if count > 1)

    @cached_property
    def failed(self) -> Mapping[str, Row]:
        """A failed launch of each part of the device with which no launch succeeded, by its key."""
        rows = _grouped((key(device_part(r.config)), r) for r in self.rows if r.kind is LaunchKind.MEASURE)
        return {name: some[0] for name, some in rows.items() if not any(r.rate_per_s for r in some)}

    @cached_property
    def compile_seconds(self) -> Mapping[tuple[str, bool], tuple[float, ...]]:
        """Seconds of the first step, by graph (the key of its device part) and whether the cache was warm."""
        found: dict[tuple[str, bool], tuple[float, ...]] = {}
        for row in self.rows:
            if row.cache_warm is not None and row.compile_s is not None and row.kind is not LaunchKind.LOADER_ONLY:
                name = (key(device_part(row.config)), row.cache_warm)
                found[name] = (*found.get(name, ()), row.compile_s)
        return found

    @cached_property
    def space(self) -> Space:
        """The space a search may try: the configurations that were launched."""
        h = self.heading
        choices = {name: tuple(Choice(v) for v in values) for name, values in h.knobs.items()}
        return Space(choices=choices, inactive={}, baseline=h.baseline, only=frozenset(self.launches))


def _grouped(pairs: Iterable[tuple[K, Row]]) -> dict[K, tuple[Row, ...]]:
    found: dict[K, tuple[Row, ...]] = {}
    for name, row in pairs:
        found[name] = (*found.get(name, ()), row)
    return found


def read_surface(path: Path) -> Surface:
    """Read a surface. An incomplete last line is ignored.

    Raises:
        UsageError: the file does not exist or is not a surface.
    """
    try:
        text = read_regular(path, _MOST_BYTES, follow=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    first, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
    try:
        heading = Heading.model_validate_json(first)
        rows = tuple(Row.model_validate_json(line) for line in lines)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(str(part) for part in found["loc"])
        raise UsageError(
            f"{path} is no surface: {where or 'its first line'}: {found['msg']}",
            advice="`python -m benchmarks.surfaces record` makes one; benchmarks/README.md describes the format.",
        ) from error
    surface = Surface(heading, rows)
    if key(heading.baseline) not in surface.launches:
        raise UsageError(f"{path} holds no launch of its baseline", advice="record it to its end.")
    return surface
