"""Configurations as the models see them: features, pools, and what heats have shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.base.records import Config, Value
from autotune.knobs import KNOBS, Expected, Part
from autotune.knobs.knob import UNKNOWN
from autotune.space import Space

# Encodes a configuration as a vector of effects on the logarithm of a rate.
#
# Each value of a non-numeric knob has a *main effect* relative to the baseline's value. A numeric knob has a slope per
# doubling (a wide one may bend) and a small effect of each of its values, so that any curve can be learnt. Any two
# main effects of different knobs have a *pair effect*. This is a functional analysis of variance truncated after the
# second order (Sobol, "Sensitivity estimates for nonlinear mathematical models", 1993), with normal priors on the
# effects: most effects are small, and the effect of two knobs is mostly the sum of their effects.
#
# The priors are in the knobs' files (`autotune.knobs`). They state common knowledge of the field, the same for all
# workloads and machines, with standard deviations as wide as the field's disagreement, so that a few trials outweigh
# them.

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: Scale of a pair effect's prior, relative to its two main effects.
PAIR = 0.35
#: Standard deviation of the effect of a single value of a numeric knob around the slope, at most that of the slope.
LEVEL_SD = 0.05
#: A slope whose standard deviation is at least `BENDS` may change with each doubling, by about this fraction of it:
#: larger batches bring a GPU less and less, and workers beyond the cores hardly anything.
BEND, BENDS = 0.5, 0.1
#: Standard deviation of the effect of a value between two others around the mean of their effects.
BETWEEN_SD = 0.03
#: Knobs with numeric values, which have a slope.
NUMERIC = tuple(name for name, knob in KNOBS.items() if knob.numeric)


def expectations(part: Part) -> dict[tuple[str, Value | None], Expected]:
    """Return the catalog's priors for a part of the training, by knob and value; for numeric knobs, per doubling."""
    return {(name, value): e for name, knob in KNOBS.items() for value, e in knob.effects(part).items()}


DEVICE, LOADER, WHOLE = expectations("device"), expectations("loader"), expectations("whole")


