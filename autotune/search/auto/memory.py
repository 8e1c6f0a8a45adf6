"""How much device memory a configuration will take.

Weights, gradients and optimizer state do not depend on the batch, activations grow with it: the peak is a line in the
batch. What a knob does to the line's constant part and to its slope adds up, as the effects of `features` do, so that
every trial teaches all combinations a little (Bayesian linear regression, see `linear`). Peaks scatter; a configuration
fits where not even a peak at the upper end of what is expected would leave less than the headroom.

What was seen of the same combination bounds it besides, whatever the model says: a constant part is not negative, so
that twice the batch takes at most twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.records import Config, Value
from autotune.search.auto.features import Array
from autotune.search.auto.linear import Prior, Regression
from autotune.space import KNOBS, Space

#: Of the capacity, what stays free: a peak that would leave less is not tried.
HEADROOM = 0.03
#: Peaks of equals differ by about this much, where nothing else was seen.
PEAK_SD = 0.03
#: Few peaks that lie on a line by chance do not make it exact.
NOISES = (1.0, 2.0, 4.0)
#: The upper end of what is expected: 1 peak in 100 is above it.
UPPER_Z = 2.33
#: A prediction whose standard deviation is above this part of it is none.
VAGUE = 0.1
#: What ran out of memory wanted more than there is, by about so much; that weighs as much as part of a measured peak.
OOM_EXCESS, OOM_WEIGHT = 1.1, 0.25
#: Before the first trial: the constant part and the batch's part of the baseline's peak.
_PARTS = (0.5, 0.35)
#: Effects on the constant part and on the slope, in units of the baseline's peak: their means and standard deviations.
_ON_CONSTANT = (0.0, 0.08)
_ON_SLOPE = {"precision": (-0.1, 0.2), "compile_mode": (0.0, 0.15)}
_ON_SLOPE_OTHERS = (0.0, 0.1)

_MEMORY = tuple(name for name, knob in KNOBS.items() if knob.memory and name != "batch_size")
Part = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Bound:
    """What is predicted for a configuration, in bytes.

    Attributes:
        expected: ``None`` where what is known is too vague.
        upper: it takes no more than this, as far as can be told.
    """

    expected: float | None
    upper: float


class MemoryModel:
    """Peaks seen, and what they say of others.

    Args:
        capacity_bytes: what a training may use; ``None``: nothing is ruled out.
    """

    def __init__(self, space: Space, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self._effects = _effects(space)
        self._seen: dict[Part, dict[int, list[int]]] = {}
        self._regression = Regression(self._prior(), NOISES)
        #: Bytes and batch of the first peak: the units of the regression.
        self._unit: tuple[int, int] | None = None

    def learn(self, config: Config, peak_bytes: int) -> None:
        """A training took so much."""
        self._unit = self._unit or (max(1, peak_bytes), _batch(config))
        self._seen.setdefault(part(config), {}).setdefault(_batch(config), []).append(peak_bytes)
        self._add(config, peak_bytes, 1.0)

    def learn_oom(self, config: Config) -> None:
        """A training did not fit."""
        if self.capacity_bytes is not None and self._unit is not None:
            self._add(config, OOM_EXCESS * self.capacity_bytes, OOM_WEIGHT)

    def batches(self, config: Config) -> list[int]:
        """Batches seen of the same combination, ascending."""
        return sorted(self._seen.get(part(config), {}))

    def fits(self, config: Config) -> bool:
        """Whether it surely fits. With no limit, or before anything was seen, everything is taken to."""
        return bool(self.fit([config])[0])

    def fit(self, configs: Sequence[Config]) -> list[bool]:
        """The same of many."""
        if self.capacity_bytes is None or self._unit is None:
            return [True] * len(configs)
        limit = (1 - HEADROOM) * self.capacity_bytes
        return [bound.upper <= limit for bound in self._bounds(configs)]

    def bound(self, config: Config) -> Bound | None:
        """What is predicted; ``None`` before anything was seen."""
        return self._bounds([config])[0] if self._unit is not None else None

    def _bounds(self, configs: Sequence[Config]) -> list[Bound]:
        assert self._unit is not None
        fitted = self._regression.fit(PEAK_SD)
        means, sds = fitted.predict(np.array([self._row(c) for c in configs]))
        found = []
        for config, mean, sd in zip(configs, means, sds, strict=True):
            likely = max(float(mean), 0.0)
            spread = math.hypot(float(sd), fitted.noise_sd * likely)
            upper = self._unit[0] * (likely + UPPER_Z * spread)
            known = self._seen.get(part(config), {})
            known_upper = _most(known, _batch(config), 1 + UPPER_Z * fitted.noise_sd)
            vague = sd > VAGUE * likely
            found.append(Bound(None if vague else self._unit[0] * likely, min(upper, known_upper)))
        return found

    def _add(self, config: Config, peak_bytes: float, weight: float) -> None:
        assert self._unit is not None
        peak = peak_bytes / self._unit[0]
        # Peaks scatter by a percentage.
        self._regression.add(self._row(config), peak, weight / peak**2)

    def _row(self, config: Config) -> Array:
        assert self._unit is not None
        effects = [1.0, *(float(_has(config, name, value)) for name, value in self._effects)]
        batch = _batch(config) / self._unit[1]
        return np.array([*effects, *(batch * e for e in effects)])

    def _prior(self) -> Prior:
        slopes = [_ON_SLOPE.get(name, _ON_SLOPE_OTHERS) for name, _ in self._effects]
        both = [_PARTS, *[_ON_CONSTANT] * len(self._effects), _PARTS, *slopes]
        mean, sd = (np.array(values, dtype=np.float64) for values in zip(*both, strict=True))
        # None is a correction of another.
        return Prior(mean, sd, np.zeros(len(both), dtype=bool))


def part(config: Config) -> Part:
    """What the memory of a configuration depends on besides the batch.

    Without workers it is the training process that holds the samples of a batch while it is made.
    """
    own = [(n, repr(v)) for n, v in config.items() if n in _MEMORY or n.startswith("workload.")]
    return tuple(sorted([*own, ("workers", repr(_works(config)))]))


def _effects(space: Space) -> list[tuple[str, Value]]:
    """Every value of the knobs that memory depends on, but the baseline's own."""
    found: list[tuple[str, Value]] = []
    for name in space.choices:
        if name in _MEMORY or name.startswith("workload."):
            values = space.legal(name)
            own = space.baseline.get(name, values[0])
            found += [(name, v) for v in values if repr(v) != repr(own)]
    return [*found, ("num_workers", not _works(space.baseline))]


def _has(config: Config, name: str, value: Value) -> bool:
    if name == "num_workers":
        return _works(config) == value
    return repr(config.get(name)) == repr(value)


def _works(config: Config) -> bool:
    return int(config.get("num_workers", 0)) > 0


def _batch(config: Config) -> int:
    return int(config["batch_size"])


def _most(seen: dict[int, list[int]], batch: int, margin: float) -> float:
    """What a batch takes at the most, by others of the same combination: a larger one takes no less, and a smaller one
    no less than in proportion."""
    return margin * min((max(peaks) * max(1.0, batch / b) for b, peaks in seen.items()), default=math.inf)
