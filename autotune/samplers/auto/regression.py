"""The sampler's model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.base.records import Config
from autotune.samplers.auto.features import Array, Bools, Pool, Shown, Worlds, combined, corrections
from autotune.space import simplicity

# Bayesian linear regression in closed form.
#
# The prior of the effects and the noise are normal, and so is the posterior (Bishop, Pattern Recognition and Machine
# Learning, 2006, 3.3). The noise level and factors that widen or narrow the prior's standard deviations are chosen from
# a grid of values by maximum evidence (3.5).

#: Factors tried on the prior standard deviations of main effects and of fine effects, and on the known launch noise.
STRONG, FINE, NOISES = (1.0, 0.5, 2.0), (1.0, 0.3, 0.1, 0.03), (1.0, 2.0, 4.0, 8.0)
#: With fewer observations the prior is used unscaled.
FEWEST = 3
#: From STEADY observations on, the factors are updated only every EVERY observations, using at most ENOUGH of them and
#: all contrasts.
STEADY, EVERY, ENOUGH = 8, 4, 128


@dataclass(frozen=True)
class Prior:
    """The prior distribution of the effects.

    Attributes:
        mean, sd: of each effect, shape ``(F,)``; the first is the constant.
        fine: marks small corrections, ``(F,)``: most are zero, and the more there are, the smaller each is
            expected to be.
    """

    mean: Array
    sd: Array
    fine: Bools

    def scaled(self, strong: float, fine: float) -> Array:
        """Scale the standard deviations. The constant's stays wide."""
        factors = np.where(self.fine, fine, strong)
        factors[0] = 1.0
        scaled: Array = factors * self.sd
        return scaled