@dataclass(frozen=True)
class _Effect:
    """One main effect, and how strongly each configuration has it."""

    name: str
    expected: Expected
    value: Value | None
    reference: float = 1.0
    level: bool = False
    #: A curve on which the slope changes by `BEND` with each doubling.
    bend: bool = False
    #: Values that have half of the effect.
    halves: tuple[Value, ...] = ()

    def of(self, column: _Column) -> Array:
        """Return the strength of the effect in each configuration of a column, ``(N,)``."""
        if self.value is not None:
            strength: Array = (column.codes == column.known.get(repr(self.value), -1)).astype(np.float64)
            for value in self.halves:
                strength += 0.5 * (column.codes == column.known.get(repr(value), -1))
            return strength
        with np.errstate(invalid="ignore"):
            slopes: Array = np.log2(np.maximum(column.numbers, 1.0) / self.reference)
        return np.nan_to_num(BEND * slopes**2 / 2 if self.bend else slopes)


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
            unknown beforehand. fine: marks small corrections (of single values, and pairs), ``(F,)``.
    """

    def __init__(self, space: Space, expected: dict[tuple[str, Value | None], Expected]) -> None:
        effects: list[_Effect] = []
        with_priors = {name for name, _ in expected}
        for name in space.choices:
            if name in with_priors or name.startswith("workload."):
                effects += _effects(space, name, expected)
        self._effects = effects
        slopes = [i for i, e in enumerate(effects) if not e.level and not e.bend]
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
    baseline_value = space.baseline.get(name)
    if name not in NUMERIC:
        reference = baseline_value if baseline_value is not None else legal[0]
        return [
            _Effect(name, expected.get((name, value), UNKNOWN), value)
            for value in legal
            if value != reference or isinstance(value, bool) != isinstance(reference, bool)
        ]
    if len(legal) < 2 and (baseline_value is None or baseline_value in legal):
        return []
    start = max(1.0, float(baseline_value)) if baseline_value is not None else float(min(legal, key=float))
    # Values halfway between two others.
    between = [v for v in space.further.get(name, ()) if {2 * int(v) / 3, 4 * int(v) / 3} <= set(legal)]
    slope = expected.get((name, None))
    effects = [] if slope is None else [_Effect(name, slope, None, start)]
    if slope is not None and slope.sd >= BENDS:
        effects.append(_Effect(name, Expected(0.0, slope.sd), None, start, bend=True))
    level_sd = LEVEL_SD if slope is None else min(LEVEL_SD, slope.sd)
    for value in legal:
        value_prior = expected.get((name, value))
        if value_prior is not None:
            effects.append(_Effect(name, value_prior, value))
        elif value != baseline_value:
            halves = tuple(v for v in between if 2 * int(v) in (3 * int(value), 1.5 * int(value)))
            sd = min(BETWEEN_SD, level_sd) if value in between else level_sd
            effects.append(_Effect(name, Expected(0.0, sd), value, level=True, halves=halves))
    return effects


# Configurations with their features.


@dataclass(frozen=True)
class Pool:
    """Configurations with their features, computed once.

    Attributes:
        device, loader, whole: rows for each model, ``(N, F)``. workers, batches: ``(N,)``. overlaps: whether it
            loads while it computes, ``(N,)``. parts, loaders: keys of the parts of each configuration that concern the
            device and the loader.
    """

    configs: list[Config]
    device: Array
    loader: Array
    whole: Array
    workers: Array
    overlaps: NDArray[np.bool_]
    batches: Array
    parts: list[str]
    loaders: list[str]

    @classmethod
    def joined(cls, pools: Sequence[Pool]) -> Pool:
        columns: list[list[Any]] = [[getattr(pool, one.name) for pool in pools] for one in fields(cls)]
        joined: list[Any] = [np.concatenate(c) if isinstance(c[0], np.ndarray) else [*chain(*c)] for c in columns]
        return cls(*joined)

    def __len__(self) -> int:
        return len(self.configs)

    def __getitem__(self, some: slice | NDArray[np.int64]) -> Pool:
        indices = range(len(self))[some] if isinstance(some, slice) else some
        columns: list[Any] = [getattr(self, one.name) for one in fields(self)]
        chosen: list[Any] = [c[some] if isinstance(c, np.ndarray) else [c[i] for i in indices] for c in columns]
        return Pool(*chosen)


# What heats have shown about single configurations, beyond what the models make of it.
#
# A linear model with pair effects predicts most configurations well, but none exactly. A configuration that took turns
# with others need not be predicted: its ratios to them are known. So the models are corrected by their own errors at
# the entrants, as far as those were measured precisely (the residual part of a Gaussian process whose covariance is a
# linear one plus a nugget: Rasmussen & Williams, Gaussian Processes, 2006, 2.7).

#: By how much a configuration's rate differs from the sum of its effects, in natural logarithms. In seven heats of 8 to
#: 20 configurations (ResNet-18, 64 px, two cores) the fast ones, predicted from the others, differed by 0.11 (rms).
LACK_SD = 0.1


@dataclass(frozen=True)
class Shown:
    """One heat, as one model sees it.

    Attributes:
        parts: keys of the entrants' parts on the heat's side. rows: their features, ``(N, F)``. seen: logarithms of
            their ratios to any one of them, ``(N,)``. sds: the standard deviations of ``seen``, ``(N,)``.
    """

    parts: tuple[str, ...]
    rows: Array
    seen: Array
    sds: Array

    def errors(self, effects: Array) -> Array:
        """Return by how much the entrants are faster than the model predicts, in natural logarithms, ``(N, S)``, in
        each draw of its effects ``(F, S)``.

        Only differences were observed, hence the median: a single entrant that the model is quite wrong about must not
        move all others.
        """
        residuals = self.seen[:, None] - self.rows @ effects
        centred: Array = residuals - np.median(residuals, axis=0)
        return centred


def corrections(heats: Sequence[Shown], effects: Array, parts: Sequence[str]) -> Array | float:
    """Return what to add to the model's logarithmic rates of configurations, ``(len(parts), S)``; 0 if there are no
    heats.

    Args:
        effects: draws of the model's effects, ``(F, S)``. parts: keys of the configurations' parts.
    """
    if not heats:
        return 0.0
    totals: dict[str, tuple[Array, float]] = {}
    for heat in heats:
        errors = heat.errors(effects)
        for part, error, sd in zip(heat.parts, errors, heat.sds, strict=True):
            total, precision = totals.get(part, (np.zeros_like(error), 0.0))
            totals[part] = total + error / sd**2, precision + 1 / sd**2
    added = np.zeros((len(parts), effects.shape[1]))
    for i, part in enumerate(parts):
        if part in totals:
            total, precision = totals[part]
            added[i] = total / (precision + 1 / LACK_SD**2)
    return added


#: Exponent of the smooth minimum of two rates. Because step times vary, a training does not reach the smaller rate when
#: the two are similar: with this exponent, it stays 8 % below.
SHARPNESS = 8.0


def combined(log_device: Array, log_loader: Array, overlaps: NDArray[np.bool_]) -> Array:
    """Return the logarithm of the rate of both sides together; shapes ``(N, …)``, overlaps ``(N,)``. Where loading and
    computing do not overlap, their times add."""
    gap = log_loader - log_device
    lost = np.empty_like(gap)
    lost[overlaps] = np.logaddexp(0.0, -SHARPNESS * gap[overlaps]) / SHARPNESS
    lost[~overlaps] = np.logaddexp(0.0, -gap[~overlaps])
    log_rate: Array = log_device - lost
    return log_rate
