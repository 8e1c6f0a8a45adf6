"""Models of what an objective or a requirement says of a training besides its rate.

Both are linear models of the knobs, like that of the rate itself, of a logarithm: by how much a limit is exceeded, or
how high an objective scores.
"""

from __future__ import annotations

import math

import numpy as np

from autotune.samplers.auto.features import Array
from autotune.samplers.auto.linear import Prior, Regression

#: Standard deviation of a main effect at least: how a figure follows the knobs is not known beforehand.
LEAST_SD = 0.3
#: Standard deviation of the logarithm of one launch's figure.
NOISE_SD = 0.05
#: An excess beyond this, and one that is not known, counts as this.
MOST = 3.0


class MeetingModel:
    """Learns from the excess of trials, and predicts the chance that others have none.

    The expected gain of a trial is multiplied by this chance (Gardner et al., "Bayesian optimization with inequality
    constraints", ICML 2014), so that what is likely to exceed a limit is tried less, and may be tried all the same.

    Args:
        like: the prior of the effects on the rate, whose shape it takes.
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
        """Return the chance of each configuration to meet the limit, ``(N,)``, from features ``(N, F)``."""
        from scipy.special import ndtr

        fitted = self._regression.fit(NOISE_SD)
        mean, sd = fitted.predict(rows)
        found: Array = ndtr(-mean / np.hypot(sd, fitted.noise_sd))
        return found


class ScoreModel:
    """Learns the scores by an objective that chooses among the fastest, and predicts what others gain by it.

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
        found: Array = sd * (ahead * ndtr(ahead) + np.exp(-0.5 * ahead**2) / math.sqrt(2 * math.pi))
        return found


def _regression(like: Prior) -> Regression:
    sd = np.where(like.fine, like.sd, np.maximum(like.sd, LEAST_SD))
    return Regression(Prior(np.zeros_like(like.mean), sd, like.fine))
