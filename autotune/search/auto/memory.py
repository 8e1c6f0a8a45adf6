"""How much device memory a configuration will take.

Weights, gradients and optimizer state do not depend on the batch, activations grow with it: the peak is a line in the
batch, one for each combination of the other knobs that it depends on. From two batches on a line is known, with an
upper bound; from one only that its constant part is not negative, or what the lines of other combinations have shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from autotune.records import Config
from autotune.space import KNOBS

#: Of the capacity, what stays free: a peak that would leave less is not tried.
HEADROOM = 0.03
#: What a prediction is off by where nothing is known about it, and beyond the largest batch seen for each doubling.
MARGIN, MARGIN_PER_DOUBLING = 0.02, 0.02
#: A combination of which nothing was seen takes at most so many times what its nearest relative takes.
RELATIVE = 1.5
#: From one batch of a combination alone: its constant part is no smaller a share of the peak than elsewhere, less this
#: over the number of combinations that have shown theirs.
DOUBT = 0.5
#: Each time a prediction turned out too low, all bounds become wider by this.
SURPRISE = 1.1

_MEMORY = tuple(name for name, knob in KNOBS.items() if knob.memory and name != "batch_size")
_Part = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Bound:
    """What is predicted for a configuration, in bytes.

    Attributes:
        expected: ``None`` where one batch alone, or a relative, does not say.
        upper: it takes no more than this, as far as can be told.
    """

    expected: float | None
    upper: float


@dataclass(frozen=True)
class _Line:
    constant: float
    slope: float
    #: The largest relative distance of an observation from it.
    scatter: float

    def at(self, batch: int) -> float:
        return self.constant + self.slope * batch


class MemoryModel:
    """Peaks seen, and what they say of others.

    Args:
        capacity_bytes: what a training may use; ``None``: nothing is ruled out.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self._seen: dict[_Part, dict[int, list[int]]] = {}
        self._widening = 1.0

    def learn(self, config: Config, peak_bytes: int) -> None:
        """A training took so much."""
        self._seen.setdefault(part(config), {}).setdefault(_batch(config), []).append(peak_bytes)

    def learn_oom(self, config: Config) -> None:
        """A training did not fit; if that was not foreseen, the bounds are too narrow."""
        if self.fits(config):
            self._widening *= SURPRISE

    def batches(self, config: Config) -> list[int]:
        """Batches seen of the same combination, ascending."""
        return sorted(self._seen.get(part(config), {}))

    def fits(self, config: Config) -> bool:
        """Whether it surely fits. With no limit, or before anything was seen, everything is taken to."""
        if self.capacity_bytes is None:
            return True
        bound = self.bound(config)
        return bound is None or bound.upper <= (1 - HEADROOM) * self.capacity_bytes

    def bound(self, config: Config) -> Bound | None:
        """What is predicted; ``None`` before anything was seen."""
        if not self._seen:
            return None
        own = self._seen.get(part(config))
        if own is not None:
            return self._from(own, _batch(config))
        mine = dict(part(config))
        distance = {other: len(set(mine.items()) ^ set(other)) for other in self._seen}
        relatives = [self._seen[other] for other, d in distance.items() if d == min(distance.values())]
        bounds = [self._from(seen, _batch(config)) for seen in relatives]
        return Bound(None, RELATIVE * max(b.upper for b in bounds))

    def _from(self, seen: dict[int, list[int]], batch: int) -> Bound:
        if batch in seen:
            return Bound(fmean(seen[batch]), self._widening * (1 + MARGIN) * max(seen[batch]))
        if len(seen) > 1:
            line = _line(seen)
            beyond = max(0.0, math.log2(batch / max(seen)))
            margin = MARGIN + line.scatter + MARGIN_PER_DOUBLING * beyond
            return Bound(line.at(batch), self._widening * (1 + margin) * line.at(batch))
        (only, peaks) = next(iter(seen.items()))
        peak = max(peaks)
        if batch < only:
            return Bound(None, self._widening * (1 + MARGIN) * peak)
        constant = self._constant_share(only) * peak
        upper = constant + (peak - constant) * batch / only
        return Bound(None, self._widening * (1 + MARGIN) * upper)

    def _constant_share(self, batch: int) -> float:
        """Of the peak at a batch, what is surely constant."""
        lines = [_line(seen) for seen in self._seen.values() if len(seen) > 1]
        if not lines:
            return 0.0
        return (1 - DOUBT / len(lines)) * min(line.constant / line.at(batch) for line in lines)


def part(config: Config) -> _Part:
    """What the memory of a configuration depends on besides the batch.

    Without workers it is the training process that holds the samples of a batch while it is made.
    """
    own = [(n, repr(v)) for n, v in config.items() if n in _MEMORY or n.startswith("workload.")]
    return tuple(sorted([*own, ("workers", repr(int(config.get("num_workers", 0)) > 0))]))


def _batch(config: Config) -> int:
    return int(config["batch_size"])


def _line(seen: dict[int, list[int]]) -> _Line:
    """Least squares with neither part negative; each batch weighs by one over its square, so that all are met to the
    same percentage."""
    points = [(b, fmean(peaks)) for b, peaks in seen.items()]
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    x = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
    y = sum(w * p for w, (_, p) in zip(weights, points, strict=True)) / total
    across = sum(w * (b - x) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    slope = sum(w * (b - x) * (p - y) for w, (b, p) in zip(weights, points, strict=True)) / across
    slope = min(max(slope, 0.0), y / x)
    constant = y - slope * x
    scatter = max(abs(p / (constant + slope * b) - 1) for b, peaks in seen.items() for p in peaks)
    return _Line(constant, slope, scatter)
