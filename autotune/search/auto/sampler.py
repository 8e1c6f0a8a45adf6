"""`--sampler auto`: an Optuna sampler that knows what a training is.

After each trial three models are fitted: of the rates (`rates`), of the memory (`memory`), of a trial's seconds
(`autotune.search.cost`). The next configuration is the one with the largest expected improvement for each second that
trying it will take (Snoek, Larochelle & Adams, "Practical Bayesian optimization of machine learning algorithms", NIPS
2012), among those that surely fit into memory. When all that is left to gain is expected to be less than the noise of a
launch, the search is over (Makarova et al., "Automatic termination for hyperparameter optimization", AutoML 2022).

Everything it proposes follows from the space, the seed, the finished trials and the seconds left, so that a search that
was interrupted goes on as it would have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial
from threadpoolctl import ThreadpoolController

from autotune.records import ATTEMPTS, Config, Prediction, Trial, TrialStatus, Value
from autotune.search.auto.features import Array, Bools
from autotune.search.auto.memory import MemoryModel
from autotune.search.auto.offers import Offers
from autotune.search.auto.rates import Fitted, Observation, RateModel
from autotune.search.cost import CostModel
from autotune.search.sampler import NOTHING_LEFT
from autotune.search.translate import PREDICTED, RECORD, distributions
from autotune.space import Lessons, Space, canonical, distance, key

#: Worlds drawn from the models to see in how many of them a configuration is better, and by how much.
DRAWS = 64
#: The most promising by those are looked at again in so many.
CLOSER, CLOSER_DRAWS = 48, 1024
#: A trial that was ended early saw fewer windows than a complete one.
PRUNED_WEIGHT = 0.25
#: In the last part of the search's seconds neighbours of the best are refined, end to end: what differs from it in more
#: than one knob counts for so much less.
LOCAL_PART, FAR = 0.25, 1e-3
#: The search is over when the most promising trial is expected to gain less than this, or than this part of a launch's
#: noise.
LEAST_GAIN, NOISE_PART = 0.002, 0.1
#: Before a search ends by itself, its expectations are taken to be so many times too narrow.
DOUBT = 2.0
#: What is called nothing.
NOTHING = 5e-4
#: What a configuration that is expected to gain nothing is worth all the same, if it is as fast as any.
NEAREST = 1e-6
#: No search ends by itself before it has seen so many complete trials.
FEWEST_TRIALS = 6


@dataclass(frozen=True)
class Proposal:
    """What to try next, and what is expected of it."""

    config: dict[str, Value]
    predicted: Prediction


@dataclass(frozen=True)
class Look:
    """What follows from the trials so far.

    Attributes:
        left_to_gain: what the most promising trial is expected to gain, relative to the best so far.
        ranking: numbers of the complete trials, the most promising first.
        reason_to_end: one sentence, where there is one.
    """

    proposal: Proposal | None
    left_to_gain: float
    ranking: tuple[int, ...]
    reason_to_end: str | None = None


@dataclass(frozen=True)
class _Outlook:
    """Of all that could be tried.

    Attributes:
        gain: expected, ``(N,)``. worth: that for each second; negative is closed. fits: surely. left: see `Look`.
        local: only neighbours of the best count.
    """

    gain: Array
    worth: Array
    fits: Bools
    left: float
    local: bool

    @property
    def why(self) -> str:
        return "near the best" if self.local else "expected gain"


class AutoSampler(BaseSampler):
    """Proposes what is legal, new, fits into memory and is worth its seconds.

    Args:
        seed: of the draws.
        acceptable: asked last about each configuration; by default everything that is legal and new is.
        left_s: seconds that searching may still take. limit_s: seconds that it may take in all.
        capacity_bytes: device memory that a training may use; ``None``: unknown, or no limit.
        noise_sd: of one launch's logarithmic rate, as far as is known now.
        splits: scores are rates.
        usual_s: of a trial, before one was seen.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        acceptable: Callable[[Config], bool] = lambda config: True,
        left_s: Callable[[], float] = lambda: math.inf,
        limit_s: float = math.inf,
        capacity_bytes: int | None = None,
        noise_sd: Callable[[], float] = lambda: 0.03,
        splits: bool = True,
        usual_s: float = 0.0,
    ) -> None:
        self._space = space
        self._seed = seed
        self._acceptable = acceptable
        self._left_s = left_s
        self._limit_s = limit_s
        self._noise_sd = noise_sd
        self._splits = splits
        #: The first score, where scores are no rates: others are measured by it.
        self._reference = 1.0
        self._rates = RateModel(space, splits=splits)
        self._memory = MemoryModel(space, capacity_bytes)
        self._costs = CostModel(usual_s)
        self._lessons = Lessons()
        self._offers = Offers(space, self._rates, seed)
        self._learnt: set[int] = set()
        #: Of the trial behind each observation, and which of those are complete.
        self._numbers: list[int] = []
        self._complete: list[int] = []
        self._tried: set[str] = set()
        #: How often each configuration failed in passing.
        self._failures: Counter[str] = Counter()
        self._looked: tuple[int, Look] | None = None
        self._threads = ThreadpoolController()

    @property
    def belief(self) -> float:
        """In the bottleneck model, 0 to 1."""
        return self._rates.belief

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(distributions(self._space))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        # Trials with parameters of their own (enqueued ones) need no proposal.
        if "fixed_params" in trial.system_attrs:
            return {}
        found = self.look(study).proposal
        if found is None:
            return self._any()
        study._storage.set_trial_system_attr(trial._trial_id, PREDICTED, found.predicted.model_dump())
        return dict(found.config)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        # Only what an enqueued trial left open comes here: the baseline's own value, where there is one.
        return self._space.baseline.get(param_name, self._space.legal(param_name)[0])

    def fits(self, config: Config) -> bool:
        """Whether a configuration surely fits into memory, by the trials so far."""
        return self._memory.fits(config)

    def reason_to_end(self, study: optuna.Study) -> str | None:
        """Why the search is over, or ``None``: there is something worth trying."""
        found = self.look(study)
        # Before the first complete trial nothing tells what is worth trying, and anything is.
        over = found.proposal is None and (self._complete or not self._offers.open.any())
        return found.reason_to_end or (NOTHING_LEFT if over else None)

    def look(self, study: optuna.Study) -> Look:
        """What follows from the study's finished trials; computed once for each state of it."""
        self._learn(study)
        now = len(self._learnt)
        if self._looked is None or self._looked[0] != now:
            # The matrices are small, and threads that wait for more of them would take cores from the next trial.
            with self._threads.limit(limits=1, user_api="blas"):
                self._looked = (now, self._look())
        return self._looked[1]

    def _learn(self, study: optuna.Study) -> None:
        for frozen in study.get_trials(deepcopy=False):
            if frozen.number in self._learnt or not frozen.state.is_finished():
                continue
            self._learnt.add(frozen.number)
            found = frozen.user_attrs.get(RECORD)
            if found is not None:
                self._enter(Trial.model_validate(found))
            elif frozen.value is not None and frozen.value > 0:
                # A trial that came from elsewhere: a score and nothing else.
                seen = Observation(canonical(frozen.params), math.log(frozen.value))
                self._observe(frozen.number, seen, complete=True)

    def _enter(self, trial: Trial) -> None:
        config, result = trial.config, trial.result
        # Killed while it was being asked for, it has no configuration; interrupted, it says nothing about it.
        if not config or (result.status is TrialStatus.INTERRUPTED and not result.transient):
            return
        if result.transient:
            self._failures[key(config)] += 1
            if self._failures[key(config)] >= ATTEMPTS:
                self._close(config)
            return
        self._costs.learn(config, result)
        measurement = result.measurement
        if result.status is TrialStatus.OOM:
            self._memory.learn_oom(config)
        if measurement is not None:
            peak = measurement.peak_reserved_bytes or measurement.peak_allocated_bytes
            if peak is not None:
                self._memory.learn(config, peak)
        seen = observation(trial, None if self._splits else self._reference)
        if not self._splits and not self._complete and trial.score is not None:
            self._reference = trial.score or 1.0
            seen = observation(trial, self._reference)
        if seen is not None:
            self._observe(trial.number, seen, complete=result.status is TrialStatus.COMPLETE)
            return
        self._lessons.learn(result.status, config)
        self._close(config)
        self._offers.rule_out(self._lessons)

    def _observe(self, number: int, seen: Observation, *, complete: bool) -> None:
        if complete:
            self._complete.append(len(self._numbers))
        self._numbers.append(number)
        self._rates.add(seen)
        self._close(seen.config)

    def _close(self, config: Config) -> None:
        self._tried.add(key(config))
        self._offers.close([key(config)])

    def _look(self) -> Look:
        if not self._complete:
            return Look(None, math.inf, ())
        noise_sd = self._noise_sd()
        fitted = self._rates.fit(noise_sd)
        ranking = fitted.ranking(self._complete)
        best, numbers = ranking[0], tuple(self._numbers[i] for i in ranking)
        centre = self._rates.seen[best].config
        self._offers.grow([centre], self._tried, self._lessons)
        if not len(self._offers):
            return Look(None, 0.0, numbers)
        outlook = self._outlook(fitted, best)
        least = max(LEAST_GAIN, NOISE_PART * noise_sd)
        if len(self._complete) >= FEWEST_TRIALS and outlook.left <= least:
            # Before it gives up: is it so sure only because it expected too little of what it has not seen?
            fitted = self._rates.fit(noise_sd, doubt=DOUBT)
            outlook = self._outlook(fitted, best)
        worth, fits, why = outlook.worth, outlook.fits, outlook.why
        if len(self._complete) < FEWEST_TRIALS or outlook.left > least:
            # While there is time for it: what the user is told of the own batch rests on a trial of its own.
            found = (self._at_own_batch(centre) if outlook.local else None) or self._first(worth, fits, why)
            return Look(self._told(found or self._risk(worth, centre), fitted), outlook.left, numbers)
        # Nothing is left that pays, but for what is not known to fit, and the best as the user trains.
        beyond = np.where(fits | (outlook.gain < least), -1.0, worth)
        found = self._first(beyond, fits, why) or self._at_own_batch(centre) or self._risk(beyond, centre)
        if found is not None:
            return Look(self._told(found, fitted), outlook.left, numbers)
        return Look(None, outlook.left, numbers, _reason(outlook.left, noise_sd, beyond=bool(beyond.max() > 0)))

    def _outlook(self, fitted: Fitted, best: int) -> _Outlook:
        """What could be tried, and what it is worth."""
        # The same draws after the same trials, whatever else happened.
        rng = np.random.default_rng([self._seed, len(self._numbers), len(self._tried)])
        offers = self._offers
        gain, rate = fitted.gains(best, offers.pool, DRAWS, rng)
        seconds = offers.seconds(self._costs, np.exp(rate) if self._splits else None)
        open_ = offers.open & (seconds <= self._left_s())
        fits = offers.fits(self._memory)
        # The largest of many rough figures is too large: the most promising are looked at again, more closely.
        some = [np.where(which, by, 0.0) for which in (open_ & fits, open_ & ~fits) for by in (gain, gain / seconds)]
        closer = np.unique(np.concatenate([np.argsort(-by, kind="stable")[:CLOSER] for by in some]))
        gain[closer], _ = fitted.gains(best, offers.pool[closer], CLOSER_DRAWS, rng)
        promising = closer[np.argsort(-gain[closer], kind="stable")]
        left = next((float(gain[i]) for i in promising if open_[i] and fits[i] and self._allowed(i)), 0.0)
        # What is not known to fit takes another trial first, which costs about as much.
        price = np.where(fits, seconds, 2 * seconds)
        # Where nothing is expected to gain anything, what comes nearest.
        worth = np.where(open_, (gain + NEAREST * np.exp(rate - rate.max())) / price, -1.0)
        local = self._left_s() < LOCAL_PART * self._limit_s
        if local:
            centre = self._rates.seen[best].config
            worth = np.where([distance(c, centre) <= 1 for c in offers.pool.configs], worth, FAR * worth)
        return _Outlook(gain, worth, fits, left, local)

    def _told(self, found: tuple[Config, str] | None, fitted: Fitted) -> Proposal | None:
        if found is None:
            return None
        config, why = found
        expected = float(fitted.mean(self._rates.pool([config]))[0])
        rate = math.exp(expected) if self._splits else self._reference + expected * abs(self._reference)
        bound = self._memory.bound(config)
        peak = None if bound is None else bound.expected
        seconds = self._costs.expected_s(config, rate if self._splits else None)
        return Proposal(dict(config), Prediction(rate_per_s=rate, seconds=seconds, peak_bytes=peak, why=why))

    def _first(self, worth: Array, fits: Bools, why: str) -> tuple[Config, str] | None:
        """The most worthwhile that may be tried, or what has to be tried before it."""
        for i in np.argsort(-worth, kind="stable"):
            if worth[i] < 0:
                break
            config = self._offers.pool.configs[i]
            if not fits[i]:
                stone = self._stepping_stone(config) if self._memory.may_fit(config) else None
                if stone is not None:
                    return stone, "to learn how memory grows with the batch"
            elif self._allowed(i):
                return config, why
        return None

    def _allowed(self, index: int) -> bool:
        """Whether one of the offers may be tried now."""
        return self._acceptable(self._offers.pool.configs[index])

    def _risk(self, worth: Array, centre: Config) -> tuple[Config, str] | None:
        """Where nothing surely fits: the best at a smaller batch, which tells how memory grows; or what is at least
        expected to fit. Who trains close to the limit would have nothing to try otherwise."""
        stone = self._stepping_stone(centre)
        if stone is not None:
            return stone, "to learn how memory grows with the batch"
        configs = self._offers.pool.configs
        for i in np.argsort(-worth, kind="stable")[:CLOSER]:
            if worth[i] > 0 and self._allowed(i) and self._memory.may_fit(configs[i]):
                return configs[i], "expected to fit, but not sure to"
        return None

    def _stepping_stone(self, config: Config) -> Config | None:
        """The same at a smaller batch, from which it can be told whether this one fits; ``None``: there is none.

        Of a combination with no batch seen it is the largest that surely fits; one batch does not make a line, so that
        the next smaller one follows.
        """
        if len(self._memory.batches(config)) > 1 or "batch_size" not in self._space.choices:
            return None
        smaller = [int(b) for b in self._space.legal("batch_size") if int(b) < int(config["batch_size"])]
        for batch in sorted(smaller, reverse=True):
            found = canonical({**config, "batch_size": batch})
            if self._may_try(found):
                return found
        return None

    def _may_try(self, config: Config) -> bool:
        return (
            key(config) not in self._tried
            and self._space.refusal(config) is None
            and not self._lessons.rule_out(config)
            and self._memory.fits(config)
            and self._acceptable(config)
        )

    def _at_own_batch(self, config: Config) -> tuple[Config, str] | None:
        """The best with the batch and the workload's own knobs as the user trains, where that is still to be tried."""
        own = {n: v for n, v in self._space.baseline.items() if n == "batch_size" or n.startswith("workload.")}
        found = canonical({**config, **own})
        return (found, "the best at your own batch") if self._may_try(found) else None

    def _any(self) -> dict[str, Any]:
        """Something that may be tried, for who asks although nothing is known to be worth it."""
        configs = [self._offers.pool.configs[i] for i in np.flatnonzero(self._offers.open)]
        return dict(next((c for c in configs if self._may_try(c)), self._space.baseline))


