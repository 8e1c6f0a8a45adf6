"""Bayesian linear regression in closed form.

Effects are normal beforehand, the noise is normal, so they are normal afterwards (Bishop, Pattern Recognition and
Machine Learning, 2006, 3.3). How large the noise is, and by which factor the effects' expectations are too narrow or
too wide, is what makes the data most likely (the evidence, 3.5; a grid of values is enough).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.search.auto.features import Array, Bools

#: Factors tried on the standard deviations of the main effects, of the finer ones, and on the noise known of a launch.
STRONG, FINE, NOISES = (1.0, 0.5, 2.0), (1.0, 0.3, 0.1, 0.03), (1.0, 2.0, 4.0, 8.0)
#: With fewer observations than this they are what is known beforehand.
FEWEST = 3
#: From so many observations on, the factors are looked for again only after so many more.
STEADY, EVERY = 8, 4


@dataclass(frozen=True)
class Prior:
    """What is known of effects before the data.

    Attributes:
        mean, sd: of each, shape ``(F,)``; the first is the constant.
        fine: which are small corrections, ``(F,)``: most of them are nothing, and less than expected if many are.
    """

    mean: Array
    sd: Array
    fine: Bools

    def scaled(self, strong: float, fine: float) -> Array:
        """Standard deviations times these factors; of the constant nothing is known under any."""
        factors = np.where(self.fine, fine, strong)
        factors[0] = 1.0
        found: Array = factors * self.sd
        return found


@dataclass(frozen=True)
class Fit:
    """Effects after the data.

    Attributes:
        mean: shape ``(F,)``. root: a root of their covariance, ``(F, F)``.
        noise_sd: of one observation about the effects' sum, lack of fit included.
    """

    mean: Array
    root: Array
    noise_sd: float

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Mean and standard deviation for rows ``(N, F)``, without an observation's noise."""
        return rows @ self.mean, np.sqrt(((rows @ self.root) ** 2).sum(axis=1))

    def draw(self, normals: Array) -> Array:
        """Draws of all effects, ``(F, S)``, from standard normals of that shape."""
        drawn: Array = self.mean[:, None] + self.root @ normals
        return drawn

    def left_out(self, rows: Array, seen: Array, weights: Array) -> tuple[Array, Array]:
        """What all the other observations say of some of those that were fitted: mean and standard deviation, each
        ``(N,)``, noise included (Rasmussen & Williams, Gaussian Processes, 2006, 5.4.2)."""
        precision = weights / self.noise_sd**2
        spread = ((rows @ self.root) ** 2).sum(axis=1)
        kept = np.maximum(1 - spread * precision, 1e-6)
        return seen - (seen - rows @ self.mean) / kept, np.sqrt(1 / (precision * kept))


class Regression:
    """Effects of one kind, learnt from one observation after the other. Its cost does not grow with their number.

    Args:
        noises: factors on the noise that is known, of which the likeliest is taken.
    """

    def __init__(self, prior: Prior, noises: Sequence[float] = NOISES) -> None:
        self._prior = prior
        self._noises = noises
        width = len(prior.mean)
        self._sums = _Sums(np.zeros((width, width)), np.zeros(width), 0.0, 0.0, 0)
        #: What the factors on the prior were last looked for with.
        self._steady = self._sums

    def add(self, row: Array, seen: float, weight: float) -> None:
        """One observation.

        Args:
            row: ``(F,)``. weight: one over its variance in units of the noise's.
        """
        left = seen - float(row @ self._prior.mean)
        old = self._sums
        self._sums = _Sums(
            old.square + weight * np.outer(row, row),
            old.product + weight * left * row,
            old.rest + weight * left**2,
            old.log_weights + math.log(weight),
            old.count + 1,
        )
        if self._sums.count < STEADY or self._sums.count % EVERY == 0:
            self._steady = self._sums

    def fit(self, noise_sd: float, *, doubt: float | None = None) -> Fit:
        """The effects now.

        Args:
            noise_sd: what is known of one observation's noise.
            doubt: instead of the likeliest factors, expectations this many times as wide.
        """
        sd, noise = self._prior.sd, noise_sd
        if doubt is not None:
            sd = self._prior.scaled(doubt, doubt)
        elif self._steady.count >= FEWEST:
            sd, noise = self._likeliest(noise_sd)
        sums = self._sums
        inner = np.eye(len(sd)) + sd[:, None] * sums.square * sd / noise**2
        # inner = L Lᵀ, so that L⁻ᵀ is a root of its inverse.
        root = sd[:, None] * np.linalg.inv(np.linalg.cholesky(inner)).T
        return Fit(self._prior.mean + root @ (root.T @ sums.product) / noise**2, root, noise)

    def _likeliest(self, noise_sd: float) -> tuple[Array, float]:
        """Standard deviations and noise that make the observations likely: one factor after the other, twice."""
        prior, sums = self._prior, self._steady
        strong, fine, noise = 1.0, 1.0, 1.0
        for _ in range(2):
            noise = max(self._noises, key=lambda n: sums.evidence(prior.scaled(strong, fine), n * noise_sd))
            fine = max(FINE, key=lambda f: sums.evidence(prior.scaled(strong, f), noise * noise_sd))
            strong = max(STRONG, key=lambda s: sums.evidence(prior.scaled(s, fine), noise * noise_sd))
        return prior.scaled(strong, fine), noise * noise_sd


@dataclass(frozen=True)
class _Sums:
    """All that the regression needs of the observations.

    Attributes:
        square: ``(F, F)``, product: ``(F,)``: of the weighed rows with themselves and with what the prior leaves.
        rest: weighed squares of that. log_weights: sum of the weights' logarithms. count: observations.
    """

    square: Array
    product: Array
    rest: float
    log_weights: float
    count: int

    def evidence(self, sd: Array, noise_sd: float) -> float:
        """Logarithm of how likely the observations are, up to a constant."""
        inner = np.eye(len(sd)) + sd[:, None] * self.square * sd / noise_sd**2
        root = np.linalg.cholesky(inner)
        solved = np.linalg.solve(root, sd * self.product / noise_sd**2)
        squares = self.rest / noise_sd**2 - solved @ solved
        determinant = np.log(np.diag(root)).sum() + self.count * math.log(noise_sd) - 0.5 * self.log_weights
        return float(-0.5 * squares - determinant)


def log_density(seen: Array, mean: Array, sd: Array) -> Array:
    """Of a normal distribution, up to a constant."""
    found: Array = -0.5 * ((seen - mean) / sd) ** 2 - np.log(sd)
    return found
