"""Predicts the rates of configurations, and figures other than the rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import numpy as np

from autotune.base.records import Config, Side
from autotune.knobs.num_workers import workers_of
from autotune.samplers.auto.features import DEVICE, LACK_SD, LOADER, WHOLE, Array, Features, Pool, Shown, combined
from autotune.samplers.auto.regression import Fitted, Observation, Prior, Regression, Rest, Sides, log_density
from autotune.space import Space, delivery_part, device_part, key

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
