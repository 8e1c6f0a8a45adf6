"""Predicts how fast a configuration trains, from the trials so far.

*The bottleneck model.* Every trial measures separately what its device and what its loader can do. Each side is a
linear model of its own knobs (`features`), and both together give the rate: while workers load, the device computes, so
the slower side sets the pace (the roofline argument: Williams, Waterman & Patterson, CACM 52, 2009, with the loader in
the role of memory); without workers their times add. The remaining difference from the observed rate is learnt as well.
So each trial informs both sides, and a side that is not the limit is not explored.

*The plain model* is the same kind of linear model, of the rate itself in all knobs. It makes no assumption about the
bottleneck.

The models are weighted by how well each predicts every trial from the others (pseudo-BMA: Yao, Vehtari, Simpson &
Gelman, "Using stacking to average Bayesian predictive distributions", Bayesian Analysis 13, 2018). The plain model
takes over if the bottleneck model fails because loader and device share the cores, or if the sides cannot be told
apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.knobs.num_workers import workers_of
from autotune.records import Config, Side
from autotune.samplers.auto.features import DEVICE, LOADER, WHOLE, Array, Bools, Features
from autotune.samplers.auto.linear import Fit, Prior, Regression, log_density
from autotune.samplers.auto.pool import Pool
from autotune.samplers.auto.shown import LACK_SD, Shown, corrections
from autotune.samplers.auto.worlds import Worlds, combined
from autotune.space import Space, delivery_part, device_part, key, simplicity

#: Prior odds of the bottleneck model against the plain model.
PRIOR_ODDS = 4.0
#: Prior standard deviation of the error of the combined sides, with and without workers; and the number of launches
#: that the prior of their scatter counts for. That prior is half of a launch's noise, which both sides share.
REST_SD, REST_DEGREES = 0.08, 4
#: Maximum change of the log odds between the models by a single trial, because a trial may be disturbed; and the
#: maximum number of trials that all of them count for, so that a small difference does not become a certainty.
MOST_EVIDENCE, MOST_TRIALS = 3.0, 12
#: Minimum weight of a trial's own figure relative to the models' prediction.
LEAST_OWN = 0.1
#: The models are compared on this number of most recent trials.
RECENT = 64
#: What a heat shows of a configuration differs from its rate in another launch by about this, however precise it is.
HEAT_SD = 0.015
#: Where loading takes at most this fraction of the time, what a heat shows of the device holds for the training, too.
MOSTLY_DEVICE = 0.25


@dataclass(frozen=True)
class Observation:
    """The information one trial gives about its configuration's rate.

    Attributes:
        log_rate: natural logarithm of the score. log_device, log_loader: of what each side can do; ``None`` if unknown.
        weight: 1 for a complete trial, less for one that was ended early.
    """

    config: Config
    log_rate: float
    log_device: float | None = None
    log_loader: float | None = None
    weight: float = 1.0

    @property
    def waits(self) -> float:
        """Fraction of the time that is not the device's; 0 if it is not known."""
        return 0.0 if self.log_device is None else 1 - math.exp(min(0.0, self.log_rate - self.log_device))


