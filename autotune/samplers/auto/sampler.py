"""`--sampler auto`: an Optuna sampler that knows what a training is.

After each trial three models are fitted: of the rates (`rates`), of the memory (`memory`), of a trial's seconds
(`autotune.samplers.cost`). The next configuration is the one with the largest expected improvement for each second that
trying it will take (Snoek, Larochelle & Adams, "Practical Bayesian optimization of machine learning algorithms", NIPS
2012), among those that surely fit into memory. When all that is left to gain is expected to be less than the noise of a
launch, the search is over (Makarova et al., "Automatic termination for hyperparameter optimization", AutoML 2022).

Everything it proposes follows from the space, the seed, the finished trials and the seconds left, so that a search that
was interrupted goes on as it would have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.trial import FrozenTrial
from threadpoolctl import ThreadpoolController

from autotune.records import Config, Prediction, Value
from autotune.samplers.auto.features import Array, Bools
from autotune.samplers.auto.posterior import Knowledge
from autotune.samplers.auto.rates import Fitted
from autotune.samplers.experience import Experience
from autotune.samplers.sampler import NOTHING_LEFT, Searcher
from autotune.samplers.translate import PREDICTED
from autotune.space import Space, canonical, distance

#: Worlds drawn from the models to see in how many of them a configuration is better, and by how much.
DRAWS = 64
#: The most promising by those are looked at again in so many.
CLOSER, CLOSER_DRAWS = 32, 512
#: Of a large space, what surrounds so many of the best is looked at besides.
CENTRES = 4
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
        gain: expected, ``(N,)``. worth: that for each second; negative is closed. left: see `Look`.
        local: only neighbours of the best count.
    """

    gain: Array
    worth: Array
    left: float
    local: bool

    @property
    def why(self) -> str:
        return "near the best" if self.local else "expected gain"


