"""What a search may still try, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from autotune import stats
from autotune.base.records import Config, Heat, Phase, Trial, TrialStatus, Value
from autotune.knobs.compile_mode import eager
from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.samplers import WARM_COMPILE, Experience
from autotune.samplers.auto.rates import MOSTLY_DEVICE
from autotune.space import Space, canonical, is_loaders, key, loads_as
from autotune.space.requirements import Requirements
from autotune.study.budget import ALONE_SHARE, CHECK_LAUNCHES, LEAST_LAUNCHES, Budget, search_share
from autotune.study.history import History, PastContest

# The trial that a search owes its user: the best configuration found, at the user's own batch size.


@dataclass(frozen=True)
class Debt:
    """The configuration that is owed, and the seconds that its trial is expected to take."""

    config: dict[str, Value]
    expected_s: float


def owed(
    space: Space, best: Trial | None, baseline: Trial | None, tried: Collection[str], experience: Experience
) -> Debt | None:
    """Return the twin of the best configuration that trains as the baseline does, if it has not been tried.

    The twin is eager, because compiling for another batch may take longer than is left, unless only compiled
    configurations are legal.

    Returns:
        ``None`` if the best trains as the baseline does, is not better than it, or has no legal twin that can finish.
    """
    if best is None or baseline is None or space.same_training(best.config):
        return None
    if best.score is None or baseline.score is None or best.score <= baseline.score:
        return None
    baseline_settings = {n: v for n, v in space.baseline.items() if n == "batch_size" or n.startswith("workload.")}
    kept = {n: v for n, v in best.config.items() if n in space.speed_only}
    compiled = canonical({**best.config, **baseline_settings, **kept})
    legal_twins = (c for c in (eager(compiled), compiled) if space.refusal(c) is None)
    twin = next(legal_twins, None)
    if twin is None or key(twin) in tried or experience.lessons.rule_out(twin):
        return None
    expected_s = experience.costs.expected_s(twin)
    return None if math.isinf(expected_s) else Debt(twin, expected_s)


# Trainings that wait for their loader: which winners of other studies are not worth trying first because they do
# nothing about a starving loader, and which trials cannot run beside others.

#: If a training waits for its loader for more than this fraction of a step, gains on the device hardly matter: at most
#: 1 / WAITS (Amdahl, AFIPS 1967).
WAITS = 2 / 3
#: A training that waits for less than this fraction of a step is hardly affected by what others read.
READS = 0.2
#: What changes what is computed, and has not been checked for how it trains, is to be this many times as fast as what
#: computes the same: PyTorch's siamese example in bf16, 1.02 to 1.13 times as fast in heats, does not train.
MATHS_PAYS = 1.2


def waits_as_long(config: Config, baseline: Trial | None) -> bool:
    """Return whether a configuration has as many workers as a baseline that mostly waits for its loader.

    Such a configuration could gain little, and its trial would take as long as the baseline's. The sampler may still
    propose it later.
    """
    measurement = None if baseline is None else baseline.result.measurement
    if baseline is None or measurement is None or (measurement.loader_wait_fraction or 0.0) <= WAITS:
        return False
    return config.get(WORKERS.name) == baseline.config.get(WORKERS.name)


def waits_for_the_disk(trial: Trial) -> bool:
    """Return whether a complete trial waited for files that are not known to be in the page cache.

    Beside others, it would have to share the disk or the network with them.
    """
    measurement = trial.result.measurement
    if measurement is None or measurement.page_cache not in ("cold", "unknown"):
        return False
    return (measurement.loader_wait_fraction or 0.0) > READS


# The complete trials of a study: their scores, which of them leads, and how much launches vary.


class CompleteTrials:
    """The trials that have a score.

    Args:
        reference: the configuration of the baseline. required: what the winner must meet.
        usual: the assumed noise of launches until repeats have shown it.

    Attributes:
        baseline: the baseline's first complete trial: trial 0, or the one that repeated it; ``None`` before that.
        ordered: all of them, best first; those that do not meet the requirements come last.
    """

    def __init__(self, reference: Config, required: Requirements, usual: stats.LaunchNoise) -> None:
        self.baseline: Trial | None = None
        self.ordered: list[Trial] = []
        self._reference = reference
        self._required = required
        self._usual = usual
        #: Rates of each configuration's complete trials.
        self._launched: dict[str, list[stats.Rate]] = {}

    @property
    def noise(self) -> stats.LaunchNoise:
        """Variation between launches of equal configurations: from repeated launches, or else the usual value."""
        repeats = [rates for rates in self._launched.values() if len(rates) > 1]
        return stats.launch_noise(repeats, prior=self._usual)

    @property
    def best(self) -> Trial | None:
        return next(iter(self.ordered), None)

    @property
    def ends(self) -> list[Trial]:
        """The baseline's trial, and the best one of several."""
        best = self.ordered[:1] if len(self.ordered) > 1 else []
        return [trial for trial in (self.baseline, *best) if trial is not None]

    @property
    def fitting(self) -> list[Trial]:
        """Trials that meet the requirements."""
        return [trial for trial in self.ordered if self._required.allow(trial)]

    def enter(self, trial: Trial) -> None:
        measurement = trial.result.measurement
        if trial.result.status is not TrialStatus.COMPLETE or trial.score is None:
            return
        self.ordered.append(trial)
        self.ordered.sort(key=lambda t: (not self._required.allow(t), -(t.score or 0.0)))
        if self.baseline is None and key(trial.config) == key(self._reference):
            self.baseline = trial
        if measurement is not None:
            rate = stats.Rate(measurement.samples_per_s, *measurement.ci95_per_s)
            self._launched.setdefault(key(trial.config), []).append(rate)

    def leave_out(self, is_wrong: Callable[[Config], bool]) -> None:
        """Leave out configurations that do not train as they should."""
        self.ordered = [trial for trial in self.ordered if not is_wrong(trial.config)]