class RateModel:
    """The bottleneck model and the plain model of one space.

    Args:
        splits: scores are rates, so that a trial's two sides are informative.

    Attributes:
        seen: the observations in order. belief: in the bottleneck model, 0 to 1, as of the last fit.
    """

    def __init__(self, space: Space, *, splits: bool = True) -> None:
        self._features = Features(space, DEVICE), Features(space, LOADER), Features(space, WHOLE)
        self._device, self._loader, self._whole = (Regression(Prior(f.mean, f.sd, f.fine)) for f in self._features)
        self._splits = splits
        self.seen: list[Observation] = []
        self._rows = self.pool([])
        self._split: list[int] = []
        #: What heats have shown of the device, of the loader, and of the whole training.
        self._on_device: list[Shown] = []
        self._on_loader: list[Shown] = []
        self._in_whole: list[Shown] = []
        self.belief = PRIOR_ODDS / (1 + PRIOR_ODDS) if splits else 0.0

    def pool(self, configs: Sequence[Config]) -> Pool:
        """Compute the features of configurations."""
        device, loader, whole = self._features
        workers = np.array([float(workers_of(c)) for c in configs])
        batches = np.array([float(c.get("batch_size", 0)) for c in configs])
        parts = [key(device_part(c)) for c in configs]
        loaders = [key(delivery_part(c)) for c in configs]
        rows = device.of(configs), loader.of(configs), whole.of(configs)
        return Pool(list(configs), *rows, workers, batches, parts, loaders)

    def add(self, seen: Observation) -> None:
        """Learn from one trial."""
        row = self.pool([seen.config])
        self._whole.add(row.whole[0], seen.log_rate, seen.weight)
        if self._splits and seen.log_device is not None and seen.log_loader is not None:
            self._device.add(row.device[0], seen.log_device, seen.weight)
            self._loader.add(row.loader[0], seen.log_loader, seen.weight)
            self._split.append(len(self.seen))
        self.seen.append(seen)
        self._rows = Pool.joined([self._rows, row])

    def add_heat(self, side: Side, configs: Sequence[Config], log_rates: Sequence[float], sds: Sequence[float]) -> None:
        """Learn the rates of one side from configurations that took turns. Only their differences count.

        Args:
            log_rates: natural logarithms of rates, or of ratios to any one of them. sds: the standard deviations.
        """
        rows = self.pool(configs)
        seen, sd = np.array(log_rates), np.hypot(np.array(sds), HEAT_SD)
        # No sum of effects says exactly what a configuration does.
        loose = np.hypot(sd, LACK_SD)
        if side == "loader":
            self._loader.add_contrasts(rows.loader, seen, loose)
            self._on_loader.append(Shown(tuple(rows.loaders), rows.loader, seen, sd))
            return
        self._device.add_contrasts(rows.device, seen, loose)
        self._on_device.append(Shown(tuple(rows.parts), rows.device, seen, sd))
        # What loading takes is added to the time of each, as a part of the time of the fastest trial.
        loading = self._loading()
        times = (1 - loading) * np.exp(-(seen - seen.mean())) + loading
        if loading / times.min() <= MOSTLY_DEVICE:
            self._whole.add_contrasts(rows.whole, -np.log(times), loose)
            self._in_whole.append(Shown(tuple(rows.parts), rows.whole, -np.log(times), sd))

    def _loading(self) -> float:
        """Return the fraction of time that loading takes, as the fastest trial showed it; 1 if it is not known."""
        split = [self.seen[i] for i in self._split]
        fastest = max(split, key=lambda o: o.log_rate, default=None)
        if fastest is None or fastest.log_device is None:
            return 1.0
        return fastest.waits

    def fit(self, noise_sd: float, *, doubt: float | None = None) -> Fitted:
        """Fit both models to all observations, at least one.

        Args:
            noise_sd: of the logarithm of one launch's rate.
            doubt: scale the prior's standard deviations by this.
        """
        rows = self._rows
        whole = self._whole.fit(noise_sd, doubt=doubt)
        if not self._split:
            self.belief = 0.0
            return Fitted(self.seen, rows, whole, None, 0.0, noise_sd, self._in_whole)
        device, loader = self._device.fit(noise_sd, doubt=doubt), self._loader.fit(noise_sd, doubt=doubt)
        recent = np.array(self._split[-RECENT:])
        told = [self.seen[i] for i in recent]
        rates = np.array([o.log_rate for o in told])
        weights = np.array([o.weight for o in told])
        devices = np.array([o.log_device for o in told], dtype=np.float64)
        loaders = np.array([o.log_loader for o in told], dtype=np.float64)
        some = rows[recent]
        rest = _Rest.of(rates - combined(devices, loaders, some.workers), some.workers > 0, noise_sd)
        plain = log_density(rates, *whole.left_out(some.whole, rates, weights))
        # The leave-one-out predictions of the two sides, combined.
        on_device, device_sd = device.left_out(some.device, devices, weights)
        on_loader, loader_sd = loader.left_out(some.loader, loaders, weights)
        together = combined(on_device, on_loader, some.workers)
        step = 1e-4
        share = (combined(on_device + step, on_loader, some.workers) - together) / step
        spread = np.hypot(share * device_sd, (1 - share) * loader_sd)
        mean, sd = rest.left_out(some.workers > 0)
        both = log_density(rates, together + mean, np.hypot(spread, np.hypot(sd, rest.noise_sd)))
        evidence = np.clip(both - plain, -MOST_EVIDENCE, MOST_EVIDENCE)
        odds = math.log(PRIOR_ODDS) + float(evidence.mean()) * min(len(evidence), MOST_TRIALS)
        self.belief = 1 / (1 + math.exp(-odds))
        sides = Sides(device, loader, rest, self._on_device, self._on_loader)
        return Fitted(self.seen, rows, whole, sides, self.belief, noise_sd, self._in_whole)