@dataclass(frozen=True)
class Fit:
    """The posterior distribution of the effects.

    Attributes:
        mean: shape ``(F,)``. root: a square root of the covariance, ``(F, F)``.
        noise_sd: standard deviation of one observation around the sum of the effects, including lack of fit.
    """

    mean: Array
    root: Array
    noise_sd: float

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation for rows ``(N, F)``, without observation noise."""
        return rows @ self.mean, np.sqrt(((rows @ self.root) ** 2).sum(axis=1))

    def draw(self, normals: Array) -> Array:
        """Draw all effects, ``(F, S)``, from standard normals of that shape."""
        drawn: Array = self.mean[:, None] + self.root @ normals
        return drawn

    def left_out(self, rows: Array, seen: Array, weights: Array) -> tuple[Array, Array]:
        """Return the leave-one-out predictions of fitted observations: mean and standard deviation, each ``(N,)``,
        including noise (Rasmussen & Williams, Gaussian Processes, 2006, 5.4.2)."""
        precision = weights / self.noise_sd**2
        spread = ((rows @ self.root) ** 2).sum(axis=1)
        remaining = np.maximum(1 - spread * precision, 1e-6)
        return seen - (seen - rows @ self.mean) / remaining, np.sqrt(1 / (precision * remaining))


class Regression:
    """Effects of one kind, learnt one observation at a time.

    Args:
        noises: factors on the known noise; the most likely one is used.
    """

    def __init__(self, prior: Prior, noises: Sequence[float] = NOISES) -> None:
        self._prior = prior
        self._noises = noises
        width = len(prior.mean)
        self._square = np.zeros((width, width))
        self._product = np.zeros(width)
        #: The same of contrasts, whose noise is known.
        self._exact_square = np.zeros((width, width))
        self._exact_product = np.zeros(width)
        self._first: list[_Row] = []
        self._added = 0
        #: The last factors chosen: number of observations, noise, and the resulting standard deviations and noise.
        self._found: tuple[int, float, Array, float] | None = None

    def add(self, row: Array, seen: float, weight: float) -> None:
        """Add one observation.

        Args:
            row: ``(F,)``. weight: inverse of its variance, in units of the noise variance.
        """
        residual = seen - float(row @ self._prior.mean)
        self._square += weight * np.outer(row, row)
        self._product += weight * residual * row
        if self._added < ENOUGH:
            self._added += 1
            self._first.append(_Row(row, residual, 1 / weight, 0.0))

    def add_contrasts(self, rows: Array, seen: Array, sds: Array) -> None:
        """Add observations made together, of which only the differences count: all share one unknown offset, whose
        prior is flat.

        Args:
            rows: ``(N, F)``. seen: ``(N,)``. sds: the standard deviation of each, ``(N,)``, whatever the noise of
                other observations.
        """
        residuals = (seen - rows @ self._prior.mean) / sds
        # An orthonormal basis of the space orthogonal to the offset; the noise stays independent, with variance 1.
        basis = np.linalg.qr((1 / sds)[:, None], mode="complete")[0][:, 1:]
        rows, residuals = basis.T @ (rows / sds[:, None]), basis.T @ residuals
        self._exact_square += rows.T @ rows
        self._exact_product += rows.T @ residuals
        self._first += [_Row(row, float(residual), 0.0, 1.0) for row, residual in zip(rows, residuals, strict=True)]

    def believing(self, rows: Array, expected: Array) -> Regression:
        """Return a copy that treats expected values of further observations as observed, each with a weight of 1.

        This changes no expectation and makes the effects involved more certain. It has no influence on the choice of
        the factors.

        Args:
            rows: ``(N, F)``. expected: ``(N,)``.
        """
        updated = copy(self)
        updated._square = self._square + rows.T @ rows
        updated._product = self._product + rows.T @ (expected - rows @ self._prior.mean)
        return updated

    def fit(self, noise_sd: float, *, doubt: float | None = None) -> Fit:
        """Return the posterior.

        Args:
            noise_sd: the known noise of one observation.
            doubt: scale the prior's standard deviations by this instead of the most likely factors.
        """
        sd, noise = self._prior.sd, noise_sd
        if len(self._first) >= FEWEST:
            sd, noise = self._likeliest(noise_sd)
        if doubt is not None:
            sd = self._prior.scaled(doubt, doubt)
        square = self._square / noise**2 + self._exact_square
        product = self._product / noise**2 + self._exact_product
        inner = np.eye(len(sd)) + sd[:, None] * square * sd
        # inner = L Lᵀ, so that L⁻ᵀ is a root of its inverse.
        root = sd[:, None] * np.linalg.inv(np.linalg.cholesky(inner)).T
        return Fit(self._prior.mean + root @ (root.T @ product), root, noise)

    def _likeliest(self, noise_sd: float) -> tuple[Array, float]:
        """Maximize the evidence over standard deviations and noise, one factor at a time, twice."""
        count = len(self._first)
        # The factors change little.
        count -= count % EVERY if count >= STEADY else 0
        if self._found is not None and self._found[:2] == (count, noise_sd):
            return self._found[2:]
        sample = _Sample.of(self._prior, self._first[:count])
        strong, fine, noise = 1.0, 1.0, 1.0
        for _ in range(2):
            noise = max(self._noises, key=lambda n: sample.evidence(strong, fine, n * noise_sd))
            fine = max(FINE, key=lambda f: sample.evidence(strong, f, noise * noise_sd))
            strong = max(STRONG, key=lambda s: sample.evidence(s, fine, noise * noise_sd))
        self._found = count, noise_sd, self._prior.scaled(strong, fine), noise * noise_sd
        return self._found[2:]


@dataclass(frozen=True)
class _Row:
    """One observation.

    Attributes:
        effects: ``(F,)``. left: the observation minus the prior mean. variance: in units of the noise variance.
        known: variance added to that.
    """

    effects: Array
    left: float
    variance: float
    known: float


@dataclass(frozen=True)
class _Sample:
    """Observations represented by their covariances, since there are usually fewer of them than effects.

    Attributes:
        constant, strong, fine: contributions of the constant, the main and the fine effects, each ``(N, N)``.
        left: observations minus the prior mean. noise: variance of each in units of the noise variance, ``(N,)``.
        known: additional variance of each, ``(N,)``.
    """

    constant: Array
    strong: Array
    fine: Array
    left: Array
    noise: Array
    known: Array

    @classmethod
    def of(cls, prior: Prior, seen: Sequence[_Row]) -> _Sample:
        rows = np.array([row.effects for row in seen]).reshape(len(seen), len(prior.sd)) * prior.sd
        fine, strong = prior.fine, ~prior.fine
        strong[0] = False
        constant = rows[:, :1] @ rows[:, :1].T
        return cls(
            constant,
            rows[:, strong] @ rows[:, strong].T,
            rows[:, fine] @ rows[:, fine].T,
            np.array([row.left for row in seen]),
            np.array([row.variance for row in seen]),
            np.array([row.known for row in seen]),
        )

    def evidence(self, strong: float, fine: float, noise_sd: float) -> float:
        """Return the log marginal likelihood, up to a constant (Rasmussen & Williams 2006, 2.30)."""
        covariance = self.constant + strong**2 * self.strong + fine**2 * self.fine
        covariance += np.diag(noise_sd**2 * self.noise + self.known)
        factor = np.linalg.cholesky(covariance)
        solved = np.linalg.solve(factor, self.left)
        return float(-0.5 * solved @ solved - np.log(np.diag(factor)).sum())


def log_density(seen: Array, mean: Array, sd: Array) -> Array:
    """Return the log density of a normal distribution, up to a constant."""
    density: Array = -0.5 * ((seen - mean) / sd) ** 2 - np.log(sd)
    return density


# The predictions of the models of the rate after some trials (see `rates`).

#: Prior standard deviation of the error of the combined sides, with and without workers; and the number of launches
#: that the prior of their scatter counts for. That prior is half of a launch's noise, since both sides share the noise.
REST_SD, REST_DEGREES = 0.08, 4
#: Minimum weight of a trial's own figure relative to the models' prediction.
LEAST_OWN = 0.1


@dataclass(frozen=True)
class Observation:
    """The information one trial gives about its configuration's rate.

    Attributes:
        log_rate: natural logarithm of the score. log_device, log_loader: of the rate that each side can reach;
            ``None`` if unknown.
        weight: 1 for a complete trial, less for one that was ended early.
    """

    config: Config
    log_rate: float
    log_device: float | None = None
    log_loader: float | None = None
    weight: float = 1.0

    @property
    def waits(self) -> float:
        """Fraction of the time that is not the device's; 0 if unknown."""
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
        """Return the mean and standard deviation for each row, ``(N,)``."""
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
    """Return the logarithmic rates that one model expects, ``(N,)``."""
    effects = fit.mean[:, None]
    rates: Array = (rows @ effects + corrections(shown, effects, parts))[:, 0]
    return rates


