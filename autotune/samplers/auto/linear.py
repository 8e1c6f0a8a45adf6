"""Bayesian linear regression in closed form.

Effects are normal beforehand, the noise is normal, so they are normal afterwards (Bishop, Pattern Recognition and
Machine Learning, 2006, 3.3). How large the noise is, and by which factor the effects' expectations are too narrow or
too wide, is what makes the data most likely (the evidence, 3.5; a grid of values is enough).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.samplers.auto.features import Array, Bools

#: Factors tried on the standard deviations of the main effects, of the finer ones, and on the noise known of a launch.
STRONG, FINE, NOISES = (1.0, 0.5, 2.0), (1.0, 0.3, 0.1, 0.03), (1.0, 2.0, 4.0, 8.0)
#: With fewer observations than this they are what is known beforehand.
FEWEST = 3
#: From so many observations on, the factors are looked for again only after so many more, and with no more than enough.
STEADY, EVERY, ENOUGH = 8, 4, 128


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
    """Effects of one kind, learnt from one observation after the other.

    Args:
        noises: factors on the noise that is known, of which the likeliest is taken.
    """

    def __init__(self, prior: Prior, noises: Sequence[float] = NOISES) -> None:
        self._prior = prior
        self._noises = noises
        width = len(prior.mean)
        self._square = np.zeros((width, width))
        self._product = np.zeros(width)
        self._first: list[tuple[Array, float, float]] = []
        #: For how many observations and which noise the factors were looked for, and what was found.
        self._found: tuple[int, float, Array, float] | None = None

    def add(self, row: Array, seen: float, weight: float) -> None:
        """One observation.

        Args:
            row: ``(F,)``. weight: one over its variance in units of the noise's.
        """
        left = seen - float(row @ self._prior.mean)
        self._square += weight * np.outer(row, row)
        self._product += weight * left * row
        if len(self._first) < ENOUGH:
            self._first.append((row, left, weight))

    def fit(self, noise_sd: float, *, doubt: float | None = None) -> Fit:
        """The effects now.

        Args:
            noise_sd: what is known of one observation's noise.
            doubt: instead of the likeliest factors, expectations this many times as wide.
        """
        sd, noise = self._prior.sd, noise_sd
        if len(self._first) >= FEWEST:
            sd, noise = self._likeliest(noise_sd)
        if doubt is not None:
            sd = self._prior.scaled(doubt, doubt)
        inner = np.eye(len(sd)) + sd[:, None] * self._square * sd / noise**2
        # inner = L Lᵀ, so that L⁻ᵀ is a root of its inverse.
        root = sd[:, None] * np.linalg.inv(np.linalg.cholesky(inner)).T
        return Fit(self._prior.mean + root @ (root.T @ self._product) / noise**2, root, noise)

    def _likeliest(self, noise_sd: float) -> tuple[Array, float]:
        """Standard deviations and noise that make the observations likely: one factor after the other, twice."""
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
    """With how many of so many observations the factors are looked for: with all where there are few, and then only
    after so many more, because they change little."""
    return count if count < STEADY else count - count % EVERY


@dataclass(frozen=True)
class _Sample:
    """Observations as their covariances with one another: there are mostly fewer of them than effects.

    Attributes:
        constant, strong, fine: what the constant, the main and the finer effects contribute, each ``(N, N)``.
        left: what the prior leaves of each. noise: variance of each in units of the noise's, ``(N,)``.
    """

    constant: Array
    strong: Array
    fine: Array
    left: Array
    noise: Array

    @classmethod
    def of(cls, prior: Prior, seen: Sequence[tuple[Array, float, float]]) -> _Sample:
        rows = np.array([row for row, _, _ in seen]).reshape(len(seen), len(prior.sd)) * prior.sd
        fine, strong = prior.fine, ~prior.fine
        strong[0] = False
        constant = rows[:, :1] @ rows[:, :1].T
        return cls(
            constant,
            rows[:, strong] @ rows[:, strong].T,
            rows[:, fine] @ rows[:, fine].T,
            np.array([left for _, left, _ in seen]),
            np.array([1 / weight for _, _, weight in seen]),
        )

    def evidence(self, strong: float, fine: float, noise_sd: float) -> float:
        """Logarithm of how likely the observations are, up to a constant (Rasmussen & Williams 2006, 2.30)."""
        covariance = self.constant + strong**2 * self.strong + fine**2 * self.fine + np.diag(noise_sd**2 * self.noise)
        root = np.linalg.cholesky(covariance)
        solved = np.linalg.solve(root, self.left)
        return float(-0.5 * solved @ solved - np.log(np.diag(root)).sum())


def log_density(seen: Array, mean: Array, sd: Array) -> Array:
    """Of a normal distribution, up to a constant."""
    found: Array = -0.5 * ((seen - mean) / sd) ** 2 - np.log(sd)
    return found