@dataclass(frozen=True)
class _Rest:
    """The error of the combined sides: one mean with workers, one without, and a scatter."""

    left: Array
    mean: Array
    sd: Array
    noise_sd: float

    @classmethod
    def of(cls, left: Array, overlapping: Bools, noise_sd: float) -> _Rest:
        counts = np.array([(~overlapping).sum(), overlapping.sum()], dtype=np.float64)
        sums = np.array([left[~overlapping].sum(), left[overlapping].sum()])
        means = sums / np.maximum(counts, 1)
        squares = float(((left - means[overlapping.astype(int)]) ** 2).sum())
        noise = math.sqrt((REST_DEGREES * (noise_sd / 2) ** 2 + squares) / (REST_DEGREES + len(left)))
        precision = 1 / REST_SD**2 + counts / noise**2
        return cls(left, sums / noise**2 / precision, np.sqrt(1 / precision), noise)

    def left_out(self, overlapping: Bools) -> tuple[Array, Array]:
        """Return the leave-one-out mean and standard deviation for each of the fitted trials."""
        mean, sd = self.of_rows(overlapping)
        precision = 1 / sd**2 - 1 / self.noise_sd**2
        return (mean / sd**2 - self.left / self.noise_sd**2) / precision, np.sqrt(1 / precision)

    def of_rows(self, overlapping: Bools) -> tuple[Array, Array]:
        """Return mean and standard deviation for each, ``(N,)``."""
        index = overlapping.astype(int)
        return self.mean[index], self.sd[index]


@dataclass(frozen=True)
class Sides:
    """The bottleneck model after the data."""

    device: Fit
    loader: Fit
    rest: _Rest
    shown: Sequence[Shown] = ()
    shown_loader: Sequence[Shown] = ()


def _mean(rows: Array, fit: Fit, shown: Sequence[Shown], parts: Sequence[str]) -> Array:
    """Return the expected logarithmic rates by one model, ``(N,)``."""
    effects = fit.mean[:, None]
    found: Array = (rows @ effects + corrections(shown, effects, parts))[:, 0]
    return found