def _reason(left: float, noise_sd: float, *, beyond: bool) -> str:
    """Why a search ends by itself."""
    if beyond:
        return "nothing more that would pay is known to fit into memory"
    if left < NOTHING:
        return "no trial that is left is expected to gain anything"
    told = f"the most promising trial left is expected to gain {100 * left:.2g} %"
    return f"{told}, and launches of equals are taken to differ by {100 * noise_sd:.2g} %"


def observation(trial: Trial, reference: float | None = None) -> Observation | None:
    """What a trial says of its configuration's rate; ``None`` of one that failed.

    Args:
        reference: where scores are no rates and may be negative, one of them that others are measured by.
    """
    complete = trial.result.status is TrialStatus.COMPLETE
    if reference is not None:
        if not complete or trial.score is None:
            return None
        return Observation(trial.config, (trial.score - reference) / abs(reference))
    score = trial.score if complete else trial.rate_per_s
    if score is None or score <= 0 or not (complete or trial.result.status is TrialStatus.PRUNED):
        return None
    measurement = trial.result.measurement
    device = measurement.device_per_s if measurement else None
    loader = measurement.loader_capacity_per_s if measurement else None
    return Observation(
        trial.config,
        math.log(score),
        math.log(device) if device else None,
        math.log(loader) if loader else None,
        1.0 if complete else PRUNED_WEIGHT,
    )
