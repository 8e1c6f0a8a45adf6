"""Predicts the rates of configurations, and figures other than the rate, by Bayesian linear regression."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.base.records import Config, Side
from autotune.knobs.num_workers import workers_of
from autotune.samplers.auto.features import (
    DEVICE,
    LACK_SD,
    LOADER,
    WHOLE,
    Array,
    Bools,
    Features,
    Pool,
    Shown,
    combined,
    corrections,
)
from autotune.space import Space, delivery_part, device_part, key, simplicity

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
        #: Of each observation: its effects, ``(F,)``, its value minus the prior mean, its variance in units of the
        #: noise variance, and the variance added to that.
        self._first: list[tuple[Array, float, float, float]] = []
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
            self._first.append((row, residual, 1 / weight, 0.0))

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
        self._first += [(row, float(residual), 0.0, 1.0) for row, residual in zip(rows, residuals, strict=True)]

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
        effects, left, variances, known = (np.array(values) for values in zip(*self._first[:count], strict=True))
        # Covariances, as there are usually fewer observations than effects: of the constant, and of main and fine ones.
        rows, is_main = effects * self._prior.sd, ~self._prior.fine
        is_main[0] = False
        parts = rows[:, :1], rows[:, is_main], rows[:, self._prior.fine]
        constant, main, fine_ones = (part @ part.T for part in parts)

        def evidence(strong: float, fine: float, noise: float) -> float:
            """Return the log marginal likelihood, up to a constant (Rasmussen & Williams 2006, 2.30)."""
            covariance = constant + strong**2 * main + fine**2 * fine_ones
            covariance += np.diag((noise * noise_sd) ** 2 * variances + known)
            factor = np.linalg.cholesky(covariance)
            solved = np.linalg.solve(factor, left)
            return float(-0.5 * solved @ solved - np.log(np.diag(factor)).sum())

        strong, fine, noise = 1.0, 1.0, 1.0
        for _ in range(2):
            noise = max(self._noises, key=lambda n: evidence(strong, fine, n))
            fine = max(FINE, key=lambda f: evidence(strong, f, noise))
            strong = max(STRONG, key=lambda s: evidence(s, fine, noise))
        self._found = count, noise_sd, self._prior.scaled(strong, fine), noise * noise_sd
        return self._found[2:]


def log_density(seen: Array, mean: Array, sd: Array) -> Array:
    """Return the log density of a normal distribution, up to a constant."""
    density: Array = -0.5 * ((seen - mean) / sd) ** 2 - np.log(sd)
    return density


# The predictions of the models of the rate after some trials.

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


def _log_rates(rows: Array, effects: Array, shown: Sequence[Shown], parts: Sequence[str]) -> Array:
    """Return the logarithmic rates by one model in draws of its effects ``(F, S)``, ``(N, S)``."""
    rates: Array = rows @ effects + corrections(shown, effects, parts)
    return rates


def _mean(rows: Array, fit: Fit, shown: Sequence[Shown], parts: Sequence[str]) -> Array:
    return _log_rates(rows, fit.mean[:, None], shown, parts)[:, 0]


@dataclass(frozen=True)
class Sides:
    """The bottleneck model after the data."""

    device: Fit
    loader: Fit
    rest: Rest
    shown: Sequence[Shown] = ()
    shown_loader: Sequence[Shown] = ()

    def computing(self, pool: Pool) -> Array:
        """Return the expected logarithmic rates of the device alone, ``(N,)``."""
        return _mean(pool.device, self.device, self.shown, pool.parts)

    def loading(self, pool: Pool) -> Array:
        """Return the expected logarithmic rates of the loader alone, ``(N,)``."""
        return _mean(pool.loader, self.loader, self.shown_loader, pool.loaders)


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
        rows = zip(pool.configs, rates, self.sides.computing(pool), self.sides.loading(pool), strict=True)
        return [Observation(config, *map(float, figures)) for config, *figures in rows]

    def drawn(self, draws: int, rng: np.random.Generator) -> Callable[..., Array]:
        """Draw effects from each model in proportion to the belief in it.

        Returns:
            ``log_rates(pool, own=None)``, the logarithmic rate of each configuration in each draw, ``(N, draws)``,
            whose second argument is the part of each configuration's rate that no sum of effects captures. Each draw
            assigns a rate to every configuration, so rates within one draw can be compared. No training is faster than
            its device alone, whatever a model says.
        """
        sides = self.sides
        of_sides = round(self.belief * draws) if sides is not None else 0
        # The plain model takes the place of the sides in the last P draws: (F, P), and (F, draws) for the sides.
        in_whole = self.whole.draw(rng.standard_normal((len(self.whole.mean), draws - of_sides)))
        if sides is not None:
            on_device = sides.device.draw(rng.standard_normal((len(sides.device.mean), draws)))
            on_loader = sides.loader.draw(rng.standard_normal((len(sides.loader.mean), draws)))
            rest = sides.rest.mean[:, None] + sides.rest.sd[:, None] * rng.standard_normal((2, draws))

        def log_rates(pool: Pool, own: Array | None = None) -> Array:
            plain = _log_rates(pool.whole, in_whole, self.in_whole, pool.parts)
            if own is not None:
                plain += own[:, of_sides:]
            if sides is None:
                return plain
            device = _log_rates(pool.device, on_device, sides.shown, pool.parts)
            if own is not None:
                device += own
            loader = _log_rates(pool.loader, on_loader, sides.shown_loader, pool.loaders)
            has_workers = pool.workers > 0
            rates = combined(device, loader, pool.overlaps) + rest[has_workers.astype(int)]
            # Without workers, the times of both sides add up to that of the training, whichever model is right. With
            # them, on one core, a loader that mostly waits may do better than that.
            rates[has_workers, of_sides:] = plain[has_workers]
            capped: Array = np.minimum(rates, device)
            return capped

        return log_rates

    def mean(self, pool: Pool) -> Array:
        """Return the expected logarithmic rates, ``(N,)``."""
        plain = _mean(pool.whole, self.whole, self.in_whole, pool.parts)
        if self.sides is None or self.belief == 0:
            return plain
        sides = self.sides
        device = sides.computing(pool)
        together = combined(device, sides.loading(pool), pool.overlaps)
        together += sides.rest.of_rows(pool.workers > 0)[0]
        # See `drawn`: without workers, the times of the two sides add up to the whole.
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
            own: see `drawn`.
        """
        log_rates = self.drawn(draws, rng)
        best_rates = log_rates(self.rows[best : best + 1])
        best_rates += self.own_share[best] * (self.seen[best].log_rate - best_rates)
        rates = log_rates(pool, own)
        return rates - best_rates, rates


