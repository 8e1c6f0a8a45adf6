"""Compares the entrants of a race: rates, ratios with intervals, and possible winners. Launches nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from types import MappingProxyType

from autotune import stats
from autotune.space.formatting import is_known, unmet_text
from autotune.base.records import Measurement, Standing
from autotune.space.requirements import ANYTHING, Requirements
from autotune.samplers import graph
from autotune.workload.scoring import Scorer
from autotune.space import key
from autotune.search.verify.entrant import Entrant, clock_mhz, rate_of, standing, widened

#: One launch of each does not show how much launches differ, so it proves nothing.
LEAST_LAUNCHES = 2


def shared_rounds(one: Entrant, other: Entrant) -> int:
    """Return the number of rounds in which both were measured."""
    return len(_shared(one, other))


def _shared(one: Entrant, other: Entrant) -> list[tuple[Measurement, Measurement]]:
    pairs = zip(one.rounds, other.rounds, strict=False)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


class Comparison:
    """Ratios between the entrants of a race, from the rounds they share.

    Two entrants can be compared only if they ran in the same rounds, directly or through others (`in_turns`). Launches
    of different moments cannot: the machine may have been another one then.

    Args:
        entrants: the first is the baseline.
        prior: noise of one launch before there are repeats.
        by_rate: the search is for the rate itself, so the intervals of rates determine the winner.
        required: what the winner must meet.
        compiled_s: seconds of compiling with a cold cache, by graph, as the search has seen it.
    """

    def __init__(
        self,
        entrants: Sequence[Entrant],
        *,
        prior: stats.LaunchNoise,
        scorer: Scorer,
        by_rate: bool,
        required: Requirements = ANYTHING,
        compiled_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._entrants = entrants
        self._compiled_s = compiled_s
        self._scorer = scorer
        self._by_rate = by_rate
        self._required = required
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

    def in_turns(self, one: Entrant, other: Entrant) -> bool:
        """Return whether two entrants were launched in turns, so that their ratio is known."""
        if one is other:
            return True
        both = one.name in self._rows and other.name in self._rows
        return both and self._rounds is not None and self._rounds.fit.difference(one.name, other.name) is not None

    def contenders(self) -> list[Entrant]:
        """Return the entrants that can win: the baseline, and those launched in turns with it.

        The search's own figures do not count. They are too good on average, and from other moments.
        """
        return [e for e in self._entrants if e.out is None and self.in_turns(e, self.baseline)]

    def rivals(self, one: Entrant) -> int:
        """Return among how many an entrant was chosen: all contenders but the baseline, and of those that the ablation
        made to learn what a knob gives only itself. They were candidates for nothing."""
        return sum(e is one or not e.label for e in self.contenders() if e is not self.baseline)

    def rate(self, one: Entrant) -> stats.Rate:
        if self._rounds and one.name in self._rows:
            return self._rounds.rate(one.name)
        return stats.mean_rate([rate_of(m) for m in one.seen], self.noise)

    def ratio(self, one: Entrant, other: Entrant) -> tuple[float, float, float]:
        """Return the rate of one entrant divided by that of another, with its 95 % interval.

        If the card's clocks differed, the interval accounts for it.

        Raises:
            ValueError: they were not launched in turns.
        """
        if one is other:
            return 1.0, 1.0, 1.0
        if self._rounds is None or not self.in_turns(one, other):
            raise ValueError(f"{one.name} and {other.name} were not launched in turns")
        found = self._rounds.ratio(one.name, other.name)
        shared = _shared(one, other)
        mine, theirs = clock_mhz([a for a, _ in shared]), clock_mhz([b for _, b in shared])
        return found if mine is None or theirs is None else stats.at_equal_clocks(found, mine / theirs)

    def unmet(self, one: Entrant) -> str | None:
        """Return what an entrant does not meet of what is required, as a clause; ``None`` if it meets everything."""
        return unmet_text(self._required, self._as_trained(one)) if self._required else None

    def beats_baseline(self, one: Entrant, among: int) -> bool:
        """Return whether an entrant is better than what the user runs today: shown to be faster, or it meets what is
        required, and the baseline does not."""
        if self.unmet(self.baseline) is not None:
            return self.unmet(one) is None
        return self.shown_faster(one, among)

    def shown_faster(self, one: Entrant, among: int) -> bool:
        """Return whether an entrant is faster than the baseline, being one of ``among`` that may all seem so by luck.

        In 19 of 20 races no entrant is wrongly called faster (Bonferroni's inequality; O. J. Dunn, "Multiple
        comparisons among means", JASA 56, 1961). The interval of a single ratio is narrower than the one used here.
        """
        if shared_rounds(one, self.baseline) < LEAST_LAUNCHES:
            return False
        if not self._by_rate:
            return self._scores_higher(one, among)
        ratio, low, high = self.ratio(one, self.baseline)
        if not is_known((low, high)):
            return False
        degrees = max(1.0, self.noise.degrees)
        wider = stats.t_quantile(degrees, 1 - 0.025 / max(1, among)) / stats.t_quantile(degrees)
        return math.log(ratio) > wider * math.log(ratio / low)

    def _scores_higher(self, one: Entrant, among: int) -> bool:
        """Return whether an entrant's score is higher than the baseline's, by Student's paired test over the rounds.

        A score may be negative, so it is not compared by its logarithm as rates are.
        """
        pairs = zip(self._scores(one), self._scores(self.baseline), strict=False)
        gains = [a - b for a, b in pairs if a is not None and b is not None]
        if len(gains) < LEAST_LAUNCHES:
            return False
        error = stdev(gains) / math.sqrt(len(gains))
        return fmean(gains) > error * stats.t_quantile(len(gains) - 1, 1 - 0.025 / max(1, among))

    def _scores(self, one: Entrant) -> list[float | None]:
        """Return an entrant's score in each round, with the compile time of a cold cache."""
        return [None if m is None else self._scorer.known(self._cold(one, m)) for m in one.rounds]

    def _as_trained(self, one: Entrant) -> list[Measurement]:
        """Return an entrant's measurements with the compile time of a cold cache, as in the user's training."""
        return [self._cold(one, m) for m in one.seen]

    def _cold(self, one: Entrant, measurement: Measurement) -> Measurement:
        return measurement.model_copy(update={"compile_s": self.compile_s(one)})

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
        """Return an entrant's figures of record.

        Raises:
            ValueError: it was not launched in turns with the baseline.
        """
        return standing(one, self.rate(one), self.ratio(one, self.baseline), self._scorer, self.compile_s(one))

    def compile_s(self, one: Entrant) -> float:
        """Return the compile time with a cold cache, in seconds."""
        first = one.trial.result.measurement
        cold_s = first.compile_s if first is not None and key(one.trial.config) == key(one.config) else 0.0
        return max([cold_s, self._compiled_s.get(graph(one.config), 0.0), *(m.compile_s for m in one.seen)])


def _rates(one: Entrant) -> list[float | None]:
    return [None if m is None else m.samples_per_s for m in one.rounds]
