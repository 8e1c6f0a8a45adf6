"""The race against the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, mean, median, stdev
from types import MappingProxyType

from autotune import stats
from autotune.base.records import LaunchKind, Measurement, Standing, Trial, TrialResult, TrialStatus, Value
from autotune.knobs.num_workers import WORKERS
from autotune.samplers import WARM_COMPILE, graph
from autotune.search.proof import ProofContext
from autotune.space import Space, key
from autotune.space.formatting import is_known, one_line, percent_text, rate_text, unmet_text
from autotune.study.budget import LEAST_LAUNCHES
from autotune.study.launches import ended_from_outside, proof_plan_for
from autotune.workload.scoring import Scorer

# The entrants of the race, which are the finalists and the baseline, with all that has been measured of each.

#: Number of best trials that are always launched again.
TOP = 3
#: Maximum number of finalists. With more, there would be too few launches of each.
MOST = 6


@dataclass
class Entrant:
    """One configuration in the race.

    Attributes:
        trial: the search's trial; for a configuration made by the ablation, the winner's trial.
        rounds: the measurement in each round; ``None`` if it was not launched or not measured.
        out: why it dropped out of the race, if it did.
        label: distinguishes a configuration made by the ablation from the trial's own (``without precision``).
        expected_s: expected duration of the next launch.
    """

    config: dict[str, Value]
    trial: Trial
    rounds: list[Measurement | None] = field(default_factory=list)
    out: str | None = None
    expected_s: float = 0.0
    label: str = ""

    @property
    def name(self) -> str:
        """Name that is unique in the race, and the same on a resume."""
        label = self.label.replace("workload.", "own-").replace(" ", "-")
        return "-".join(filter(None, (f"{self.trial.number:05d}", label)))

    @property
    def title(self) -> str:
        """Human-readable name."""
        return f"trial {self.trial.number} {self.label}".rstrip()

    @property
    def again(self) -> list[Measurement]:
        """Measurements from the race."""
        return [m for m in self.rounds if m is not None]

    @property
    def launches(self) -> list[Measurement]:
        """All measurements of this configuration, which show its noise. For its rate, only those of the race count."""
        own = self.trial.result.measurement
        adopted = bool(self.rounds) and self.rounds[0] is own
        return self.again if self.label or own is None or adopted else [own, *self.again]

    @property
    def seen(self) -> list[Measurement]:
        """Measurements from the race, or the trial's own if there are none."""
        trial_measurement = self.trial.result.measurement
        return self.again or ([trial_measurement] if trial_measurement is not None else [])


def entrant(trial: Trial) -> Entrant:
    """Make an entrant from a complete trial."""
    return Entrant(config=trial.config, trial=trial, expected_s=next_s(trial.result))


def next_s(result: TrialResult) -> float:
    """Estimate the duration of the next launch; the compiler's cache is warm by then."""
    measurement = result.measurement
    saved_s = (
        (1 - WARM_COMPILE) * measurement.compile_s
        if measurement is not None and measurement.compile_cache_warm is False
        else 0.0
    )
    return result.alone_s - saved_s


def wait_fraction(measurements: Iterable[Measurement]) -> float | None:
    """Return the median of the known fractions of a step spent waiting for the loader; ``None`` if none is known."""
    fractions = [m.loader_wait_fraction for m in measurements if m.loader_wait_fraction is not None]
    return median(fractions) if fractions else None


def finalists(
    space: Space, complete: Sequence[Trial], noise: stats.LaunchNoise, leanest: Sequence[Trial] = ()
) -> list[Trial]:
    """Return the trials to launch again, most promising first and without the baseline.

    These are the best three, all within noise of the best, and the best two at the user's own batch size. If a trial
    ran at a lower clock of the card than the best, that may also explain the difference.

    Args:
        complete: complete trials, most promising first.
        leanest: those from which an objective other than the rate chooses, best first.
        noise: noise of one launch. Launches of equal configurations differ by less than √2 · t times its sd in 19 of 20
            cases.
    """
    others = [t for t in complete if key(t.config) != key(space.baseline)]
    if not others:
        return []
    best = others[0]
    reach = 2**0.5 * stats.t_quantile(round(noise.degrees)) * noise.sd
    least_per_s, clock = (best.rate_per_s or 0.0) * (1 - reach), _clock(best)
    near = [t for t in others if (t.rate_per_s or 0.0) >= least_per_s * stats.clocks_allow(_clock(t), clock)]
    same_training = [t for t in others if space.same_training(t.config)]
    leanest_others = [t for t in leanest if key(t.config) != key(space.baseline)]
    chosen = [*others[:1], *leanest_others[:2], *same_training[:1], *others[:TOP], *same_training[1:2], *near]
    return list({t.number: t for t in chosen}.values())[:MOST]