# Predicts how fast a configuration trains, from the trials so far.
#
# *The bottleneck model.* Every trial measures separately what its device and what its loader can do. Each side is a
# linear model of its own knobs (`features`), and both together give the rate: while workers load, the device computes,
# so the slower side sets the pace (the roofline argument: Williams, Waterman & Patterson, CACM 52, 2009, with the
# loader in the role of memory); without workers, or where both share one core, their times add. The remaining
# difference from the observed rate is learnt as well. Each trial thus informs both sides, and a side that is not the
# bottleneck is not explored.
#
# *The plain model* is the same kind of linear model, of the rate itself in all knobs. It makes no assumption about the
# bottleneck.
#
# The models are weighted by how well each predicts every trial from the others (pseudo-BMA: Yao, Vehtari, Simpson &
# Gelman, "Using stacking to average Bayesian predictive distributions", Bayesian Analysis 13, 2018). The plain model
# takes over if the bottleneck model fails because loader and device share the cores, or if the sides cannot be told
# apart.

#: Prior odds of the bottleneck model against the plain model.
PRIOR_ODDS = 4.0
#: Maximum change of the log odds between the models by a single trial, because a trial may be disturbed; and the
#: maximum number of trials that they count for together, so that a small difference does not become a certainty.
MOST_EVIDENCE, MOST_TRIALS = 3.0, 12
#: The models are compared on this number of most recent trials.
RECENT = 64
#: A configuration's result in a heat differs from its rate in another launch by about this, however precise it is.
HEAT_SD = 0.015
#: If loading takes at most this fraction of the time, a heat's result for the device holds for the training as well.
MOSTLY_DEVICE = 0.25


