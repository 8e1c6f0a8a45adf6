"""How much device memory a configuration will take.

Weights, gradients and optimizer state do not depend on the batch, activations grow with it: the peak is a line in the
batch. What a knob does to the line's constant part and to its slope adds up, as the effects of `features` do, so that
every trial teaches all combinations a little (Bayesian linear regression, see `linear`). Peaks scatter; a configuration
fits where not even a peak at the upper end of what is expected would leave less than the headroom.

What was seen of the same combination bounds it besides, whatever the model says: a constant part is not negative, so
that twice the batch takes at most twice as much.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.knobs import KNOBS, Knob
from autotune.knobs.num_workers import workers_of
from autotune.records import Config, Value
from autotune.samplers.auto.features import Array, Bools
from autotune.samplers.auto.linear import Fit, Prior, Regression
from autotune.space import Space, memory_part

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
#: The effect of a value on the constant part, in units of the baseline's peak: mean and standard deviation. Its effect
#: on the slope stands in the knob's file.
_ON_CONSTANT = (0.0, 0.08)

#: Whether there are any, as an effect beside those of the knobs: without them the training process holds the samples.
_WORKERS = "workers"

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


class Table:
    """Configurations as the model sees them, and what of them was seen.

    Attributes:
        effects: ``(N, E)``, the first is the constant. batches: ``(N,)``.
        most: bytes that each takes at the most by other batches of the same combination, but for their scatter.
        ran: the largest batch of the same combination that ran. Both ``(N,)``.
    """

    def __init__(self, effects: Array, configs: Sequence[Config]) -> None:
        self.effects = effects
        self.batches = np.array([_batch(c) for c in configs], dtype=np.float64)
        self.most = np.full(len(configs), np.inf)
        self.ran = np.zeros(len(configs))
        #: How many of all peaks were entered.
        self.entered = 0
        self._places: dict[Part, list[int]] = {}
        for i, config in enumerate(configs):
            self._places.setdefault(part(config), []).append(i)

    @property
    def parts(self) -> Collection[Part]:
        """The combinations among them."""
        return self._places.keys()

    def enter(self, name: Part, peaks: dict[int, int]) -> None:
        """One combination's largest peak by batch: a larger one takes no less, and a smaller one no less than in
        proportion."""
        rows = self._places.get(name)
        if rows is not None:
            batches = self.batches[rows]
            self.most[rows] = np.min([peak * np.maximum(1.0, batches / b) for b, peak in peaks.items()], axis=0)
            self.ran[rows] = max(peaks)


class MemoryModel:
    """Peaks seen, and what they say of others.

    Args:
        capacity_bytes: what a training may use; ``None``: nothing is ruled out.
    """

    def __init__(self, space: Space, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self._effects = _effects(space)
        #: The largest peak of each batch of each combination.
        self._seen: dict[Part, dict[int, int]] = {}
        #: The combination of each peak, in order.
        self._entries: list[Part] = []
        self._regression = Regression(self._prior(), NOISES)
        #: Bytes and batch of the first peak: the units of the regression.
        self._unit: tuple[int, int] | None = None
        self._fitted: Fit | None = None

    def learn(self, config: Config, peak_bytes: int) -> None:
        """A training took so much."""
        self._unit = self._unit or (max(1, peak_bytes), _batch(config))
        seen = self._seen.setdefault(part(config), {})
        seen[_batch(config)] = max(peak_bytes, seen.get(_batch(config), 0))
        self._entries.append(part(config))
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
        return bool(self.fit(self.table([config]))[0])

    def may_fit(self, config: Config) -> bool:
        """Whether at least what is expected of it leaves the headroom."""
        if self.capacity_bytes is None or self._unit is None:
            return True
        means, _, _ = self._predicted(self.table([config]))
        return bool(means[0] * self._unit[0] <= (1 - HEADROOM) * self.capacity_bytes)

    def table(self, configs: Sequence[Config]) -> Table:
        """Many configurations, with what does not change about them."""
        rows = [[1.0, *(float(_has(c, name, value)) for name, value in self._effects)] for c in configs]
        effects = np.array(rows, dtype=np.float64).reshape(len(configs), 1 + len(self._effects))
        return Table(effects, configs)

    def fit(self, table: Table) -> Bools:
        """Which of many surely fit, ``(N,)``."""
        if self.capacity_bytes is None or self._unit is None:
            return np.ones(len(table.batches), dtype=bool)
        uppers = self._uppers(table)
        # What ran once runs again, and a smaller batch of it too.
        found: Bools = (uppers <= (1 - HEADROOM) * self.capacity_bytes) | (table.batches <= table.ran)
        return found

    def bound(self, config: Config) -> Bound | None:
        """What is predicted; ``None`` before anything was seen."""
        if self._unit is None:
            return None
        table = self.table([config])
        means, sds, _ = self._predicted(table)
        expected = None if sds[0] > VAGUE * means[0] else self._unit[0] * float(means[0])
        return Bound(expected, float(self._uppers(table)[0]))

    def _predicted(self, table: Table) -> tuple[Array, Array, float]:
        """Means and standard deviations, ``(N,)`` in the regression's unit, and the scatter of one peak."""
        assert self._unit is not None
        if self._fitted is None:
            self._fitted = self._regression.fit(PEAK_SD)
        grown = table.effects * (table.batches / self._unit[1])[:, None]
        means, sds = self._fitted.predict(np.hstack([table.effects, grown]))
        return np.maximum(means, 0.0), sds, self._fitted.noise_sd

    def _uppers(self, table: Table) -> Array:
        assert self._unit is not None
        means, sds, scatter = self._predicted(table)
        # Of a small table that is new, what it asks for; else what was entered since.
        new = self._entries[table.entered :]
        for name in table.parts if len(table.parts) < len(new) else dict.fromkeys(new):
            if name in self._seen:
                table.enter(name, self._seen[name])
        table.entered = len(self._entries)
        by_model = self._unit[0] * (means + UPPER_Z * np.hypot(sds, scatter * means))
        found: Array = np.minimum(by_model, (1 + UPPER_Z * scatter) * table.most)
        return found

    def _add(self, config: Config, peak_bytes: float, weight: float) -> None:
        assert self._unit is not None
        peak = peak_bytes / self._unit[0]
        table = self.table([config])
        row = np.concatenate([table.effects[0], table.effects[0] * (table.batches[0] / self._unit[1])])
        # Peaks scatter by a percentage.
        self._regression.add(row, peak, weight / peak**2)
        self._fitted = None

    def _prior(self) -> Prior:
        expected = [KNOBS[name].memory_slope if name in KNOBS else Knob.memory_slope for name, _ in self._effects]
        slopes = [(e.mean, e.sd) for e in expected]
        both = [_PARTS, *[_ON_CONSTANT] * len(self._effects), _PARTS, *slopes]
        mean, sd = (np.array(values, dtype=np.float64) for values in zip(*both, strict=True))
        # None is a correction of another.
        return Prior(mean, sd, np.zeros(len(both), dtype=bool))


def part(config: Config) -> Part:
    """What the memory of a configuration depends on besides the batch.

    Without workers it is the training process that holds the samples of a batch while it is made.
    """
    return (*memory_part(config), (_WORKERS, repr(_works(config))))


def _effects(space: Space) -> list[tuple[str, Value]]:
    """Every value of the knobs that memory depends on, but the baseline's own."""
    found: list[tuple[str, Value]] = []
    for name in space.choices:
        if name != "batch_size" and (name.startswith("workload.") or KNOBS[name].memory):
            values = space.legal(name)
            own = space.baseline.get(name, values[0])
            found += [(name, v) for v in values if repr(v) != repr(own)]
    return [*found, (_WORKERS, not _works(space.baseline))]


def _has(config: Config, name: str, value: Value) -> bool:
    if name == _WORKERS:
        return _works(config) == value
    return repr(config.get(name)) == repr(value)


def _works(config: Config) -> bool:
    return workers_of(config) > 0


def _batch(config: Config) -> int:
    return int(config["batch_size"])