def _clock(trial: Trial) -> float | None:
    return None if trial.result.measurement is None else trial.result.measurement.sm_clock_mhz


def peak_bytes(measurements: Iterable[Measurement]) -> int | None:
    """Return the largest peak of device memory."""
    peaks = [m.peak_bytes for m in measurements if m.peak_bytes is not None]
    return max(peaks, default=None)


def clock_mhz(measurements: Sequence[Measurement]) -> float | None:
    """Return the mean SM clock of the card over these launches; ``None`` if it is unknown for any of them."""
    clocks = [m.sm_clock_mhz for m in measurements]
    return fmean(clock for clock in clocks if clock) if clocks and all(clocks) else None


def measured_rate(measurement: Measurement) -> stats.Rate:
    """Return a measurement's rate with its interval."""
    return stats.Rate(
        measurement.samples_per_s,
        *measurement.ci95_per_s,
        relative_se=measurement.relative_se,
        degrees=measurement.degrees,
    )


def standing(
    entrant: Entrant, rate: stats.Rate, ratio: tuple[float, float, float], scorer: Scorer, compile_s: float
) -> Standing:
    """Return an entrant's figures of record, with the compile time of a cold cache, as in the user's training.

    Raises:
        UnscoredError: each of its launches lacks a figure that the objective needs.
    """
    measurements, own = entrant.seen, entrant.trial.result.measurement
    scores: list[float] = []
    # If none of the race's launches has a score, that of the search's own counts.
    for group in (measurements, [] if own is None else [own]):
        as_cold = [m.model_copy(update={"compile_s": compile_s}) for m in group]
        scores = scores or [score for m in as_cold if (score := scorer.known(m)) is not None]
    turns = [m.epoch_turn_s for m in measurements if m.epoch_turn_s is not None]
    host_bytes = [m.host_memory_bytes for m in measurements if m.host_memory_bytes is not None]
    return Standing(
        config=entrant.config,
        trial=entrant.trial.number,
        launches=len(measurements),
        verified=bool(entrant.again),
        samples_per_second=rate.per_s,
        ci95=(rate.low_per_s, rate.high_per_s),
        speedup=ratio[0],
        speedup_ci95=ratio[1:],
        score=mean(scores) if scores else scorer.score(measurements[0]),
        peak_memory_bytes=peak_bytes(measurements),
        host_memory_bytes=max(host_bytes, default=None),
        compile_s=compile_s,
        startup_s=median(m.startup_s for m in measurements),
        epoch_turn_s=median(turns) if turns else None,
        # Without a loader that could be observed, it is unknown how long a step waits for its batch.
        loader_wait_fraction=wait_fraction(measurements) if WORKERS in entrant.config else None,
    )


# Compares the entrants of a race (rates, ratios with intervals, possible winners) without launching anything.


def shared_rounds(one: Entrant, other: Entrant) -> int:
    """Return the number of rounds in which both were measured."""
    return len(_shared(one, other))


def _shared(one: Entrant, other: Entrant) -> list[tuple[Measurement, Measurement]]:
    pairs = zip(one.rounds, other.rounds, strict=False)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