class RateModel:
    """The bottleneck model and the plain model of one space.

    Args:
        splits: whether scores are rates, so that a trial's two sides are informative.

    Attributes:
        seen: the observations in order. belief: in the bottleneck model, 0 to 1, as of the last fit.
    """

    def __init__(self, space: Space, *, splits: bool = True) -> None:
        self._features = Features(space, DEVICE), Features(space, LOADER), Features(space, WHOLE)
        priors = [Prior(f.mean, f.sd, f.fine) for f in self._features]
        #: Of the effects on the rate of the whole training.
        self.prior = priors[2]
        self._device, self._loader, self._whole = map(Regression, priors)
        self._splits = splits
        self._overlaps = space.overlaps
        self.seen: list[Observation] = []
        self._rows = self.pool([])
        self._split: list[int] = []
        #: What heats have shown about the device, the loader, and the whole training.
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
        return Pool(list(configs), *rows, workers, workers * self._overlaps > 0, batches, parts, loaders)

    def add(self, seen: Observation) -> None:
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
        # No sum of effects predicts a configuration exactly.
        sum_sds = np.hypot(sd, LACK_SD)
        if side == "loader":
            self._loader.add_contrasts(rows.loader, seen, sum_sds)
            self._on_loader.append(Shown(tuple(rows.loaders), rows.loader, seen, sd))
            return
        self._device.add_contrasts(rows.device, seen, sum_sds)
        self._on_device.append(Shown(tuple(rows.parts), rows.device, seen, sd))
        # The loading time, a fraction of the fastest trial's time, is added to the time of each.
        loading = self._loading()
        times = (1 - loading) * np.exp(-(seen - seen.mean())) + loading
        if loading / times.min() <= MOSTLY_DEVICE:
            self._whole.add_contrasts(rows.whole, -np.log(times), sum_sds)
            self._in_whole.append(Shown(tuple(rows.parts), rows.whole, -np.log(times), sd))

    def _loading(self) -> float:
        """Return the fraction of time that loading takes in the fastest trial; 1 if unknown."""
        split = [self.seen[i] for i in self._split]
        fastest = max(split, key=lambda o: o.log_rate, default=None)
        if fastest is None or fastest.log_device is None:
            return 1.0
        return fastest.waits

    def believing(self, expected: Sequence[Observation]) -> RateModel:
        """Return a copy that treats the expected observations as made; the belief in the models stays."""
        updated = copy(self)
        rows = self.pool([o.config for o in expected])
        updated._whole = self._whole.believing(rows.whole, np.array([o.log_rate for o in expected]))
        sides = [(o.log_device, o.log_loader) for o in expected]
        if all(None not in pair for pair in sides):
            device, loader = np.array(sides, dtype=np.float64).T
            updated._device = self._device.believing(rows.device, device)
            updated._loader = self._loader.believing(rows.loader, loader)
        updated.seen, updated._rows = [*self.seen, *expected], Pool.joined([self._rows, rows])
        return updated

    def fit(self, noise_sd: float, *, doubt: float | None = None) -> Fitted:
        """Fit both models to all observations, at least one.

        Args:
            noise_sd: standard deviation of the logarithm of one launch's rate.
            doubt: factor by which to scale the prior's standard deviations.
        """
        rows = self._rows
        whole = self._whole.fit(noise_sd, doubt=doubt)
        if not self._split:
            self.belief = 0.0
            return Fitted(self.seen, rows, whole, None, 0.0, noise_sd, self._in_whole)
        device, loader = self._device.fit(noise_sd, doubt=doubt), self._loader.fit(noise_sd, doubt=doubt)
        recent = np.array(self._split[-RECENT:])
        observations = [self.seen[i] for i in recent]
        rates = np.array([o.log_rate for o in observations])
        weights = np.array([o.weight for o in observations])
        devices = np.array([o.log_device for o in observations], dtype=np.float64)
        loaders = np.array([o.log_loader for o in observations], dtype=np.float64)
        pool = rows[recent]
        rest = Rest.of(rates - combined(devices, loaders, pool.overlaps), pool.workers > 0, noise_sd)
        plain = log_density(rates, *whole.left_out(pool.whole, rates, weights))
        # The leave-one-out predictions of the two sides, combined.
        on_device, device_sd = device.left_out(pool.device, devices, weights)
        on_loader, loader_sd = loader.left_out(pool.loader, loaders, weights)
        together = combined(on_device, on_loader, pool.overlaps)
        step = 1e-4
        share = (combined(on_device + step, on_loader, pool.overlaps) - together) / step
        spread = np.hypot(share * device_sd, (1 - share) * loader_sd)
        mean, sd = rest.left_out(pool.workers > 0)
        bottleneck = log_density(rates, together + mean, np.hypot(spread, np.hypot(sd, rest.noise_sd)))
        evidence = np.clip(bottleneck - plain, -MOST_EVIDENCE, MOST_EVIDENCE)
        odds = math.log(PRIOR_ODDS) + float(evidence.mean()) * min(len(evidence), MOST_TRIALS)
        self.belief = 1 / (1 + math.exp(-odds))
        sides = Sides(device, loader, rest, self._on_device, self._on_loader)
        return Fitted(self.seen, rows, whole, sides, self.belief, noise_sd, self._in_whole)


