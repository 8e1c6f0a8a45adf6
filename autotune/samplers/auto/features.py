"""A configuration as numbers: what each knob is expected to do to the logarithm of a rate.

A *main effect* for each value of a knob that is no number, relative to the baseline's value; for each knob that is one
a slope in doublings, and a small effect of each value of its own, so that any curve can be learnt. A *pair effect* for
each two main effects of different knobs. That is a functional analysis of variance cut after the second order (Sobol,
"Sensitivity estimates for nonlinear mathematical models", 1993), whose effects are normal around what is known of each
knob beforehand: most do little, and what two do together is mostly the sum of what each does.

What is expected of each knob stands in its file (`autotune.knobs`): common knowledge of the field, the same for every
workload and machine, with standard deviations as wide as the field's disagreement, so that a few trials outweigh it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.knobs import KNOBS, Expected, Part
from autotune.knobs.knob import UNKNOWN
from autotune.records import Config, Value
from autotune.space import Space

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: A pair's effect is about this part of what its two main effects may be.
PAIR = 0.35
#: One value of a numeric knob may lie off the slope by about this much.
LEVEL_SD = 0.05


#: The workload's own knobs may do anything.
OWN_KNOB = UNKNOWN
#: Knobs whose values are numbers, with a slope.
NUMERIC = tuple(name for name, knob in KNOBS.items() if knob.numeric)


def expectations(part: Part) -> dict[tuple[str, Value | None], Expected]:
    """What the catalog expects in a part of the training: by knob and value, of numbers per doubling."""
    return {(name, value): e for name, knob in KNOBS.items() for value, e in knob.effects(part).items()}


DEVICE, LOADER, WHOLE = expectations("device"), expectations("loader"), expectations("whole")


@dataclass(frozen=True)
class _Effect:
    """One main effect: how strongly a configuration has it."""

    name: str
    expected: Expected
    value: Value | None
    reference: float = 1.0
    level: bool = False

    def of(self, column: _Column) -> Array:
        """For each configuration of a column, shape ``(N,)``."""
        if self.value is not None:
            same: Array = (column.codes == column.known.get(repr(self.value), -1)).astype(np.float64)
            return same
        with np.errstate(invalid="ignore"):
            slopes: Array = np.log2(np.maximum(column.numbers, 1.0) / self.reference)
        return np.nan_to_num(slopes)


@dataclass(frozen=True)
class _Column:
    """One knob's value in each of some configurations.

    Attributes:
        codes: a number for each different value, ``known`` by its ``repr``, which tells 1 from True. numbers: the
        values
            of a numeric knob; not a number where it is inactive.
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
        expected: which knobs, and what they are expected to do.

    Attributes:
        mean, sd: of each effect beforehand, shape ``(F,)``; the first is the logarithm of the baseline's own rate, of
            which nothing is known. fine: which are small corrections (one value off its slope, and pairs), ``(F,)``.
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
        """One row for each configuration, shape ``(N, F)``."""
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
    found = [_Effect(name, expected[name, None], None, start)] if (name, None) in expected else []
    for value in legal:
        special = expected.get((name, value))
        if special is not None:
            found.append(_Effect(name, special, value))
        elif value != own:
            found.append(_Effect(name, Expected(0.0, LEVEL_SD), value, level=True))
    return found