class Comparison:
    """Ratios between the entrants of a race, from the rounds they share.

    Two entrants can be compared only if they ran in the same rounds, directly or through others (`in_turns`). Launches
    from different moments cannot be compared: the machine may have behaved differently.

    Args:
        entrants: the first is the baseline.
        compiled_s: compile time with a cold cache in seconds, by graph, as observed by the search.
    """

    def __init__(
        self, context: ProofContext, entrants: Sequence[Entrant], compiled_s: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self._context, self._entrants, self._compiled_s = context, entrants, compiled_s
        rounds = max((len(e.rounds) for e in entrants), default=0)
        self._rows = {
            e.name: [None if m is None else m.samples_per_s for m in (*e.rounds, *[None] * (rounds - len(e.rounds)))]
            for e in entrants
            if e.again
        }
        # Two rounds reveal little about their noise, and the prior may be far off (virtual cores vary by 10 % from
        # launch to launch), so the search's launches of the same configurations are included.
        noise = self.launch_noise(stats.PRIORS[context.device])
        errors = [m.relative_se for e in entrants for m in e.again if m.relative_se is not None]
        # It is at least the uncertainty within the launches' own windows.
        within_sd = math.sqrt(mean(se**2 for se in errors)) if errors else 0.0
        self._prior = replace(noise, sd=within_sd, learnt=False) if stats.outdone(noise, within_sd) else noise
        # A trial that was picked for its rate differs from later launches by more than these do from each other: it is
        # asked only where there are too few of them.
        seen = {e.name: e.again if len(e.again) > LEAST_LAUNCHES else e.launches for e in entrants if e.again}
        launches = {name: [m.samples_per_s for m in measurements] for name, measurements in seen.items()}
        self._rounds = (
            stats.compare_rounds(self._rows, prior=self._prior, launches=launches) if len(self._rows) > 1 else None
        )

    def launch_noise(self, prior: stats.LaunchNoise) -> stats.LaunchNoise:
        """Return the noise of one launch at any time, estimated from all launches, the search's included."""
        return stats.launch_noise(
            [[measured_rate(m) for m in e.launches] for e in self._entrants if e.again], prior=prior
        )

    @property
    def noise(self) -> stats.LaunchNoise:
        """Noise of one launch: estimated from the rounds, or the prior if there are too few of them."""
        return self._rounds.noise if self._rounds else self._prior

    @property
    def knows_turns(self) -> bool:
        """Whether the rounds themselves show the noise of launches in turns."""
        return self._rounds is not None and self._rounds.noise is not self._prior

    @property
    def baseline(self) -> Entrant:
        return self._entrants[0]

    def in_turns(self, one: Entrant, other: Entrant) -> bool:
        """Return whether two entrants were launched in turns, so that their ratio is known."""
        if one is other:
            return True
        if self._rounds is None or one.name not in self._rows or other.name not in self._rows:
            return False
        return self._rounds.fit.difference(one.name, other.name) is not None

    def contenders(self) -> list[Entrant]:
        """Return the entrants that can win: the baseline, and those launched in turns with it. The search's own figures
        do not count: they are too good on average, and were measured at other times."""
        return [e for e in self._entrants if e.out is None and self.in_turns(e, self.baseline)]

    def rivals(self, one: Entrant) -> int:
        """Return the number of entrants from which this one was chosen: all contenders except the baseline. Of the
        configurations made by the ablation, only the entrant itself counts: the others were never candidates."""
        return sum(e is one or not e.label for e in self.contenders() if e is not self.baseline)

    def rate(self, one: Entrant) -> stats.Rate:
        if self._rounds and one.name in self._rows:
            return self._rounds.rate(one.name)
        return stats.mean_rate([measured_rate(m) for m in one.seen], self.noise)

    def ratio(self, one: Entrant, other: Entrant) -> tuple[float, float, float]:
        """Return the rate of one entrant divided by that of another, with its 95 % interval.

        The interval accounts for differences in the card's clock.

        Raises:
            ValueError: they were not launched in turns.
        """
        if one is other:
            return 1.0, 1.0, 1.0
        if self._rounds is None or not self.in_turns(one, other):
            raise ValueError(f"{one.name} and {other.name} were not launched in turns")
        ratio = self._rounds.ratio(one.name, other.name)
        shared = _shared(one, other)
        clock, other_clock = clock_mhz([a for a, _ in shared]), clock_mhz([b for _, b in shared])
        return ratio if clock is None or other_clock is None else stats.at_equal_clocks(ratio, clock / other_clock)

    def degrees(self, one: Entrant) -> float:
        """Return the degrees of freedom of an entrant's ratio to the baseline, at least 1."""
        return max(1.0, self._rounds.degrees(one.name, self.baseline.name) if self._rounds else self.noise.degrees)

    def unmet(self, one: Entrant) -> str | None:
        """Return the requirements that an entrant does not meet, as a clause; ``None`` if it meets all of them."""
        required = self._context.required
        return unmet_text(required, [self._cold(one, m) for m in one.seen]) if required else None

    def beats_baseline(self, one: Entrant, among: int) -> bool:
        """Return whether an entrant is better than what the user runs today: it is shown to be faster, or it meets the
        requirements and the baseline does not."""
        if self.unmet(self.baseline) is not None:
            return self.unmet(one) is None
        return self.shown_faster(one, among)

    def shown_faster(self, one: Entrant, among: int) -> bool:
        """Return whether an entrant is shown to be faster than the baseline, as one of ``among`` that may seem so by
        luck.

        If each race is looked at once, in 19 of 20 no entrant is wrongly called faster (`stats.t_of_largest`). The
        interval of a single ratio is narrower than the one used here.
        """
        if shared_rounds(one, self.baseline) < LEAST_LAUNCHES:
            return False
        if not self._context.by_rate:
            return self._scores_higher(one, among)
        ratio, low, high = self.ratio(one, self.baseline)
        if not is_known((low, high)):
            return False
        degrees = self.degrees(one)
        wider = stats.t_of_largest(degrees, among) / stats.t_quantile(degrees)
        return math.log(ratio) > wider * math.log(ratio / low)

    def _scores_higher(self, one: Entrant, among: int) -> bool:
        """Return whether an entrant's score is higher than the baseline's, by Student's paired test over the rounds.

        Each has an error of its own, for which Bonferroni's inequality allows (O. J. Dunn, "Multiple comparisons among
        means", JASA 56, 1961). Scores may be negative, so they are not compared by their logarithms as rates are.
        """
        pairs = zip(self._scores(one), self._scores(self.baseline), strict=False)
        gains = [a - b for a, b in pairs if a is not None and b is not None]
        if len(gains) < LEAST_LAUNCHES:
            return False
        error = stdev(gains) / math.sqrt(len(gains))
        return fmean(gains) > error * stats.t_quantile(len(gains) - 1, 1 - 0.025 / max(1, among))

    def _scores(self, one: Entrant) -> list[float | None]:
        return [None if m is None else self._context.scorer.known(self._cold(one, m)) for m in one.rounds]

    def _cold(self, one: Entrant, measurement: Measurement) -> Measurement:
        """Return a measurement with the compile time of a cold cache, as in the user's training."""
        return measurement.model_copy(update={"compile_s": self.compile_s(one)})

    def score(self, one: Entrant) -> float:
        """Return the mean score over an entrant's launches, each with the compile time of a cold cache."""
        return self.standing(one).score

    def leader(self, group: Sequence[Entrant]) -> Entrant:
        """Return the best of a group by the objective or, if that is the rate, by the ratio to the baseline, in which
        drift cancels: entrants that dropped out early ran in other rounds than the rest."""
        if self._context.by_rate:
            return max(group, key=lambda e: self.ratio(e, self.baseline)[0])
        return max(group, key=self.score)

    def standing(self, one: Entrant) -> Standing:
        """Return an entrant's figures of record.

        Raises:
            ValueError: it was not launched in turns with the baseline.
        """
        return standing(one, self.rate(one), self.ratio(one, self.baseline), self._context.scorer, self.compile_s(one))

    def compile_s(self, one: Entrant) -> float:
        """Return the compile time with a cold cache, in seconds."""
        first = one.trial.result.measurement
        cold_s = first.compile_s if first is not None and key(one.trial.config) == key(one.config) else 0.0
        return max([cold_s, self._compiled_s.get(graph(one.config), 0.0), *(m.compile_s for m in one.seen)])


# The race: baseline and finalists are launched again in turns until the ratios are known well enough or time is up.
#
# The winner of a search was picked because it looked best, so its own figure is too good on average (the winner's
# curse). The figures of record come from new launches (or from the search's own if there was no choice to make, see
# `Race.adopt`), in an order that spreads the machine's drift evenly: A B C, C B A, and so on. An entrant that is
# certainly slower than the leader drops out after two rounds, leaving the remaining launches to undecided ones (racing:
# Maron & Moore, "Hoeffding races", NIPS 1994; Birattari et al., "A racing algorithm for configuring metaheuristics",
# GECCO 2002).

#: Target for half the width of the ratio's 95 % interval, by kind of device.
TARGETS = {"cpu": 0.03, "cuda": 0.01}
#: Degrees of freedom with which the noise must be known before the race may end, after one more round. Stopping at an
#: interval that is narrow by luck would make intervals too narrow on average (Chow & Robbins, "On the asymptotic theory
#: of fixed-width sequential confidence intervals", Ann. Math. Stat. 36, 1965). In simulations this raises the coverage
#: from 90–93 % back to 93–96 %.
LEAST_DEGREES = 3
#: If there is no time for this many rounds, the least promising entrants are left out. The baseline, the best and the
#: best at the user's own batch size always stay, as long as two rounds of them fit.
ROUNDS_WANTED, FEWEST = 3, 3
#: Further rounds would hardly narrow the interval.
MAX_ROUNDS = 20
#: Numbers of the rounds from which an earlier run of the study may have left launches.
_NUMBERS = range(1, 4 * MAX_ROUNDS)


class Race:
    """Launches entrants in turns and compares them.

    Args:
        entrants: the others are compared with the first.
    """

    def __init__(self, context: ProofContext, entrants: Sequence[Entrant]) -> None:
        self.context = context
        self.entrants = list(entrants)
        #: The first word of the launches' names.
        self.purpose = "verify"
        #: Compile time with a cold cache in seconds, by graph, as far as it has been observed.
        self.compiled_s = dict(context.compiled_s)
        self._number = 0
        #: Number of rounds with at least two measured entrants.
        self.rounds = 0
        self._racing: list[Entrant] = []
        #: Entrants of the next rounds if there is time for all of them, and the number of rounds before those.
        self._joined = self._joining = list(entrants)
        self._before = 0
        self._earlier_s: float | None = None
        #: Whether the ratios are known well enough, and whether one more round has followed.
        self._known = self._done = False

    @property
    def baseline(self) -> Entrant:
        return self.entrants[0]

    @property
    def still_racing(self) -> list[Entrant]:
        """Entrants that have not dropped out."""
        return [e for e in self.entrants if e.out is None]

    @property
    def undecided(self) -> list[Entrant]:
        """Entrants that would take part in another round."""
        return [e for e in self._racing if e.out is None]

    @property
    def is_decided(self) -> bool:
        """Whether more rounds would hardly change which entrant is the best."""
        return self._done or len(self._racing) <= 1 or self._is_long

    @property
    def _is_long(self) -> bool:
        return self.rounds - self._before >= MAX_ROUNDS

    @property
    def _lacks_a_round(self) -> bool:
        """Whether the last two entrants lack a shared round, because one of their launches has shown nothing."""
        again = self.rounds - self._before <= LEAST_LAUNCHES
        return again and len(self._racing) == 2 and shared_rounds(*self._racing) < LEAST_LAUNCHES

    @property
    def ended(self) -> str:
        """Why the race ended, one sentence."""
        if len(self.still_racing) <= 1 and not self.rounds:
            return "there was nothing to hold against the baseline"
        if not self.rounds:
            return "there was no time to launch anything again"
        if self._done:
            return f"the ratios are known to within {percent_text(TARGETS[self.context.device])}"
        if len(self._racing) <= 1:
            return "nothing else may still be the fastest"
        if self._is_long:
            return f"{MAX_ROUNDS} rounds are the most there are"
        return "the time for it was up"

    def join(self, entrants: Sequence[Entrant]) -> None:
        """Let others race against the baseline. The earlier entrants take part in no more rounds."""
        self.compiled_s.update(self.context.compiled_s)
        names = {e.name for e in self.entrants}
        self.entrants += [e for e in entrants if e.name not in names]
        self._joined = self._joining = [self.baseline, *entrants]
        self._before = self.rounds
        self._earlier_s = None
        self._known = self._done = False

    def adopt(self) -> None:
        """Count the search's own launches as the first round. No entrant may have been selected by them."""
        self._number = self.rounds = 1
        for entrant in self._joining:
            entrant.rounds = [entrant.trial.result.measurement]

    def reopen(self) -> None:
        """After the leader has dropped out, let the entrants that it had beaten race again in the next `run`."""
        compared = self.compared()
        candidates = [e for e in self._joined if e.out is None and compared.in_turns(e, self.baseline)]
        self._racing = self._undecided(candidates)
        self._known = self._done = False

    def run(self, share_s: float) -> None:
        """Run rounds for at most ``share_s`` seconds, and within the budget. Another call continues the race."""
        budget = self.context.launches.budget
        # Launches by an earlier run of the study count as part of the race, so that a resumed race has the same
        # entrants and the same time as without the interruption.
        began = budget.spent_s - self.earlier_s
        self._earlier_s = 0.0
        if self._joining:
            self._racing = self._choose_racing(share_s, budget.limit_s - began)
            self._joining = []
        while len(self._racing) > 1 and not self._is_long and not self._done:
            left_s = min(share_s - (budget.spent_s - began), budget.left_s)
            if self.rounds - self._before < LEAST_LAUNCHES or self._lacks_a_round:
                # A single round does not show its noise, so a second one takes precedence over the steps after the
                # race.
                left_s = budget.left_s
                self._racing = self._for_one_more(left_s)
                left_s += self.context.launches.budget.grace_s if len(self._racing) == 2 else 0.0
            if len(self._racing) < 2 or (self._number and self.round_s(self._racing) > max(0.0, left_s)):
                break
            self.round(self._racing)
            # An entrant that has been disturbed in every round so far stays in and gets another chance.
            compared = self.compared()
            for entrant in self._racing:
                # Judging by several launches.
                if entrant is not self.baseline and entrant.out is None and len(entrant.again) >= LEAST_LAUNCHES:
                    entrant.out = compared.unmet(entrant)
            remaining = [e for e in self._racing if e.out is None]
            if self.rounds - self._before >= LEAST_LAUNCHES and all(
                compared.in_turns(e, self.baseline) for e in remaining
            ):
                self._racing = self._undecided(remaining)
                self._done = self._known
                self._known = self._known_well_enough(self._racing)

    def narrow(self, racing: Sequence[Entrant], left_s: Callable[[], float]) -> None:
        """Run more rounds of some entrants, the baseline first, until their ratios to it are known well, while
        ``left_s()`` seconds are left for them."""
        # These launches have their own names, so that a resume does not mistake them for the race's.
        self.purpose = "narrow"
        is_known = self._known_well_enough(racing)
        is_done = is_known
        while not self._is_long and not is_done:
            racing = [e for e in racing if e.out is None]
            if len(racing) < 2 or self.round_s(racing) > max(0.0, left_s()):
                break
            self.round(racing)
            # One more round follows (see `LEAST_DEGREES`).
            is_known, is_done = self._known_well_enough(racing), is_known

    def _for_one_more(self, left_s: float) -> list[Entrant]:
        """Return the entrants of one more round: the baseline and as many of the fastest so far as there is time for. A
        round of two proves more than no round of three."""
        racing, others = self._racing, [e for e in self._racing if e is not self.baseline and e.out is None]
        if self.context.by_rate and all(e.again for e in others):
            others.sort(key=lambda e: -e.again[-1].samples_per_s)
        while len(others) > 1 and self.round_s([self.baseline, *others]) > max(0.0, left_s):
            others.pop()
        return [e for e in racing if e is self.baseline or e in others]

    @property
    def earlier_s(self) -> float:
        """Seconds that an earlier run of the study spent on this race; 0 after `run` has counted them."""
        if self._earlier_s is None:
            numbers = [number for number in _NUMBERS if number > self._number]
            launches = (self._finished(e, number) for e in self._joining for number in numbers)
            self._earlier_s = sum(result.wall_s for result in launches if result is not None)
        return self._earlier_s

    def _finished(self, one: Entrant, number: int, purpose: str | None = None) -> TrialResult | None:
        """Return the result of a launch that an earlier run of the study completed, if any."""
        return self.context.launches.finished(self._name(one, number, purpose), one.config)

    def has_run(self, one: Entrant) -> bool:
        """Return whether an earlier run of the study launched an entrant for the current purpose."""
        return any(self._finished(one, number) is not None for number in _NUMBERS)

    def _was_begun(self, racing: Sequence[Entrant], number: int, purpose: str | None = None) -> bool:
        # An entrant may have failed before any other was launched.
        results = (self._finished(one, number, purpose) for one in racing)
        return any(result is not None and result.status is TrialStatus.COMPLETE for result in results)

    def _choose_racing(self, share_s: float, left_s: float) -> list[Entrant]:
        """Return the entrants to race within the given time."""
        racing = [e for e in self._joining if e.out is None]
        # Several rounds of the most promising tell more than one round of all, which does not show its noise. Entrants
        # that an earlier run of the study has launched were already chosen then.
        while len(racing) > FEWEST and ROUNDS_WANTED * expected_s(racing) > min(share_s, left_s):
            if self.has_run(racing[-1]):
                break
            racing = racing[:-1]
        # A single launch of each proves nothing.
        missing = LEAST_LAUNCHES - (self.rounds - self._before)
        while len(racing) > 2 and missing * expected_s(racing) > left_s and not self.has_run(racing[-1]):
            racing = racing[:-1]
        if len(racing) == 2 and missing * expected_s(racing) <= left_s + self.context.launches.budget.grace_s:
            return racing
        # One of each is some evidence, for which all that is left may be used.
        while len(racing) > 1 and expected_s(racing) > left_s + self.context.launches.budget.grace_s:
            # The least promising is dropped first. The baseline alone proves nothing.
            racing = racing[:-1] if len(racing) > 2 else []
        return racing

    def round(self, racing: Sequence[Entrant]) -> None:
        """Run one round: launch every entrant once, in the reverse order of the previous round.

        A round that an earlier run of the study began is used as it is, without new launches: a missing launch failed
        or was interrupted, and a launch now would not run under the same conditions as the others.
        """
        self._number += 1
        if self._was_begun(racing, self._number):
            results = {e.name: self._finished(e, self._number) for e in racing if e.out is None}
            self.rounds += sum(result is not None for result in results.values()) > 1
            for entrant in racing:
                result = results.get(entrant.name)
                if result is not None:
                    self._note_result(entrant, self._number, result)
            return
        self.rounds += 1
        launches, number = self.context.launches, self._number
        for one in racing if number % 2 else reversed(racing):
            if one.out is None:
                name, title = self._name(one, number), f"{one.title} again, launch {number}"
                plan = proof_plan_for(launches.plan)
                result = launches.run_outside(LaunchKind.MEASURE, name, title, one.config, plan=plan)
                self.context.raise_if_stopped()
                self._note_result(one, number, result)

    def _note_result(self, one: Entrant, number: int, result: TrialResult) -> None:
        context = self.context
        one.expected_s = next_s(result)
        one.rounds += [None] * (number - 1 - len(one.rounds))
        if result.status is TrialStatus.COMPLETE and result.measurement is not None:
            one.rounds.append(result.measurement)
            rate = rate_text(result.measurement.samples_per_s, result.measurement.ci95_per_s)
            context.observer.says(f"{one.title} again: {rate} {result.measurement.unit}")
            return
        one.rounds.append(None)
        if ended_from_outside(result) or one is self.baseline:
            context.observer.says(f"{one.title} again: not measured: {one_line(result.cause or result.status)}")
        else:
            one.out = f"ended as {result.status} when it was launched again: {result.cause}"
            context.observer.says(f"{one.title} {one.out}")

    def _name(self, one: Entrant, number: int, purpose: str | None = None) -> str:
        return f"{purpose or self.purpose}-{one.name}-{number}"

    def round_s(self, racing: Sequence[Entrant], after: int = 0, purpose: str | None = None) -> float:
        """Estimate the duration of the next round, or of one after so many others, of the current purpose or of another
        one. A round that an earlier run of the study began takes no time."""
        return 0.0 if self._was_begun(racing, self._number + 1 + after, purpose) else expected_s(racing)

    def _undecided(self, racing: list[Entrant]) -> list[Entrant]:
        """Return the baseline and the entrants that may still be the best, overall or at the user's own batch size."""
        if not self.context.by_rate:
            return racing
        compared = self.compared()
        fit = [e for e in racing if compared.unmet(e) is None]
        same_training = [e for e in fit if self.context.space.same_training(e.config)]
        behind = 1 / (1 - self.context.rate_within)
        return [
            e
            for e in racing
            if e is self.baseline
            or any(
                e in group and compared.ratio(compared.leader(group), e)[1] <= behind
                for group in (fit, same_training)
                if group
            )
        ]

    def _known_well_enough(self, racing: Sequence[Entrant]) -> bool:
        compared = self.compared()
        others = [entrant for entrant in racing if entrant is not self.baseline]
        if not compared.noise.learnt or any(compared.degrees(entrant) < LEAST_DEGREES for entrant in others):
            return False
        target = TARGETS[self.context.device]
        ratios = (compared.ratio(entrant, self.baseline) for entrant in others)
        return all((high - low) / 2 <= target * ratio for ratio, low, high in ratios)

    def compared(self) -> Comparison:
        """Compare the entrants by the rounds so far."""
        return Comparison(self.context, self.entrants, compiled_s=self.compiled_s)


def expected_s(racing: Sequence[Entrant]) -> float:
    """Estimate the duration of one round."""
    return sum(e.expected_s for e in racing)
