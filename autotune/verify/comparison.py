"""Compares the entrants of a race: rates, ratios with intervals, and possible winners. Launches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune import stats
from autotune.records import Standing
from autotune.scoring import Scorer
from autotune.space import key
from autotune.verify.entrant import Entrant, rate_of, standing, widened


class Comparison:
    """Ratios between the entrants of a race, from the rounds they share.

    If no entrant was launched again, the ratios come from the search's launches, whose figures are too good on average.

    Args:
        entrants: the first is the baseline.
        prior: noise of one launch before there are repeats.
        by_rate: the objective is the rate itself, so the intervals of rates determine the winner.
    """

    def __init__(self, entrants: Sequence[Entrant], *, prior: stats.LaunchNoise, scorer: Scorer, by_rate: bool) -> None:
        self._entrants = entrants
        self._scorer = scorer
        self._by_rate = by_rate
        rounds = max((len(e.rounds) for e in entrants), default=0)
        self._rows = {e.name: [*_rates(e), *[None] * (rounds - len(e.rounds))] for e in entrants if e.again}
        # Two rounds show little of their noise, and the prior may be far off (virtual cores vary by 10 % from launch to
        # launch), so the search's launches of the same configurations are taken into account.
        repeats = [[rate_of(m) for m in e.launches] for e in entrants if e.again]
        known = stats.launch_noise(repeats, prior=prior)
        prior = widened(known, [m for e in entrants for m in e.again])
        self._rounds = stats.compare_rounds(self._rows, prior=prior) if len(self._rows) > 1 else None
        self._prior = prior

    @property
    def noise(self) -> stats.LaunchNoise:
        """Noise of one launch: estimated from the rounds, or the prior if there are too few."""
        return self._rounds.noise if self._rounds else self._prior

    @property
    def baseline(self) -> Entrant:
        return self._entrants[0]

    @property
    def fresh(self) -> bool:
        """Whether the figures come from launches after the search."""
        return self._rounds is not None

    def contenders(self) -> list[Entrant]:
        """Return the entrants that can win.

        If there are new figures, the search's own do not count, because they are too good on average. The baseline can
        always win, because it was not selected for its figure.
        """
        left = [e for e in self._entrants if e.out is None]
        return [e for e in left if not self._rounds or e.name in self._rows or e is self.baseline]

    def rate(self, one: Entrant) -> stats.Rate:
        if self._rounds and one.name in self._rows:
            return self._rounds.rate(one.name)
        return stats.mean_rate([rate_of(m) for m in one.seen], self.noise)

    def ratio(self, one: Entrant, other: Entrant) -> tuple[float, float, float]:
        """Return the rate of one entrant divided by that of another, with its 95 % interval."""
        if one is other:
            return 1.0, 1.0, 1.0
        if self._rounds and one.name in self._rows and other.name in self._rows:
            return self._rounds.ratio(one.name, other.name)
        return stats.speedup(self.rate(one), self.rate(other))

    def shown_faster(self, one: Entrant, among: int) -> bool:
        """Return whether an entrant is faster than the baseline, being one of ``among`` that may all seem so by luck.

        In 19 of 20 races no entrant is wrongly called faster (Bonferroni's inequality; O. J. Dunn, "Multiple
        comparisons among means", JASA 56, 1961). The interval of a single ratio is narrower than the one used here.
        """
        ratio, low, _ = self.ratio(one, self.baseline)
        degrees = max(1.0, self.noise.degrees)
        wider = stats.t_quantile(degrees, 1 - 0.025 / max(1, among)) / stats.t_quantile(degrees)
        return math.log(ratio) > wider * math.log(ratio / low)

    def score(self, one: Entrant) -> float:
        """Return the mean score over an entrant's launches, each with the compile time of a cold cache."""
        return self.standing(one).score

    def leader(self, group: Sequence[Entrant]) -> Entrant:
        """Return the best of a group by the objective, or if that is the rate, by the ratio to the baseline.

        The machine's drift cancels in the ratio: entrants that dropped out early ran in other rounds than the rest.
        """
        if self._by_rate:
            return max(group, key=lambda e: self.ratio(e, self.baseline)[0])
        return max(group, key=self.score)

    def standing(self, one: Entrant) -> Standing:
        first = one.trial.result.measurement
        cold_s = first.compile_s if first is not None and key(one.trial.config) == key(one.config) else 0.0
        compile_s = max([cold_s, *(m.compile_s for m in one.seen)])
        ratio = self.ratio(one, self.baseline)
        return standing(one, self.rate(one), ratio, self._scorer, compile_s)


def _rates(one: Entrant) -> list[float | None]:
    return [None if m is None else m.samples_per_s for m in one.rounds]
