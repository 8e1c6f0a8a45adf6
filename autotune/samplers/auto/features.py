"""A configuration as numbers: what each knob is expected to do to the logarithm of a rate.

A *main effect* for each value of a knob that is no number, relative to the baseline's value; for each knob that is one
a slope in doublings, and a small effect of each value of its own, so that any curve can be learnt. A *pair effect* for
each two main effects of different knobs. That is a functional analysis of variance cut after the second order (Sobol,
"Sensitivity estimates for nonlinear mathematical models", 1993), whose effects are normal around what is known of each
knob beforehand: most do little, and what two do together is mostly the sum of what each does.

The expectations below are common knowledge of the field, the same for every workload and machine; their standard
deviations are as wide as the field's disagreement, so that a few trials outweigh them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.records import Config, Value
from autotune.space import Space

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: A pair's effect is about this part of what its two main effects may be.
PAIR = 0.35
#: One value of a numeric knob may lie off the slope by about this much.
LEVEL_SD = 0.05


@dataclass(frozen=True)
class Expected:
    """What a main effect is expected to be: its mean and its standard deviation, in natural logarithms of the rate."""

    mean: float
    sd: float


#: By knob and value; of numeric knobs per doubling.
DEVICE: dict[tuple[str, Value | None], Expected] = {
    ("precision", "tf32"): Expected(0.15, 0.25),
    ("precision", "bf16"): Expected(0.35, 0.35),
    ("precision", "fp16"): Expected(0.35, 0.35),
    ("compile_mode", "default"): Expected(0.1, 0.2),
    ("compile_mode", "reduce-overhead"): Expected(0.1, 0.2),
    ("compile_mode", "max-autotune"): Expected(0.15, 0.2),
    ("memory_format", "channels_last"): Expected(0.05, 0.2),
    ("cudnn_benchmark", True): Expected(0.05, 0.15),
    ("optimizer_impl", "foreach"): Expected(0.02, 0.05),
    ("optimizer_impl", "fused"): Expected(0.03, 0.06),
    ("alloc_conf", "expandable_segments"): Expected(0.0, 0.02),
    ("batch_size", None): Expected(0.08, 0.12),
    ("intra_op_threads", None): Expected(0.4, 0.3),
    # Workers may take cores from a CPU's own work; from a GPU's they take nothing.
    ("num_workers", None): Expected(0.0, 0.08),
    ("num_workers", 0): Expected(0.1, 0.2),
}
LOADER: dict[tuple[str, Value | None], Expected] = {
    ("num_workers", None): Expected(0.8, 0.4),
    ("num_workers", 0): Expected(0.0, 0.2),
    ("prefetch_factor", None): Expected(0.0, 0.04),
    ("persistent_workers", True): Expected(0.0, 0.04),
    ("pin_memory", True): Expected(0.0, 0.05),
    ("batch_size", None): Expected(0.0, 0.05),
    ("intra_op_threads", None): Expected(-0.05, 0.15),
}
#: End to end, with no word about what limits it.
WHOLE: dict[tuple[str, Value | None], Expected] = {
    **DEVICE,
    ("num_workers", None): Expected(0.1, 0.25),
    ("num_workers", 0): Expected(-0.1, 0.25),
    ("prefetch_factor", None): Expected(0.0, 0.05),
    ("persistent_workers", True): Expected(0.02, 0.05),
    ("pin_memory", True): Expected(0.01, 0.05),
}
#: The workload's own knobs may do anything.
OWN_KNOB = Expected(0.0, 0.2)
NUMERIC = ("batch_size", "num_workers", "prefetch_factor", "intra_op_threads")


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