# Models of the figures that an objective or a requirement looks at besides the rate.
#
# Both are linear models in the knobs, like that of the rate itself, of a logarithm: by how much a limit is exceeded, or
# how high an objective scores.

#: Minimum standard deviation of a main effect: how a figure depends on the knobs is not known beforehand.
LEAST_SD = 0.3
#: Standard deviation of the logarithm of one launch's figure.
NOISE_SD = 0.05
#: A larger excess, or an unknown one, counts as this.
MOST = 3.0


class MeetingModel:
    """Learns from the excess of trials, and predicts the chance that others have none.

    The expected gain of a trial is multiplied by this chance (Gardner et al., "Bayesian optimization with inequality
    constraints", ICML 2014): what is likely to exceed a limit is tried less often, but may still be tried.

    Args:
        like: the prior of the effects on the rate, which determines the shape of this model's prior.
    """

    def __init__(self, like: Prior) -> None:
        self._regression = _regression(like)
        #: Whether any trial met what is required.
        self.met = False

    def learn(self, row: Array, excess: float) -> None:
        """Learn by how much a trial exceeded the limit, as a natural logarithm; at most 0 if it did not.

        Args:
            row: its features, ``(F,)``.
        """
        self.met = self.met or excess <= 0
        self._regression.add(row, float(np.clip(excess, -MOST, MOST)), 1.0)

    def chances(self, rows: Array) -> Array:
        """Return each configuration's chance of meeting the limit, ``(N,)``, from features ``(N, F)``."""
        from scipy.special import ndtr

        fitted = self._regression.fit(NOISE_SD)
        mean, sd = fitted.predict(rows)
        chances: Array = ndtr(-mean / np.hypot(sd, fitted.noise_sd))
        return chances


class ScoreModel:
    """Learns scores by the objective that chooses among the fastest, and predicts what other configurations gain by it.

    Args:
        like: see `MeetingModel`.
    """

    def __init__(self, like: Prior) -> None:
        self._regression = _regression(like)
        #: Natural logarithm of each score, by the trial's number.
        self.known: dict[int, float] = {}

    def learn(self, number: int, row: Array, score: float) -> None:
        """Learn the score of a trial, a positive number.

        Args:
            row: its features, ``(F,)``.
        """
        if score > 0:
            self.known[number] = math.log(score)
            self._regression.add(row, self.known[number], 1.0)

    def gains(self, rows: Array, best: float) -> Array:
        """Return the expected improvement of each configuration over a score, in natural logarithms, ``(N,)``, from
        features ``(N, F)`` (Jones, Schonlau & Welch, "Efficient global optimization of expensive black-box functions",
        J. Global Optimization 13, 1998).

        Args:
            best: the score's natural logarithm.
        """
        from scipy.special import ndtr

        mean, sd = self._regression.fit(NOISE_SD).predict(rows)
        ahead = (mean - best) / np.maximum(sd, 1e-9)
        gains: Array = sd * (ahead * ndtr(ahead) + np.exp(-0.5 * ahead**2) / math.sqrt(2 * math.pi))
        return gains


def _regression(like: Prior) -> Regression:
    sd = np.where(like.fine, like.sd, np.maximum(like.sd, LEAST_SD))
    return Regression(Prior(np.zeros_like(like.mean), sd, like.fine))
