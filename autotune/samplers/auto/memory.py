"""Predicts the device memory of a configuration.

Weights, gradients and optimizer state do not depend on the batch size, and activations are proportional to it: the peak
is a linear function of the batch size. (If a batch goes through the model in parts, its size here means the size of a
part.) The effects of the knobs on the constant part and on the slope add up, like the effects in `features`, so that
every trial informs all combinations (Bayesian linear regression, see `rates`). Peaks vary between launches. A
configuration fits if even a peak at the upper end of its prediction leaves the headroom free.

Regardless of the model, the peaks of the same combination are a bound: the constant part is not negative, so twice the
batch takes at most twice the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.base.records import Config, Value
from autotune.knobs import KNOBS, Knob
from autotune.knobs.num_workers import workers_of
from autotune.samplers.auto.features import Array, Bools
from autotune.samplers.auto.rates import Fit, Prior, Regression
from autotune.space import AT_ONCE, Space, memory_part, samples_at_once

#: Fraction of the capacity to be left free: configurations with a higher peak are not tried.
HEADROOM = 0.03
#: Relative standard deviation between the peaks of identical launches, until more is known.
PEAK_SD = 0.03
#: Factors tried on it, at least 1: a few peaks that are collinear by chance do not make the fit exact.
NOISES = (1.0, 2.0, 4.0)
#: The upper end of a prediction: 1 peak in 100 is higher.
UPPER_Z = 2.33
#: Predictions with a larger relative standard deviation are too vague to be used.
VAGUE = 0.1
#: A launch that runs out of memory counts as a peak at this multiple of the capacity, with this weight.
OOM_EXCESS, OOM_WEIGHT = 1.1, 0.25
#: Prior of the constant part and of the part proportional to the batch, in units of the baseline's peak.
_PARTS = (0.5, 0.35)
#: Prior of the effect of a value on the constant part: mean and standard deviation, in units of the baseline's peak.
#: The prior of its effect on the slope is in the knob's file.
_ON_CONSTANT = (0.0, 0.08)

#: Extra effect of having loader workers: without them, the training process holds the samples.
_WORKERS = "workers"

Part = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Bound:
    """The predicted peak of a configuration, in bytes.

    Attributes:
        expected: ``None`` if the prediction is too vague.
        upper: upper end of the prediction.
    """

    expected: float | None
    upper: float


class Table:
    """Configurations encoded for the model, and what is known of their combinations.

    A combination is a configuration without its batch size.

    Attributes:
        effects: ``(N, E)``; the first is the constant. batches: ``(N,)``.
        most: upper bound in bytes by the peaks of the same combination, without their scatter, ``(N,)``.
        ran: largest batch of the same combination that ran, ``(N,)``.
    """

    def __init__(self, effects: Array, configs: Sequence[Config]) -> None:
        self.effects = effects
        self.batches = np.array([samples_at_once(c) for c in configs], dtype=np.float64)
        self.most = np.full(len(configs), np.inf)
        self.ran = np.zeros(len(configs))
        #: Number of peaks entered so far.
        self.entered = 0
        self._places: dict[Part, list[int]] = {}
        for i, config in enumerate(configs):
            self._places.setdefault(part(config), []).append(i)

    @property
    def parts(self) -> Collection[Part]:
        return self._places.keys()

    def enter(self, name: Part, peaks: dict[int, int]) -> None:
        """Enter the largest peaks of one combination, by batch size.

        A larger batch takes no less memory, and a smaller one at least its proportion.
        """
        rows = self._places.get(name)
        if rows is not None:
            batches = self.batches[rows]
            self.most[rows] = np.min([peak * np.maximum(1.0, batches / b) for b, peak in peaks.items()], axis=0)
            self.ran[rows] = max(peaks)


class MemoryModel:
    """Learns from peaks and predicts those of other configurations.

    Args:
        capacity_bytes: memory that a training may use; ``None`` rules nothing out.
    """

    def __init__(self, space: Space, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self._effects = _effects(space)
        #: Largest peak by combination and batch size.
        self._seen: dict[Part, dict[int, int]] = {}
        #: Combination of each peak, in order.
        self._entries: list[Part] = []
        self._regression = Regression(self._prior(), NOISES)
        #: Bytes and batch size of the first peak: the units of the regression.
        self._unit: tuple[int, int] | None = None
        self._fitted: Fit | None = None

    def learn(self, config: Config, peak_bytes: int) -> None:
        self._unit = self._unit or (max(1, peak_bytes), samples_at_once(config))
        peaks = self._seen.setdefault(part(config), {})
        peaks[samples_at_once(config)] = max(peak_bytes, peaks.get(samples_at_once(config), 0))
        self._entries.append(part(config))
        self._add(config, peak_bytes, 1.0)

    def learn_oom(self, config: Config) -> None:
        if self.capacity_bytes is not None and self._unit is not None:
            self._add(config, OOM_EXCESS * self.capacity_bytes, OOM_WEIGHT)

    def batches(self, config: Config) -> list[int]:
        """Return the batch sizes seen of the same combination, ascending."""
        return sorted(self._seen.get(part(config), {}))

    def fits(self, config: Config) -> bool:
        """Return whether a configuration certainly fits. Without a limit, or without data, every configuration does."""
        return bool(self.fit(self.table([config]))[0])

    def may_fit(self, config: Config) -> bool:
        """Return whether at least the expected peak leaves the headroom free."""
        if self.capacity_bytes is None or self._unit is None:
            return True
        means, _, _ = self._predicted(self.table([config]))
        return bool(means[0] * self._unit[0] <= (1 - HEADROOM) * self.capacity_bytes)

    def table(self, configs: Sequence[Config]) -> Table:
        """Encode configurations as a table, for repeated calls of `fit`."""
        rows = [[1.0, *(float(_has(c, name, value)) for name, value in self._effects)] for c in configs]
        effects = np.array(rows, dtype=np.float64).reshape(len(configs), 1 + len(self._effects))
        return Table(effects, configs)

    def fit(self, table: Table) -> Bools:
        """Return which of the configurations certainly fit, ``(N,)``."""
        if self.capacity_bytes is None or self._unit is None:
            return np.ones(len(table.batches), dtype=bool)
        uppers = self._uppers(table)
        # A configuration that ran will run again, and so will a smaller batch.
        fitting: Bools = (uppers <= (1 - HEADROOM) * self.capacity_bytes) | (table.batches <= table.ran)
        return fitting

    def bound(self, config: Config) -> Bound | None:
        """Return the prediction for a configuration; ``None`` if there is no data yet."""
        if self._unit is None:
            return None
        table = self.table([config])
        means, sds, _ = self._predicted(table)
        expected = None if sds[0] > VAGUE * means[0] else self._unit[0] * float(means[0])
        return Bound(expected, float(self._uppers(table)[0]))

    def _predicted(self, table: Table) -> tuple[Array, Array, float]:
        """Return means and standard deviations, ``(N,)`` in the regression's units, and the scatter of one peak."""
        assert self._unit is not None
        if self._fitted is None:
            self._fitted = self._regression.fit(PEAK_SD)
        grown = table.effects * (table.batches / self._unit[1])[:, None]
        means, sds = self._fitted.predict(np.hstack([table.effects, grown]))
        return np.maximum(means, 0.0), sds, self._fitted.noise_sd

    def _uppers(self, table: Table) -> Array:
        assert self._unit is not None
        means, sds, scatter = self._predicted(table)
        # Update whichever are fewer: all combinations of the table, or those with peaks since the last call.
        new = self._entries[table.entered :]
        for name in table.parts if len(table.parts) < len(new) else dict.fromkeys(new):
            if name in self._seen:
                table.enter(name, self._seen[name])
        table.entered = len(self._entries)
        by_model = self._unit[0] * (means + UPPER_Z * np.hypot(sds, scatter * means))
        uppers: Array = np.minimum(by_model, (1 + UPPER_Z * scatter) * table.most)
        return uppers

    def _add(self, config: Config, peak_bytes: float, weight: float) -> None:
        assert self._unit is not None
        peak = peak_bytes / self._unit[0]
        table = self.table([config])
        row = np.concatenate([table.effects[0], table.effects[0] * (table.batches[0] / self._unit[1])])
        # The scatter of peaks is proportional to the peak.
        self._regression.add(row, peak, weight / peak**2)
        self._fitted = None

    def _prior(self) -> Prior:
        expected = [KNOBS[name].memory_slope if name in KNOBS else Knob.memory_slope for name, _ in self._effects]
        slopes = [(e.mean, e.sd) for e in expected]
        effects = [_PARTS, *[_ON_CONSTANT] * len(self._effects), _PARTS, *slopes]
        mean, sd = (np.array(values, dtype=np.float64) for values in zip(*effects, strict=True))
        # No effect is a fine correction.
        return Prior(mean, sd, np.zeros(len(effects), dtype=bool))


def part(config: Config) -> Part:
    """Return the combination of a configuration: everything its memory depends on except the batch size.

    It includes whether there are workers: without them, the training process holds the samples of a batch.
    """
    return (*memory_part(config), (_WORKERS, repr(_works(config))))


def _effects(space: Space) -> list[tuple[str, Value]]:
    """Return every value of the knobs that affect memory, except the baseline's."""
    effects: list[tuple[str, Value]] = []
    for name in space.choices:
        if name not in AT_ONCE and (name.startswith("workload.") or KNOBS[name].memory):
            values = space.legal(name)
            baseline_value = space.baseline.get(name, values[0])
            effects += [(name, v) for v in values if repr(v) != repr(baseline_value)]
    return [*effects, (_WORKERS, not _works(space.baseline))]


def _has(config: Config, name: str, value: Value) -> bool:
    if name == _WORKERS:
        return _works(config) == value
    return repr(config.get(name)) == repr(value)


def _works(config: Config) -> bool:
    return workers_of(config) > 0
