"""The models of the rate after some trials: what they predict (see `rates`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.base.records import Config
from autotune.samplers.auto.features import Array, Bools
from autotune.samplers.auto.linear import Fit
from autotune.samplers.auto.pool import Pool
from autotune.samplers.auto.shown import Shown, corrections
from autotune.samplers.auto.worlds import Worlds, combined
from autotune.space import simplicity

#: Prior standard deviation of the error of the combined sides, with and without workers; and the number of launches
#: that the prior of their scatter counts for. That prior is half of a launch's noise, which both sides share.
REST_SD, REST_DEGREES = 0.08, 4
#: Minimum weight of a trial's own figure relative to the models' prediction.
LEAST_OWN = 0.1


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


@dataclass(frozen=True)
class Rest:
    """The error of the combined sides: one mean with workers, one without, and a scatter."""

    left: Array
    mean: Array
    sd: Array
    noise_sd: float

    @classmethod
    def of(cls, left: Array, overlapping: Bools, noise_sd: float) -> Rest:
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
    rest: Rest
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

    def expected(self, pool: Pool) -> list[Observation]:
        """Return what trials of these configurations are expected to show."""
        rates = self.mean(pool)
        if self.sides is None:
            return [Observation(config, float(rate)) for config, rate in zip(pool.configs, rates, strict=True)]
        rows = zip(pool.configs, rates, self.computing(pool), self.loading(pool), strict=True)
        return [Observation(config, *map(float, figures)) for config, *figures in rows]

    def computing(self, pool: Pool) -> Array:
        """Return the expected logarithmic rates of the device alone, ``(N,)``.

        Raises:
            ValueError: no trial measured the sides separately.
        """
        if self.sides is None:
            raise ValueError("nothing is known of the device alone")
        return _mean(pool.device, self.sides.device, self.sides.shown, pool.parts)

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
        device = self.computing(pool)
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
