"""Encodes a configuration as a vector of effects on the logarithm of a rate.

Each value of a non-numeric knob has a *main effect* relative to the baseline's value. A numeric knob has a slope per
doubling and a small effect of each of its values, so that any curve can be learnt. Each two main effects of different
knobs have a *pair effect*. This is a functional analysis of variance truncated after the second order (Sobol,
"Sensitivity estimates for nonlinear mathematical models", 1993), with normal priors on the effects: most effects are
small, and the effect of two knobs is mostly the sum of their effects.

The priors are in the knobs' files (`autotune.knobs`). They state common knowledge of the field, equal for all workloads
and machines, with standard deviations as wide as the field's disagreement, so that a few trials outweigh them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.base.records import Config, Value
from autotune.knobs import KNOBS, Expected, Part
from autotune.knobs.knob import UNKNOWN
from autotune.space import Space

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: Scale of a pair effect's prior, relative to its two main effects.
PAIR = 0.35
#: Standard deviation of a single value of a numeric knob around the slope, at most that of the slope.
LEVEL_SD = 0.05
#: Standard deviation of a value that lies between two others around the mean of theirs.
BETWEEN_SD = 0.03


#: Prior of the workload's own knobs, about which nothing is known.
OWN_KNOB = UNKNOWN
#: Knobs with numeric values, which have a slope.
NUMERIC = tuple(name for name, knob in KNOBS.items() if knob.numeric)


def expectations(part: Part) -> dict[tuple[str, Value | None], Expected]:
    """Return the catalog's priors for a part of the training, by knob and value; for numbers, per doubling."""
    return {(name, value): e for name, knob in KNOBS.items() for value, e in knob.effects(part).items()}


DEVICE, LOADER, WHOLE = expectations("device"), expectations("loader"), expectations("whole")


@dataclass(frozen=True)
class _Effect:
    """One main effect: how strongly each configuration has it."""

    name: str
    expected: Expected
    value: Value | None
    reference: float = 1.0
    level: bool = False
    #: Values that have half of the effect.
    halves: tuple[Value, ...] = ()

    def of(self, column: _Column) -> Array:
        """Return the strength of the effect for each configuration of a column, ``(N,)``."""
        if self.value is not None:
            same: Array = (column.codes == column.known.get(repr(self.value), -1)).astype(np.float64)
            for value in self.halves:
                same += 0.5 * (column.codes == column.known.get(repr(value), -1))
            return same
        with np.errstate(invalid="ignore"):
            slopes: Array = np.log2(np.maximum(column.numbers, 1.0) / self.reference)
        return np.nan_to_num(slopes)


@dataclass(frozen=True)
class _Column:
    """The values of one knob in a number of configurations.

    Attributes:
        codes: an integer for each distinct value. known: the codes by ``repr`` of the value, which distinguishes 1 from
            True. numbers: the values of a numeric knob; NaN where it is inactive.
    """

    codes: NDArray[np.int64]
    known: dict[str, int]
    numbers: Array

    @classmethod
    def of(cls, name: str, configs: Sequence[Config]) -> _Column:
        values = [c.get(name) for c in configs]
        known: dict[str, int] = {}
        codes = [known.setdefault(repr(v), len(known)) for v in values]
        numbers = [float(v) if v is not None and name in NUMERIC else math.nan for v in values]
        return cls(np.array(codes, dtype=np.int64), known, np.array(numbers, dtype=np.float64))


class Features:
    """The effects of some knobs of a space.

    Args:
        expected: the priors of the knobs to include.

    Attributes:
        mean, sd: prior of each effect, ``(F,)``. The first effect is the logarithm of the baseline's rate, which is
            unknown beforehand. fine: marks small corrections (deviations from a slope, and pairs), ``(F,)``.
    """

    def __init__(self, space: Space, expected: dict[tuple[str, Value | None], Expected]) -> None:
        effects: list[_Effect] = []
        named = {name for name, _ in expected}
        for name in space.choices:
            if name in named or name.startswith("workload."):
                effects += _effects(space, name, expected)
        self._effects = effects
        slopes = [i for i, e in enumerate(effects) if not e.level]
        self._pairs = [(i, j) for i in slopes for j in slopes if i < j and effects[i].name != effects[j].name]
        sds = [e.expected.sd for e in effects]
        pair_sds = [PAIR * math.sqrt(sds[i] * sds[j]) for i, j in self._pairs]
        self.mean = np.array([0.0, *(e.expected.mean for e in effects), *[0.0] * len(self._pairs)])
        self.sd = np.array([10.0, *sds, *pair_sds])
        self.fine: Bools = np.array([False, *(e.level for e in effects), *[True] * len(self._pairs)])

    def of(self, configs: Sequence[Config]) -> Array:
        """Return one row for each configuration, ``(N, F)``."""
        columns = {name: _Column.of(name, configs) for name in {e.name for e in self._effects}}
        mains = [e.of(columns[e.name]) for e in self._effects]
        return np.column_stack([np.ones(len(configs)), *mains, *(mains[i] * mains[j] for i, j in self._pairs)])


def _effects(space: Space, name: str, expected: dict[tuple[str, Value | None], Expected]) -> list[_Effect]:
    legal = space.legal(name)
    own = space.baseline.get(name)
    if name not in NUMERIC:
        reference = own if own is not None else legal[0]
        return [
            _Effect(name, expected.get((name, value), OWN_KNOB), value)
            for value in legal
            if value != reference or isinstance(value, bool) != isinstance(reference, bool)
        ]
    if len(legal) < 2 and (own is None or own in legal):
        return []
    start = max(1.0, float(own)) if own is not None else float(min(legal, key=float))
    # Halfway between two others.
    between = [v for v in space.further.get(name, ()) if {2 * int(v) / 3, 4 * int(v) / 3} <= set(legal)]
    slope = expected.get((name, None))
    found = [] if slope is None else [_Effect(name, slope, None, start)]
    level_sd = LEVEL_SD if slope is None else min(LEVEL_SD, slope.sd)
    for value in legal:
        special = expected.get((name, value))
        if special is not None:
            found.append(_Effect(name, special, value))
        elif value != own:
            halves = tuple(v for v in between if 2 * int(v) in (3 * int(value), 1.5 * int(value)))
            sd = min(BETWEEN_SD, level_sd) if value in between else level_sd
            found.append(_Effect(name, Expected(0.0, sd), value, level=True, halves=halves))
    return found
