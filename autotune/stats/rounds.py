"""Contenders launched in turns, round by round, so that what drifts is the same for all of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

from autotune.stats.launches import LEAST_DEGREES, mean_rate, speedup, within
from autotune.stats.rate import LaunchNoise, Rate
from autotune.stats.student import t_quantile

K = TypeVar("K")

_CLOSE_ENOUGH = 1e-12
_MAX_SWEEPS = 1000


@dataclass(frozen=True)
class Comparison(Generic[K]):
    """What interleaved launches say of their contenders.

    Attributes:
        rows: the rates as given: per contender one per round, ``None`` where it was not launched.
        noise: of one launch beside the others of its round; drift is not in it.
        total: of one launch at any time, drift from round to round included.
    """

    rows: Mapping[K, Sequence[float | None]]
    noise: LaunchNoise
    total: LaunchNoise

    def ratio(self, a: K, b: K) -> tuple[float, float, float]:
        """``(ratio, low, high)`` of a's rate over b's, 95 %.

        From the mean paired difference of logarithms over the rounds that have both (Fisher, The Design of
        Experiments, 1935; Cochran & Cox, Experimental Designs, ch. 4), with the noise of all contenders pooled. Without
        a common round: of the two mean rates, whose intervals have the drift in them.

        Raises:
            ValueError: one of them was never launched.
        """
        if a == b:
            self.rate(a)
            return 1.0, 1.0, 1.0
        differences = [
            math.log(x / y) for x, y in zip(self.rows[a], self.rows[b], strict=True) if x is not None and y is not None
        ]
        if not differences:
            return speedup(self.rate(a), self.rate(b))
        centre = fmean(differences)
        spread = t_quantile(self.noise.degrees) * self.noise.sd * math.sqrt(2 / len(differences))
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


def compare_rounds(rows: Mapping[K, Sequence[float | None]], *, prior: LaunchNoise) -> Comparison[K]:
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
    cells = {
        (i, j): math.log(rate)
        for i, rates in enumerate(rows.values())
        for j, rate in enumerate(rates)
        if rate is not None
    }
    all_squares, all_degrees = within([[r for r in rates if r is not None] for rates in rows.values()])
    round_degrees = len({j for _, j in cells}) - _parts(set(cells))
    squares, degrees = min(_residual_squares(cells), all_squares), all_degrees - round_degrees
    fourth = sum(part**2 / n for part, n in ((all_squares - squares, round_degrees), (squares, degrees)) if n)
    return Comparison(
        rows,
        noise=_noise(squares, degrees, degrees, prior),
        total=_noise(all_squares, all_degrees, all_squares**2 / fourth if fourth else all_degrees, prior),
    )


def _noise(squares: float, divisor: int, degrees: float, prior: LaunchNoise) -> LaunchNoise:
    return LaunchNoise(math.sqrt(squares / divisor), degrees, True) if degrees >= LEAST_DEGREES else prior


def _parts(cells: set[tuple[int, int]]) -> int:
    """In how many parts the table falls: contenders that share a round, directly or through others, hang together."""
    count, left = 0, set(cells)
    while left:
        count += 1
        rows, columns = set[int](), set[int]()
        found = {next(iter(left))}
        while found:
            left -= found
            rows |= {i for i, _ in found}
            columns |= {j for _, j in found}
            found = {(i, j) for i, j in left if i in rows or j in columns}
    return count


def _residual_squares(cells: Mapping[tuple[int, int], float]) -> float:
    """What the least-squares fit of row and column effects leaves over, by sweeping means out of rows and columns in
    turn (Gauss-Seidel on the normal equations)."""
    left = dict(cells)
    lines = [[c for c in cells if c[axis] == line] for axis in (0, 1) for line in {c[axis] for c in cells}]
    for _ in range(_MAX_SWEEPS):
        largest = 0.0
        for line in lines:
            centre = fmean(left[c] for c in line)
            largest = max(largest, abs(centre))
            for c in line:
                left[c] -= centre
        if largest < _CLOSE_ENOUGH:
            break
    return sum(e * e for e in left.values())
