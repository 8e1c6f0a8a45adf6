"""Compares contenders launched in interleaved rounds, so that drift affects all contenders of a round alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from autotune.stats.launches import LEAST_DEGREES, interval_of, mean_rate, speedup, within
from autotune.stats.rate import LaunchNoise, Rate
from autotune.stats.student import t_quantile

Array = npt.NDArray[np.floating[Any]]

K = TypeVar("K")

#: Residuals beyond this many standard deviations count as if they were there: Huber's choice, which keeps 96 % of the
#: efficiency of least squares where the noise is normal.
CLIP = 1.5
#: With fewer degrees of freedom the scale of the residuals is too uncertain to say which are too large.
_LEAST_ROBUST, _ITERATIONS = 8, 20


@dataclass(frozen=True)
class Effects(Generic[K]):
    """The least-squares fit of log rate = contender + round.

    Attributes:
        effects: of the contenders; determined up to a constant per connected group.
        inverse: generalized inverse of the normal equations, ``(contenders, contenders)``, in units of one launch's
            variance.
        part: the connected group of each contender. Contenders are connected if they share a round, directly or through
            others. round_degrees: number of differences between rounds that were fitted.
        left: residual sum of squares; of a robust fit, that of normal residuals with the same errors of the effects.
    """

    effects: Mapping[K, float]
    inverse: Mapping[tuple[K, K], float]
    part: Mapping[K, int]
    round_degrees: int
    left: float

    @classmethod
    def of(cls, rows: Mapping[K, Sequence[float | None]], *, robust: bool = False) -> Effects[K]:
        """Fit the rates; cells may be missing. ``robust``: see `compare_rounds`."""
        names = [name for name, rates in rows.items() if any(r is not None for r in rates)]
        rounds = max(map(len, rows.values()), default=0)
        cells = [(i, j, rate) for i, n in enumerate(names) for j, rate in enumerate(rows[n]) if rate is not None]
        design = np.zeros((len(cells), len(names) + rounds))
        for row, (i, j, _) in enumerate(cells):
            design[row, i] = design[row, len(names) + j] = 1.0
        # Each group leaves one constant undetermined, and rounds may be empty. The pseudo-inverse gives one solution,
        # and differences within a group are the same for all solutions (Searle, Linear Models, 1971, ch. 5).
        normal: Array = np.linalg.pinv(design.T @ design, rcond=1e-9, hermitian=True)
        rates: Array = np.log(np.array([rate for *_, rate in cells], dtype=np.float64))
        found: Array = normal @ (design.T @ rates)
        part = _groups([(i, j) for i, j, _ in cells], len(names))
        seen = len({j for _, j, _ in cells})
        left = float(((rates - design @ found) ** 2).sum())
        degrees = len(cells) - len(names) - seen + len(set(part))
        if robust and degrees >= _LEAST_ROBUST:
            found, left = _clipped(design, normal, rates, found, degrees)
        return cls(
            effects={name: float(found[i]) for i, name in enumerate(names)},
            inverse={(a, b): float(normal[i, j]) for i, a in enumerate(names) for j, b in enumerate(names)},
            part={name: part[i] for i, name in enumerate(names)},
            round_degrees=seen - len(set(part)),
            left=left,
        )

    def difference(self, a: K, b: K) -> tuple[float, float] | None:
        """Return the logarithm of the ratio of a's rate to b's, and its variance in units of one launch's; ``None`` if
        they are not connected.

        Raises:
            ValueError: one of them was never launched.
        """
        for name in (a, b):
            if name not in self.effects:
                raise ValueError(f"{name} was launched in no round")
        if self.part[a] != self.part[b]:
            return None
        variance = self.inverse[a, a] + self.inverse[b, b] - 2 * self.inverse[a, b]
        return self.effects[a] - self.effects[b], max(0.0, variance)


def _clipped(design: Array, normal: Array, rates: Array, found: Array, degrees: int) -> tuple[Array, float]:
    """Return Huber's fit by pseudo-values: what lies beyond `CLIP` standard deviations from the fit is moved there, and
    fitted again (Huber & Ronchetti, Robust Statistics, 2009, sections 7.6 and 7.8).

    Args:
        normal: generalized inverse of the normal equations. found: the least-squares fit.

    Returns:
        The effects, and the sum of squares that gives the variance of the effects when divided by ``degrees``.
    """
    for _ in range(_ITERATIONS):
        residuals = rates - design @ found
        # The median of a normal distribution's absolute values is 0.6745 of its standard deviation.
        limit = CLIP * float(np.median(np.abs(residuals))) / 0.6745 * math.sqrt(len(rates) / degrees)
        if limit == 0.0:
            return found, float((residuals**2).sum())
        found = found + normal @ (design.T @ np.clip(residuals, -limit, limit))
    residuals = rates - design @ found
    inside = float((np.abs(residuals) <= limit).mean())
    clipped = np.clip(residuals, -limit, limit)
    # Huber's correction for the number of effects fitted.
    correction = 1 + (1 - degrees / len(rates)) * (1 - inside) / inside
    return found, float((clipped**2).sum()) * (correction / inside) ** 2


def _groups(cells: Sequence[tuple[int, int]], count: int) -> list[int]:
    """Return the group number of each contender; cells are pairs of contender and round."""
    group = list(range(count))
    first: dict[int, int] = {}
    for i, j in cells:
        other = first.setdefault(j, i)
        if group[i] != group[other]:
            group = [group[other] if g == group[i] else g for g in group]
    return group


@dataclass(frozen=True)
class ComparedRounds(Generic[K]):
    """The comparison of interleaved launches.

    Attributes:
        rows: the rates as given: one per contender and round, ``None`` if it was not launched.
        noise: of one launch relative to the others of its round; excludes drift.
        total: of one launch at any time; includes drift from round to round.
        fit: the fitted effects of the contenders.
    """

    rows: Mapping[K, Sequence[float | None]]
    noise: LaunchNoise
    total: LaunchNoise
    fit: Effects[K]

    def ratio(self, a: K, b: K) -> tuple[float, float, float]:
        """Return ``(ratio, low, high)`` of a's rate over b's, 95 %.

        This is the difference of their effects in the model of `compare_rounds`, with the noise pooled over all
        contenders. If all were launched in every round, it is the mean paired difference of logarithms. If one missed a
        round, the other contenders show how that round was. Contenders not connected by a chain of common rounds are
        compared by their mean rates, whose intervals include drift.

        Raises:
            ValueError: one of them was never launched.
        """
        if a == b:
            self.rate(a)
            return 1.0, 1.0, 1.0
        found = self.fit.difference(a, b)
        if found is None:
            return speedup(self.rate(a), self.rate(b))
        centre, launches = found
        spread = t_quantile(self.noise.degrees) * self.noise.sd * math.sqrt(launches)
        ratio = math.exp(centre)
        return (ratio, *interval_of(ratio, spread))

    def rate(self, a: K) -> Rate:
        """Return the geometric mean of a's launches as measured, with an interval that includes drift.

        Raises:
            ValueError: a was never launched.
        """
        seen = [r for r in self.rows[a] if r is not None]
        if not seen:
            raise ValueError(f"{a} was launched in no round")
        return mean_rate([Rate(r, r, r) for r in seen], self.total)


def compare_rounds(
    rows: Mapping[K, Sequence[float | None]], *, prior: LaunchNoise, robust: bool = False
) -> ComparedRounds[K]:
    """Compare contenders that were launched in interleaved rounds.

    The model is that of randomized complete blocks, log rate = contender + round + noise (Cochran & Cox, Experimental
    Designs, ch. 4); cells may be missing. It is fitted by least squares, and the noise is the residual. Its degrees of
    freedom are launches minus contenders minus rounds, plus one for each connected part of the table. The total noise
    is the scatter of each contender's own launches. It is the sum of the rounds' and the residual noise, so its
    degrees of freedom are Satterthwaite's, which keeps a few rounds from counting as many.

    Args:
        rows: for each contender its rate in each round, ``None`` if it was not launched; all rows of equal length.
        prior: used for either noise if it has fewer than two degrees of freedom.
        robust: let no single rate count for more than one that is 1.5 standard deviations off, for short turns, of
            which one in hundreds takes several times as long.

    Raises:
        ValueError: the rows differ in length.
    """
    if len({len(rates) for rates in rows.values()}) > 1:
        raise ValueError("every contender needs one rate, or None, for each round")
    fit = Effects.of(rows, robust=robust)
    all_squares, all_degrees = within([[r for r in rates if r is not None] for rates in rows.values()])
    squares, degrees = min(fit.left, all_squares), all_degrees - fit.round_degrees
    fourth = sum(part**2 / n for part, n in ((all_squares - squares, fit.round_degrees), (squares, degrees)) if n)
    return ComparedRounds(
        rows,
        noise=_noise(squares, degrees, degrees, prior),
        total=_noise(all_squares, all_degrees, all_squares**2 / fourth if fourth else all_degrees, prior),
        fit=fit,
    )


def _noise(squares: float, divisor: int, degrees: float, prior: LaunchNoise) -> LaunchNoise:
    return LaunchNoise(math.sqrt(squares / divisor), degrees, True) if degrees >= LEAST_DEGREES else prior
