"""Contenders launched in turns, round by round, so that what drifts is the same for all of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from autotune.stats.launches import LEAST_DEGREES, mean_rate, speedup, within
from autotune.stats.rate import LaunchNoise, Rate
from autotune.stats.student import t_quantile

K = TypeVar("K")


@dataclass(frozen=True)
class Effects(Generic[K]):
    """The least-squares fit of log rate = contender + round.

    Attributes:
        effects: of the contenders, each up to a constant that it shares with all it hangs together with.
        inverse: generalised, of the normal equations, ``(contenders, contenders)``: what one launch's variance becomes.
        part: contenders that share a round, directly or through others, hang together: which of these groups each is
            in. round_degrees: how many differences between rounds were fitted.
        left: the sum of squares that the fit leaves over.
    """

    effects: Mapping[K, float]
    inverse: Mapping[tuple[K, K], float]
    part: Mapping[K, int]
    round_degrees: int
    left: float

    @classmethod
    def of(cls, rows: Mapping[K, Sequence[float | None]]) -> Effects[K]:
        """Fit some rates; cells may be missing."""
        names = [name for name, rates in rows.items() if any(r is not None for r in rates)]
        rounds = max(map(len, rows.values()), default=0)
        cells = [(i, j, rate) for i, n in enumerate(names) for j, rate in enumerate(rows[n]) if rate is not None]
        design = np.zeros((len(cells), len(names) + rounds))
        for row, (i, j, _) in enumerate(cells):
            design[row, i] = design[row, len(names) + j] = 1.0
        # One constant of each group is open, and rounds may be empty: the pseudo-inverse takes any solution, and the
        # differences within a group are the same in all (Searle, Linear Models, 1971, ch. 5).
        normal = np.linalg.pinv(design.T @ design, rcond=1e-9, hermitian=True)
        rates = np.log([rate for *_, rate in cells])
        found = normal @ (design.T @ rates)
        part = _groups([(i, j) for i, j, _ in cells], len(names))
        seen = len({j for _, j, _ in cells})
        return cls(
            effects={name: float(found[i]) for i, name in enumerate(names)},
            inverse={(a, b): float(normal[i, j]) for i, a in enumerate(names) for j, b in enumerate(names)},
            part={name: part[i] for i, name in enumerate(names)},
            round_degrees=seen - len(set(part)),
            left=float(((rates - design @ found) ** 2).sum()),
        )

    def difference(self, a: K, b: K) -> tuple[float, float] | None:
        """How far the logarithm of a's rate lies above b's, and its variance in units of one launch's; ``None`` where
        nothing connects them.

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


def _groups(cells: Sequence[tuple[int, int]], count: int) -> list[int]:
    """The number of the group that each of so many contenders is in; cells are pairs of contender and round."""
    group = list(range(count))
    first: dict[int, int] = {}
    for i, j in cells:
        other = first.setdefault(j, i)
        if group[i] != group[other]:
            group = [group[other] if g == group[i] else g for g in group]
    return group


@dataclass(frozen=True)
class ComparedRounds(Generic[K]):
    """What interleaved launches say of their contenders.

    Attributes:
        rows: the rates as given: per contender one per round, ``None`` where it was not launched.
        noise: of one launch beside the others of its round; drift is not in it.
        total: of one launch at any time, drift from round to round included.
        fit: the contenders' own shares in their rates.
    """

    rows: Mapping[K, Sequence[float | None]]
    noise: LaunchNoise
    total: LaunchNoise
    fit: Effects[K]

    def ratio(self, a: K, b: K) -> tuple[float, float, float]:
        """``(ratio, low, high)`` of a's rate over b's, 95 %.

        The difference of their effects in the model of `compare_rounds`, with the noise of all contenders pooled. Where
        all were launched in every round, that is the mean paired difference of logarithms; where one was not, the
        others tell how the rounds were that it missed. Contenders that no chain of common rounds connects are compared
        by their mean rates, whose intervals have the drift in them.

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
        return math.exp(centre), math.exp(centre - spread), math.exp(centre + spread)

    def rate(self, a: K) -> Rate:
        """a's rate: the geometric mean of its launches, as they were measured, with an interval that has the drift in
        it.

        Raises:
            ValueError: it was never launched.
        """
        seen = [r for r in self.rows[a] if r is not None]
        if not seen:
            raise ValueError(f"{a} was launched in no round")
        return mean_rate([Rate(r, r, r) for r in seen], self.total)


def compare_rounds(rows: Mapping[K, Sequence[float | None]], *, prior: LaunchNoise) -> ComparedRounds[K]:
    """Compare contenders that were launched in turns.

    The model is that of randomised complete blocks, log rate = contender + round + noise (Cochran & Cox,
    Experimental Designs, ch. 4); cells may be missing. Fitted by least squares, the noise is what is left over.
    Its degrees of freedom are launches less contenders less rounds, plus one for each part of the table that hangs
    together. The total noise is the scatter of the contenders' own launches: a sum of the rounds' and the noise's, so
    that its degrees of freedom are Satterthwaite's, and a few rounds are not taken for many.

    Args:
        rows: per contender its rate in each round, ``None`` where it was not launched; rows of one length.
        prior: stands in for either noise while fewer than two degrees of freedom were seen.

    Raises:
        ValueError: rows of different lengths.
    """
    if len({len(rates) for rates in rows.values()}) > 1:
        raise ValueError("every contender needs one rate, or None, for each round")
    fit = Effects.of(rows)
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