#: Another loader counts as faster only from this multiple of the rate.
LOADS_FASTER = 1.05
#: What entrants of a heat end with of which it shows nothing.
_UNDECIDED = (TrialStatus.COMPLETE, TrialStatus.INTERRUPTED, TrialStatus.KILLED)


def none_loads_faster(heat: Heat) -> bool:
    """Return whether a heat of loaders has shown that none is faster than the reference. It may have ended before all
    had a turn."""
    others = heat.entrants[1:]
    ratios = [entrant.ratio for entrant in others if entrant.ratio is not None]
    decided = all(entrant.ratio is not None or entrant.status not in _UNDECIDED for entrant in others)
    return decided and bool(ratios) and max(ratios) < LOADS_FASTER


def is_device_bound(space: Space, trials: Sequence[Trial]) -> bool:
    """Return whether the baseline hardly waits for its loader, so that a gain on the device is a gain overall."""
    measurements = [t.result.measurement for t in trials if t.config and key(t.config) == key(space.baseline)]
    fractions = [m.loader_wait_fraction for m in measurements if m is not None]
    return any(part is not None and part <= MOSTLY_DEVICE for part in fractions)


# What a search may still try, how long that may take (the rest of a budget is for the proof), and what comes before the
# sampler's proposals.

#: A search whose contest nothing has won goes on if there is time for this many trials (one trial, its check, two
#: rounds and holding make eight), and for this fraction of the time left.
_AGAIN_TRIALS, _AGAIN_PART = 12, 0.5
#: A budget with time for fewer launches is short.
SHORT_LAUNCHES = 12
#: Time is reserved for showing a gain of this size, as a natural logarithm, in at most this many rounds.
PROMISING, _MOST_ROUNDS = 0.03, 4
#: A trial that takes this many times the expected duration is stopped.
PATIENCE = 3.0
#: Every trial gets at least this many seconds, however little is left for searching.
_LEAST_TRIAL_S = 20.0