@dataclass(frozen=True)
class Fitted:
    """Both models after some trials.

    Attributes:
        rows: features of the configurations seen. belief: in the bottleneck model, 0 to 1.
        sides: ``None`` if no trial measured the sides separately. in_whole: what heats have shown of the whole
            training.
    """

    seen: Sequence[Observation]
    rows: Pool
    whole: Fit
    sides: Sides | None
    belief: float
    noise_sd: float
    in_whole: Sequence[Shown] = ()

    def shown(self, pool: Pool) -> Bools:
        """Return of which configurations a heat has shown the device's part, ``(N,)``."""
        known = set() if self.sides is None else {part for heat in self.sides.shown for part in heat.parts}
        return np.array([part in known for part in pool.parts], dtype=bool)

    def loading(self, pool: Pool) -> Array:
        """Return the expected logarithmic rates of the loader alone, ``(N,)``.

        Raises:
            ValueError: no trial measured the sides separately.
        """
        if self.sides is None:
            raise ValueError("nothing is known of the loader alone")
        return _mean(pool.loader, self.sides.loader, self.sides.shown_loader, pool.loaders)

    def worlds(self, draws: int, rng: np.random.Generator) -> Worlds:
        """Draw effects, from each model in proportion to its belief."""
        of_sides = round(self.belief * draws) if self.sides is not None else 0
        plain = self.whole.draw(rng.standard_normal((len(self.whole.mean), draws - of_sides)))
        if self.sides is None:
            return Worlds(plain, in_whole=self.in_whole)
        s = self.sides
        device = s.device.draw(rng.standard_normal((len(s.device.mean), draws)))
        loader = s.loader.draw(rng.standard_normal((len(s.loader.mean), draws)))
        rest = s.rest.mean[:, None] + s.rest.sd[:, None] * rng.standard_normal((2, draws))
        return Worlds(plain, device, loader, rest, self.in_whole, s.shown, s.shown_loader)

    def mean(self, pool: Pool) -> Array:
        """Return the expected logarithmic rates, ``(N,)``."""
        plain = _mean(pool.whole, self.whole, self.in_whole, pool.parts)
        if self.sides is None or self.belief == 0:
            return plain
        s = self.sides
        device = _mean(pool.device, s.device, s.shown, pool.parts)
        together = combined(device, self.loading(pool), pool.workers)
        together += s.rest.of_rows(pool.workers > 0)[0]
        # See `Worlds`: without workers the two sides are all there is.
        belief = np.where(pool.workers > 0, self.belief, 1.0)
        found: Array = belief * together + (1 - belief) * plain
        capped: Array = np.minimum(found, device)
        return capped

    @cached_property
    def own_share(self) -> Array:
        """Weight of each trial's own figure relative to the models' prediction, 0 to 1, ``(N,)``.

        The scatter around the models is partly launch noise and partly what the models do not capture.
        """
        scatter = self.whole if self.sides is None or self.belief < 0.5 else self.sides.device
        total = max(self.noise_sd, scatter.noise_sd) ** 2
        share = max(LEAST_OWN, (total - self.noise_sd**2) / total)
        return share * np.array([o.weight for o in self.seen])

    def ranking(self, among: Sequence[int], baseline: Config, least: float) -> list[int]:
        """Sort some of the observations, given by number, most promising first.

        Args:
            least: of those that are expected to be slower than the first by no more than this, in natural logarithms,
                the simplest comes first.
        """
        believed = self.mean(self.rows)
        believed += self.own_share * (np.array([o.log_rate for o in self.seen]) - believed)
        top = max((believed[i] for i in among), default=0.0) - least

        def order(i: int) -> tuple[object, ...]:
            first = simplicity(self.seen[i].config, baseline, None) if believed[i] >= top else ()
            return believed[i] < top, first, -believed[i]

        return sorted(among, key=order)

    def gains(self, best: int, pool: Pool, draws: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return, for each configuration of a pool, its expected improvement over an observed one (in natural
        logarithms, never below zero) and its expected logarithmic rate, both ``(N,)``."""
        ahead, others = self.differences(best, pool, draws, rng)
        return np.maximum(0.0, ahead).mean(axis=1), others.mean(axis=1)

    def differences(
        self, best: int, pool: Pool, draws: int, rng: np.random.Generator, own: Array | None = None
    ) -> tuple[Array, Array]:
        """Return, for each configuration of a pool and each of a number of draws from the models, by how much it is
        faster than an observed one (in natural logarithms) and its logarithmic rate, both ``(N, draws)``.

        Args:
            own: see `Worlds.log_rates`.
        """
        worlds = self.worlds(draws, rng)
        top = worlds.log_rates(self.rows[best : best + 1])
        top += self.own_share[best] * (self.seen[best].log_rate - top)
        others = worlds.log_rates(pool, own)
        return others - top, others