class AutoSampler(Searcher):
    """Proposes what is legal, new, fits into memory and is worth its seconds.

    It works with any Optuna study, ours or a user's: what it knows comes from the study's finished trials alone.

    Args:
        seed: of the draws.
        acceptable: asked last about each configuration; by default everything that is legal and new is.
        left_s: seconds that searching may still take. limit_s: seconds that it may take in all.
        capacity_bytes: device memory that a training may use; ``None``: unknown, or no limit.
        noise_sd: of one launch's logarithmic rate, as far as is known now.
        splits: scores are rates.
        experience: one that others enter the same study's trials into as well; by default its own.
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
        experience: Experience | None = None,
    ) -> None:
        super().__init__(space)
        self._seed = seed
        self._acceptable = acceptable
        self._left_s = left_s
        self._limit_s = limit_s
        self._noise_sd = noise_sd
        self._known = Knowledge(
            space, seed=seed, capacity_bytes=capacity_bytes, splits=splits, experience=experience or Experience()
        )
        self._looked: tuple[int, Look] | None = None
        self._threads = ThreadpoolController()

    @property
    def belief(self) -> float:
        """In the bottleneck model, 0 to 1."""
        return self._known.rates.belief

    def fits(self, study: optuna.Study, config: Config) -> bool:
        self._known.learn(study)
        return self._known.memory.fits(config)

    def ranking(self, study: optuna.Study) -> tuple[int, ...]:
        return self.look(study).ranking

    def reason_to_end(self, study: optuna.Study) -> str | None:
        found = self.look(study)
        # Before the first complete trial nothing tells what is worth trying, and anything is.
        over = found.proposal is None and (self._known.complete or not self._known.offers.open.any())
        return found.reason_to_end or (NOTHING_LEFT if over else None)

    def proposal(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Value]:
        found = self.look(study).proposal
        if found is None:
            return self._any()
        study._storage.set_trial_system_attr(trial._trial_id, PREDICTED, found.predicted.model_dump())
        return dict(found.config)

    def look(self, study: optuna.Study) -> Look:
        """What follows from the study's finished trials; computed once for each state of it."""
        self._known.learn(study)
        now = self._known.learnt
        if self._looked is None or self._looked[0] != now:
            # The matrices are small, and threads that wait for more of them would take cores from the next trial.
            with self._threads.limit(limits=1, user_api="blas"):
                self._looked = (now, self._look())
        return self._looked[1]

    def _look(self) -> Look:
        known = self._known
        if not known.complete:
            return Look(None, math.inf, ())
        noise_sd = self._noise_sd()
        fitted = known.rates.fit(noise_sd)
        ranking = fitted.ranking(known.complete)
        best, numbers = ranking[0], tuple(known.numbers[i] for i in ranking)
        centre = known.rates.seen[best].config
        known.offers.surround([known.rates.seen[i].config for i in ranking[:CENTRES]], known.tried, known.lessons)
        if not len(known.offers):
            return Look(None, 0.0, numbers)
        fits = known.offers.fits(known.memory)
        outlook = self._outlook(fitted, best, fits)
        least = max(LEAST_GAIN, NOISE_PART * noise_sd)
        if len(known.complete) >= FEWEST_TRIALS and outlook.left <= least:
            # Before it gives up: is it so sure only because it expected too little of what it has not seen?
            fitted = known.rates.fit(noise_sd, doubt=DOUBT)
            outlook = self._outlook(fitted, best, fits)
        worth, why = outlook.worth, outlook.why
        if len(known.complete) < FEWEST_TRIALS or outlook.left > least:
            # While there is time for it: what the user is told of the own batch rests on a trial of its own.
            found = (self._at_own_batch(centre) if outlook.local else None) or self._first(worth, fits, why)
            return Look(self._told(found or self._risk(worth, centre), fitted), outlook.left, numbers)
        # Nothing is left that pays, but for what is not known to fit, and the best as the user trains.
        beyond = np.where(fits | (outlook.gain < least), -1.0, worth)
        found = self._first(beyond, fits, why) or self._at_own_batch(centre) or self._risk(beyond, centre)
        if found is not None:
            return Look(self._told(found, fitted), outlook.left, numbers)
        return Look(None, outlook.left, numbers, _reason(outlook.left, noise_sd, beyond=bool(beyond.max() > 0)))

    def _outlook(self, fitted: Fitted, best: int, fits: Bools) -> _Outlook:
        """What could be tried, and what it is worth."""
        known, offers = self._known, self._known.offers
        # The same draws after the same trials, whatever else happened.
        rng = np.random.default_rng([self._seed, len(known.numbers), len(known.tried)])
        gain, rate = fitted.gains(best, offers.pool, DRAWS, rng)
        seconds = offers.seconds(known.costs, np.exp(rate) if known.splits else None)
        open_ = offers.open & (seconds <= self._left_s())
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
            centre = known.rates.seen[best].config
            worth = np.where([distance(c, centre) <= 1 for c in offers.pool.configs], worth, FAR * worth)
        return _Outlook(gain, worth, left, local)

    def _told(self, found: tuple[Config, str] | None, fitted: Fitted) -> Proposal | None:
        if found is None:
            return None
        config, why = found
        known = self._known
        rate = known.rate_per_s(float(fitted.mean(known.rates.pool([config]))[0]))
        bound = known.memory.bound(config)
        peak = None if bound is None else bound.expected
        seconds = known.costs.expected_s(config, rate if known.splits else None)
        return Proposal(dict(config), Prediction(rate_per_s=rate, seconds=seconds, peak_bytes=peak, why=why))

    def _first(self, worth: Array, fits: Bools, why: str) -> tuple[Config, str] | None:
        """The most worthwhile that may be tried, or what has to be tried before it."""
        for i in np.argsort(-worth, kind="stable"):
            if worth[i] < 0:
                break
            config = self._known.offers.pool.configs[i]
            if not fits[i]:
                stone = self._stepping_stone(config) if self._known.memory.may_fit(config) else None
                if stone is not None:
                    return stone, "to learn how memory grows with the batch"
            elif self._allowed(i):
                return config, why
        return None

    def _allowed(self, index: int) -> bool:
        """Whether one of the offers may be tried now."""
        return self._acceptable(self._known.offers.pool.configs[index])

    def _risk(self, worth: Array, centre: Config) -> tuple[Config, str] | None:
        """Where nothing surely fits: the best at a smaller batch, which tells how memory grows; or what is at least
        expected to fit. Who trains close to the limit would have nothing to try otherwise."""
        if not (worth > 0).any():
            return None
        stone = self._stepping_stone(centre)
        if stone is not None:
            return stone, "to learn how memory grows with the batch"
        configs = self._known.offers.pool.configs
        for i in np.argsort(-worth, kind="stable")[:CLOSER]:
            if worth[i] > 0 and self._allowed(i) and self._known.memory.may_fit(configs[i]):
                return configs[i], "expected to fit, but not sure to"
        return None

    def _stepping_stone(self, config: Config) -> Config | None:
        """The same at a smaller batch, from which it can be told whether this one fits; ``None``: there is none.

        Of a combination with no batch seen it is the largest that surely fits; one batch does not make a line, so that
        the next smaller one follows.
        """
        if "batch_size" not in self.space.choices or "batch_size" not in config:
            return None
        if len(self._known.memory.batches(config)) > 1:
            return None
        smaller = [int(b) for b in self.space.legal("batch_size") if int(b) < int(config["batch_size"])]
        for batch in sorted(smaller, reverse=True):
            found = canonical({**config, "batch_size": batch})
            if self._may_try(found):
                return found
        return None

    def _may_try(self, config: Config) -> bool:
        return self._known.may_try(config) and self._acceptable(config)

    def _at_own_batch(self, config: Config) -> tuple[Config, str] | None:
        """The best with the batch and the workload's own knobs as the user trains, where that is still to be tried."""
        own = {n: v for n, v in self.space.baseline.items() if n == "batch_size" or n.startswith("workload.")}
        found = canonical({**config, **own})
        return (found, "the best at your own batch") if self._may_try(found) else None

    def _any(self) -> dict[str, Value]:
        """Something that may be tried, for who asks although nothing is known to be worth it."""
        configs = [self._known.offers.pool.configs[i] for i in np.flatnonzero(self._known.offers.open)]
        return dict(next((c for c in configs if self._may_try(c)), self.space.baseline))


def _reason(left: float, noise_sd: float, *, beyond: bool) -> str:
    """Why a search ends by itself."""
    if beyond:
        return "nothing more that would pay is known to fit into memory"
    if left < NOTHING:
        return "no trial that is left is expected to gain anything"
    told = f"the most promising trial left is expected to gain {100 * left:.2g} %"
    return f"{told}, and launches of equals are taken to differ by {100 * noise_sd:.2g} %"