class Agenda:
    """Decides which configurations may be tried, and enqueues those that the sampler does not choose.

    Args:
        first: configurations to try before the sampler's proposals, the baseline among them.
        trials: maximum number of finished trials; ``None`` for no limit except the budget.
        adopts: the search's own launches count as a round of the proof (see `StudyLoop.counts_as_round`).
        follow: returns whether trials take place in a script that is already training.
    """

    def __init__(
        self,
        space: Space,
        history: History,
        complete: CompleteTrials,
        experience: Experience,
        budget: Budget,
        *,
        first: Sequence[Config],
        trials: int | None,
        adopts: bool = False,
        follow: Callable[[], bool] = lambda: False,
    ) -> None:
        self._space = space
        self._history = history
        self._complete = complete
        self._experience = experience
        self._budget = budget
        self._first = first
        self._trials = trials
        self._adopts = adopts
        self._follow = follow
        #: The best configuration with the user's own batch size, if it is still to be tried.
        self._debt: Debt | None = None
        #: Seconds that checks of how a trial trains have taken, which the proof does not need any more.
        self.checked_s = 0.0

    @property
    def has_all_trials(self) -> bool:
        """Whether as many trials are finished as were asked for."""
        return self._trials is not None and len(self._history.tried) >= self._trials

    def look_for_owed(self) -> None:
        """Find the best configuration with the user's own batch size, if it is still to be tried."""
        complete = self._complete
        self._debt = owed(self._space, complete.best, complete.baseline, self._history.tried, self._experience)

    def acceptable(self, config: Config) -> bool:
        """Return whether a configuration is legal, new, not ruled out by a failure, and likely to finish in time."""
        candidate = canonical(config)
        return (
            key(candidate) not in self._history.tried
            and self._space.refusal(candidate) is None
            and not self._experience.lessons.rule_out(candidate)
            and self._experience.costs.expected_s(candidate) <= self._left_for_s(candidate)
            and self.has_time_for(candidate)
        )

    def has_time_for(self, config: Config) -> bool:
        """Return whether there is time for what a configuration needs beside its trial.

        A short budget has no time for another trial, which is owed if a configuration changes what is trained. Nor does
        it have time to compare what the loader delivers if the device is the limit, or if no other loader has been seen
        to be faster. None of this applies if there is nothing else to try.
        """
        if not self.is_short:
            return True
        keeps_loader = self.keeps_loader
        others = (n for n in self._space.choices if n != "batch_size" and not n.startswith("workload."))
        if not any(len(self._space.legal(name)) > 1 for name in others if not (keeps_loader and is_loaders(name))):
            return True
        return self._space.same_training(config) and (not keeps_loader or loads_as(config, self._space.baseline))

    @property
    def keeps_loader(self) -> bool:
        """Whether other settings of the loader are not worth a launch: the device is the limit, or a heat has shown
        that no other number of workers loads faster."""
        if is_device_bound(self._space, self._complete.ordered):
            return True
        heats = (h.heat for h in self._history.heats if h.heat.side == "loader")
        return any(loads_as(h.entrants[0].config, self._space.baseline) and none_loads_faster(h) for h in heats)

    def offered(self, config: Config) -> bool:
        """Return whether one of Optuna's samplers may propose a configuration: some values are held back until the best
        configuration is next to them."""
        best = self._complete.best
        neighbour = self._space.baseline if best is None else best.config
        for name, values in self._space.further.items():
            value = config.get(name)
            if value in values and value not in self._space.beside(name, neighbour.get(name)):
                return False
        return self.acceptable(config)

    def limit_s(self, config: Config) -> float | None:
        """Return the time limit of a trial: a multiple of the expected duration, capped by the time left for searching.

        The baseline has no limit, because every comparison needs it.
        """
        if not self._complete.ordered or key(config) == key(self._space.baseline):
            return None
        patience_s = max(PATIENCE * self._experience.costs.expected_s(config), self._budget.limit_s / 4)
        return max(_LEAST_TRIAL_S, min(patience_s, self._left_for_s(config)))

    def enqueue(self, fits: Callable[[Config], bool]) -> bool:
        """Enqueue what precedes the sampler's proposals (a trial to repeat, the baseline, or one of the given
        configurations); return whether there is anything.

        Args:
            fits: returns whether a configuration is known to fit into memory.
        """
        for trial in self._history.unfinished:
            if self._may_try(trial.config):
                self._history.enqueue(trial.config, repeats=trial.number)
                return True
        for config in self._first:
            is_given = key(config) != key(self._space.baseline)
            if is_given and (waits_as_long(config, self._complete.baseline) or not fits(config)):
                continue
            if self._may_try(config):
                self._history.enqueue(dict(config))
                return True
        is_last = self._trials is not None and len(self._history.tried) == self._trials - 1
        return is_last and self.enqueue_owed()

    def enqueue_owed(self) -> bool:
        """Enqueue the best configuration with the user's own batch size if it has not been tried; return whether it was
        enqueued.

        It may take time from the proof, which would have nothing but the baseline to compare at that batch size.
        """
        if self._debt is None or self.has_all_trials or self._debt.expected_s > self._left_alone_s:
            return False
        if key(self._debt.config) in self._history.tried:
            return False  # it runs on another device
        self._history.enqueue(self._debt.config)
        return True

    def enqueue_leader(self, heat: Heat) -> None:
        """Enqueue the fastest entrant of a heat with the settings that it had there, if the loader is to stay as it is
        and the budget is short: a proof begins with a trial of its own.

        If none is certainly ahead of the reference, that is the reference. If the fastest changes what is computed and
        gains little by that, the fastest that does not comes first: there may be no time to check how it trains.
        """
        if heat.side != "device" or not self.keeps_loader or not self.is_short:
            return
        reference, *others = heat.entrants
        ahead = [e for e in others if e.status is TrialStatus.COMPLETE and e.ratio_ci95 and e.ratio_ci95[0] > 1]
        entrants = [reference, *([e for e in ahead if self._space.same_training(e.config)] or ahead)]
        ratios = [(e.ratio, dict(canonical(e.config))) for e in entrants if e.ratio is not None]
        alike = [one for one in ratios if self._space.same_maths(one[1]) and self._may_try(one[1])]
        leader, safe = (max(group, key=lambda one: one[0], default=None) for group in (ratios, alike))
        if leader and safe and leader[0] < MATHS_PAYS * safe[0] and not self._space.same_maths(leader[1]):
            leader = safe
        if leader is not None and self._may_try(leader[1]):
            self._history.enqueue(leader[1])

    def _may_try(self, config: Config) -> bool:
        # The baseline is always tried, regardless of --set and the budget: every comparison needs it.
        is_baseline = key(config) == key(self._space.baseline)
        return key(config) not in self._history.tried if is_baseline else self.acceptable(config)

    @property
    def _left_alone_s(self) -> float:
        """Seconds left for the configuration that is owed, which may take time from the proof."""
        return ALONE_SHARE * self._budget.limit_s - self._budget.spent_s

    def _left_for_s(self, config: Config) -> float:
        """Return how many of the seconds left for searching a configuration may take."""
        if self._debt is None:
            return self.left_s
        is_owed = key(config) == key(self._debt.config)
        return self._left_alone_s if is_owed else self.left_s - self._debt.expected_s

    # The seconds left for searching.

    @property
    def share(self) -> float:
        """The fraction of the budget that searching may take."""
        limit_s = self._budget.limit_s
        contests = [contest.until_s / limit_s for contest in self._history.contests]
        return max([search_share(limit_s, self._usual_s), *contests])

    @property
    def left_s(self) -> float:
        verdict_s = self._budget.left_s - self._verdict_s
        if self.is_whole:
            return verdict_s
        return min(verdict_s, self.share * self._budget.limit_s - self._budget.spent_s + self.checked_s)

    @property
    def fits_proof(self) -> bool:
        """Whether there is time for the fewest launches that prove anything."""
        return self._budget.left_s >= 2 * LEAST_LAUNCHES * self._usual_s

    @property
    def is_whole(self) -> bool:
        """Whether only the time that a proof needs is reserved for it, not a share of the budget: a share of a short
        budget shows nothing, and until something has been compared with the baseline there is nothing to prove."""
        pruned = any(t.result.status is TrialStatus.PRUNED for t in self._history.trials)
        alone = len(self._complete.ends) < 2 and not pruned
        return alone or (self.is_short and not self._history.contests)

    @property
    def is_over(self) -> bool:
        """Whether the share of the budget for searching is spent, so that the rest belongs to the proof."""
        return not self.is_whole and self._budget.spent_s - self.checked_s >= self.share * self._budget.limit_s

    @property
    def is_short(self) -> bool:
        """Whether the budget has time for only a few launches, each of which has to be well chosen."""
        return bool(self._complete.ends) and self._budget.limit_s < SHORT_LAUNCHES * self._usual_s

    @property
    def _verdict_s(self) -> float:
        """Least number of seconds needed to show the gain of the best so far, or of a candidate to come, by launching
        two in turns: without that, another trial would only be another guess."""
        best, baseline = self._complete.best, self._complete.baseline
        if best is None or baseline is None or not best.rate_per_s or not baseline.rate_per_s:
            return 0.0
        gain, others = math.log(best.rate_per_s / baseline.rate_per_s), len(self._complete.ordered) - 1
        if gain < PROMISING and self._follow():
            # Searching on finds a candidate soonest, and what is observed of it there is evidence.
            return 0.0
        if gain < PROMISING:
            # This is for a candidate to come. If there is no time for it, the candidate's launch is some evidence.
            to_come_s = 2 * (2 - self._adopts) * self._usual_s
            fits = self._budget.left_s >= to_come_s + fmean(t.result.alone_s for t in self._complete.ends)
            return to_come_s if others or fits else 0.0
        rounds = stats.rounds_to_show(gain, self._complete.noise, among=others + 1, most=_MOST_ROUNDS)
        start_s = best.result.measurement.startup_s if best.result.measurement is not None else 0.0
        check_s = CHECK_LAUNCHES * start_s if self._adopts or self._follow() else 0.0
        if self._follow() and 2 * rounds * self._usual_s + check_s > self._budget.left_s:
            # There is no time to show so small a gain, and searching on for a larger one costs little.
            rounds = LEAST_LAUNCHES
        return 2 * (rounds - self._adopts) * self._usual_s + check_s

    @property
    def _usual_s(self) -> float:
        """Seconds of a usual launch in the proof, which finds what a trial has compiled in the cache."""
        saved = 1 - WARM_COMPILE
        return fmean(t.result.alone_s - saved * t.result.phase_s.get(Phase.COMPILE, 0.0) for t in self._complete.ends)

    def go_on(self, entered: Sequence[Trial], searched_s: float) -> bool:
        """Let the search go on after a contest that none of these trials has won; return whether it does.

        Args:
            searched_s: seconds of the budget that were spent when the contest began.
        """
        left_s = self._budget.left_s
        if self.has_all_trials or not entered or _AGAIN_TRIALS * self._usual_s > left_s:
            return False
        until_s = self._budget.spent_s + _AGAIN_PART * left_s
        numbers = tuple(trial.number for trial in entered)
        self._history.go_on(PastContest(numbers, self._history.newest, searched_s, until_s))
        return True
