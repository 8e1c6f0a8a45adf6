"""Bayesian linear regression in closed form.

The prior of the effects and the noise are normal, and so is the posterior (Bishop, Pattern Recognition and Machine
Learning, 2006, 3.3). The noise level, and the factors by which the prior's standard deviations are too narrow or too
wide, are chosen from a grid of values by maximum evidence (3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from autotune.samplers.auto.features import Array, Bools

#: Factors tried on the prior standard deviations of main effects and of fine effects, and on the known launch noise.
STRONG, FINE, NOISES = (1.0, 0.5, 2.0), (1.0, 0.3, 0.1, 0.03), (1.0, 2.0, 4.0, 8.0)
#: With fewer observations the prior is used unscaled.
FEWEST = 3
#: From STEADY observations on, the factors are updated only every EVERY observations, from at most ENOUGH of them and
#: from all contrasts.
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
        found: Array = factors * self.sd
        return found


@dataclass(frozen=True)
class Fit:
    """The posterior distribution of the effects.

    Attributes:
        mean: shape ``(F,)``. root: a square root of the covariance, ``(F, F)``.
        noise_sd: of one observation around the sum of the effects, including lack of fit.
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
        kept = np.maximum(1 - spread * precision, 1e-6)
        return seen - (seen - rows @ self.mean) / kept, np.sqrt(1 / (precision * kept))


class Regression:
    """Effects of one kind, learnt one observation at a time.

    Args:
        noises: factors on the known noise, of which the most likely is used.
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
        left = seen - float(row @ self._prior.mean)
        self._square += weight * np.outer(row, row)
        self._product += weight * left * row
        if self._added < ENOUGH:
            self._added += 1
            self._first.append(_Row(row, left, 1 / weight, 0.0))

    def add_contrasts(self, rows: Array, seen: Array, sds: Array) -> None:
        """Add observations made together, of which only the differences count: all share one unknown offset, whose
        prior is flat.

        Args:
            rows: ``(N, F)``. seen: ``(N,)``. sds: the standard deviation of each, ``(N,)``, whatever the noise of
                others.
        """
        left = (seen - rows @ self._prior.mean) / sds
        # An orthonormal basis of what is orthogonal to the offset; the noise stays independent, of variance 1.
        basis = np.linalg.qr((1 / sds)[:, None], mode="complete")[0][:, 1:]
        rows, left = basis.T @ (rows / sds[:, None]), basis.T @ left
        self._exact_square += rows.T @ rows
        self._exact_product += rows.T @ left
        self._first += [_Row(row, float(one), 0.0, 1.0) for row, one in zip(rows, left, strict=True)]

    def believing(self, rows: Array, expected: Array) -> Regression:
        """Return a copy that takes what is expected of further observations as seen, each with a weight of 1.

        This changes no expectation and makes the effects concerned more certain. The factors are not chosen by it.

        Args:
            rows: ``(N, F)``. expected: ``(N,)``.
        """
        found = copy(self)
        found._square = self._square + rows.T @ rows
        found._product = self._product + rows.T @ (expected - rows @ self._prior.mean)
        return found

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
        count = _steady(len(self._first))
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


def _steady(count: int) -> int:
    """Return the number of observations from which to choose the factors: all if there are few, otherwise a multiple of
    `EVERY`, because the factors change little."""
    return count if count < STEADY else count - count % EVERY


@dataclass(frozen=True)
class _Row:
    """One observation.

    Attributes:
        effects: ``(F,)``. left: the observation minus the prior mean. variance: in units of the noise variance, to
            which ``known`` is added.
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
        known: variance of each besides, ``(N,)``.
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
        root = np.linalg.cholesky(covariance)
        solved = np.linalg.solve(root, self.left)
        return float(-0.5 * solved @ solved - np.log(np.diag(root)).sum())


def log_density(seen: Array, mean: Array, sd: Array) -> Array:
    """Return the log density of a normal distribution, up to a constant."""
    found: Array = -0.5 * ((seen - mean) / sd) ** 2 - np.log(sd)
    return found