@dataclass(frozen=True)
class Fitted:
    """Both models after some trials.

    Attributes:
        rows: features of the configurations seen. belief: in the bottleneck model, 0 to 1.
        sides: ``None`` if no trial measured the sides separately. in_whole: what heats have shown about the whole
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
        """Return for which configurations a heat has shown the device's part, ``(N,)``."""
        shown_parts = set() if self.sides is None else {part for heat in self.sides.shown for part in heat.parts}
        return np.array([part in shown_parts for part in pool.parts], dtype=bool)

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
        """Draw effects from each model in proportion to the belief in it."""
        of_sides = round(self.belief * draws) if self.sides is not None else 0
        plain = self.whole.draw(rng.standard_normal((len(self.whole.mean), draws - of_sides)))
        if self.sides is None:
            return Worlds(plain, in_whole=self.in_whole)
        sides = self.sides
        device = sides.device.draw(rng.standard_normal((len(sides.device.mean), draws)))
        loader = sides.loader.draw(rng.standard_normal((len(sides.loader.mean), draws)))
        rest = sides.rest.mean[:, None] + sides.rest.sd[:, None] * rng.standard_normal((2, draws))
        return Worlds(plain, device, loader, rest, self.in_whole, sides.shown, sides.shown_loader)

    def mean(self, pool: Pool) -> Array:
        """Return the expected logarithmic rates, ``(N,)``."""
        plain = _mean(pool.whole, self.whole, self.in_whole, pool.parts)
        if self.sides is None or self.belief == 0:
            return plain
        sides = self.sides
        device = self.computing(pool)
        together = combined(device, self.loading(pool), pool.overlaps)
        together += sides.rest.of_rows(pool.workers > 0)[0]
        # See `Worlds`: without workers, the times of the two sides add up to the whole.
        belief = np.where(pool.workers > 0, self.belief, 1.0)
        mixture: Array = belief * together + (1 - belief) * plain
        capped: Array = np.minimum(mixture, device)
        return capped

    @cached_property
    def own_share(self) -> Array:
        """Weight of each trial's own figure relative to the models' prediction, 0 to 1, ``(N,)``.

        The scatter around the models is partly launch noise and partly lack of fit.
        """
        scatter = self.whole if self.sides is None or self.belief < 0.5 else self.sides.device
        total = max(self.noise_sd, scatter.noise_sd) ** 2
        share = max(LEAST_OWN, (total - self.noise_sd**2) / total)
        return share * np.array([o.weight for o in self.seen])

    def ranking(self, among: Sequence[int], baseline: Config, least: float) -> list[int]:
        """Sort some of the observations, given by index, most promising first.

        Args:
            least: those expected to be slower than the fastest by no more than this, in natural logarithms, are sorted
                by simplicity.
        """
        believed = self.mean(self.rows)
        believed += self.own_share * (np.array([o.log_rate for o in self.seen]) - believed)
        threshold = max((believed[i] for i in among), default=0.0) - least

        def order(i: int) -> tuple[object, ...]:
            first = simplicity(self.seen[i].config, baseline, None) if believed[i] >= threshold else ()
            return believed[i] < threshold, first, -believed[i]

        return sorted(among, key=order)

    def gains(self, best: int, pool: Pool, draws: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return, for each configuration of a pool, its expected improvement over an observed one (in natural
        logarithms, never below zero) and its expected logarithmic rate, both ``(N,)``."""
        ahead, rates = self.differences(best, pool, draws, rng)
        return np.maximum(0.0, ahead).mean(axis=1), rates.mean(axis=1)

    def differences(
        self, best: int, pool: Pool, draws: int, rng: np.random.Generator, own: Array | None = None
    ) -> tuple[Array, Array]:
        """Return, for each configuration of a pool and each draw from the models, by how much it is faster than an
        observed one (in natural logarithms) and its logarithmic rate, both ``(N, draws)``.

        Args:
            own: see `Worlds.log_rates`.
        """
        worlds = self.worlds(draws, rng)
        best_rates = worlds.log_rates(self.rows[best : best + 1])
        best_rates += self.own_share[best] * (self.seen[best].log_rate - best_rates)
        rates = worlds.log_rates(pool, own)
        return rates - best_rates, rates
