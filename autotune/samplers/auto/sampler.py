"""autotune's own sampler."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import ThreadpoolController

from autotune.base.records import Config, Measurement, Prediction, Side, Value
from autotune.knobs import KNOBS
from autotune.knobs.batch_memory import KNOB as BATCH_MEMORY
from autotune.knobs.compile_mode import CUDAGRAPH_MODES, mode_of
from autotune.knobs.num_workers import WORKERS
from autotune.samplers.auto.features import LACK_SD, Array, Bools
from autotune.samplers.auto.posterior import Knowledge
from autotune.samplers.auto.rates import Fitted
from autotune.samplers.sampler import NOTHING_LEFT, PREDICTED, Experience, HeatProposal, Searcher, graph
from autotune.space import AT_ONCE, Space, canonical, device_part, distance, is_idle, key, samples_at_once, simplicity

# Which configurations to compare in a heat, and whether that is worth more than running the next trial.
#
# A heat shows, almost without error, which of its entrants computes fastest. Its worth is therefore the value of
# perfect information about them: how much faster the best of them is expected to be than the one that would be tried
# without it. Two things leave open which one that is: the spread of the models' draws, and the part of a
# configuration's rate that no sum of effects captures (Raiffa & Schlaifer, Applied Statistical Decision Theory, 1961,
# ch. 4; in the search for a maximum: Frazier, Powell & Dayanik, "A knowledge-gradient policy for sequential information
# collection", SIAM J. Control Optim. 47, 2008).

#: Maximum number of entrants; further ones are compared in the next heat, against the best of this one.
MOST = 20
#: Minimum number of entrants; with fewer, a trial shows as much.
FEWEST = 3
#: An entrant that adds less than this fraction of what the others add per second waits for a later heat: at the
#: beginning of a search, when there is much to gain, this holds for those that must be compiled.
LATER = 0.2
#: The first compilation in a mode may take this many times the guess; nothing else can be done in the meantime. For
#: ResNet-50 at 96 px on two cores the guess was 60 s; it took 33 s on one machine and 150 s on another.
SLOW_COMPILE = 2.5
#: Draws from the models.
HEAT_DRAWS = 256
#: Steps that an entrant takes on average, counted ones and the first of each turn: many drop out after the first round.
STEPS = 6.0
#: A loader is worth comparing with others if the training waits for it at least this fraction of its time.
WAITS = 0.2
#: Turns that a loader takes on average, and the seconds to start it and each of its workers.
LOADER_TURNS, LOADER_START_S, WORKER_START_S = 2.0, 0.2, 0.05
#: Maximum number of variants to choose from; if there are more, this many are drawn at random.
_VARIANTS = 4096


def _switched(config: Config) -> dict[str, Value]:
    """Return the part of a configuration that a running training can be switched to."""
    return {n: v for n, v in config.items() if n in KNOBS and KNOBS[n].switchable}


def variants(space: Space, reference: Config) -> Iterator[dict[str, Value]]:
    """Yield the configurations that a running training of the reference can be switched to; a random sample if there
    are very many."""
    names = [n for n in _switched(reference) if n in space.choices and n not in space.between_launches]
    values = [(*space.rungs(n), *space.beside(n, reference[n])) for n in names]
    combinations: Sequence[int] = range(math.prod(map(len, values)))
    if len(combinations) > _VARIANTS:
        combinations = random.Random(0).sample(combinations, _VARIANTS)
    for combination in combinations:
        choice = []
        rest = combination
        for options in values:
            rest, position = divmod(rest, len(options))
            choice.append(options[position])
        config = canonical({**reference, **dict(zip(names, choice, strict=True))})
        if key(config) != key(reference) and space.why_apart(reference, config) is None:
            yield config


def loaders(space: Space, reference: Config) -> list[dict[str, Value]]:
    """Return the reference with other numbers of workers, and other places where these put batches.

    The effect of a loader's other knobs hardly shows in its own rate: queues smooth the waits of a training, pinning
    helps the device most, and persistent workers help at the turn of an epoch.
    """
    names = [n for n in (WORKERS, BATCH_MEMORY.name) if n in space.choices and n not in space.between_launches]
    values = itertools.product(*map(space.rungs, names))
    others = [space.completed({**reference, **dict(zip(names, choice, strict=True))}) for choice in values]
    distinct = {key(config): config for config in others}
    distinct.pop(key(reference), None)
    return [config for config in distinct.values() if space.refusal(config) is None]


#: A simpler configuration is tried instead if its worth is at least this fraction of the most worthwhile one's.
_AS_WORTHY = 0.9
#: Of configurations that are not known to fit, this many of the most worthwhile are considered.
_RISKS = 32
#: Gains below this are reported as none.
NOTHING = 5e-4


@dataclass(frozen=True)
class Proposal:
    """A configuration to try next, and its expected result."""

    config: dict[str, Value]
    predicted: Prediction


@dataclass(frozen=True)
class Look:
    """The conclusions from the trials so far.

    Attributes:
        left_to_gain: expected gain of the most promising trial, relative to the best so far.
        ranking: numbers of the complete trials, most promising first.
        reason_to_end: one sentence, if the search should end.
        heat: the heat to run before any trial, if that is worth more.
    """

    proposal: Proposal | None
    left_to_gain: float
    ranking: tuple[int, ...]
    reason_to_end: str | None = None
    heat: HeatProposal | None = None


@dataclass(frozen=True)
class Outlook:
    """The prospects of all configurations on offer.

    Attributes:
        gain: expected gain, ``(N,)``. worth: gain over the seconds of a usual trial and of compiling, ``(N,)``;
            negative if closed. left: see `Look.left_to_gain`.
        top: the configuration with that gain. local: only neighbours of the best count.
    """

    gain: Array
    worth: Array
    left: float
    top: Config | None
    local: bool


# `--sampler auto`: an Optuna sampler with a built-in model of training.
#
# After each trial three models are fitted: of the rates (`rates`), of the memory (`memory`) and of the duration of a
# trial (`autotune.samplers.sampler`). The next configuration is the one with the largest expected improvement per
# second of a usual trial and of compiling (Snoek, Larochelle & Adams, "Practical Bayesian optimization of machine
# learning algorithms", NIPS 2012), the seconds raised to the part of the search time that is left (Lee, Perrone,
# Archambeau & Seeger, "Cost-aware Bayesian optimization", 2020), among those that certainly fit into memory. The search
# ends when the remaining expected gain is less than the noise of a launch (Makarova et al., "Automatic termination for
# hyperparameter optimization", AutoML 2022).
#
# All proposals are determined by the space, the seed, the finished trials and heats, the running trials, and the
# seconds left, so an interrupted search resumes as it would have continued. Trials that run beside the next one count
# as if each had shown what the models expect of it.

#: Number of draws from the models for estimating how likely, and by how much, each configuration is better.
DRAWS = 64
#: The most promising of those are evaluated again with more draws.
CLOSER, CLOSER_DRAWS = 32, 512
#: In a large space, the pool gains the neighbours of this many of the best configurations, and of at most this many on
#: the way to the one that is expected to be fastest.
CENTRES, CLIMBS = 4, 12
#: During this last fraction of the search time only the neighbours of the best are refined: the worth of configurations
#: that differ in more than one knob is multiplied by FAR.
LOCAL_PART, FAR = 0.25, 1e-3
#: The search ends when the most promising trial is expected to gain less than this, or less than this fraction of a
#: launch's noise.
LEAST_GAIN, NOISE_PART = 0.002, 0.1
#: Before a search ends by itself, the priors are widened by this factor as a check.
DOUBT = 2.0
#: Worth of a configuration that is expected to be as fast as the best but to gain nothing.
NEAREST = 1e-6
#: A trial is sooner than another if it takes less than this fraction of its time.
SOONER = 0.8
#: A configuration about as fast as the best is tried only if its gain by the objective that then decides exceeds this.
LEAST_BESIDES = 0.02
#: No search ends by itself before this many complete trials, or configurations compared in heats.
FEWEST_TRIALS = 6
#: Maximum number of heats in a row. The trial in between shows whether what heats show holds for a training.
IN_A_ROW = 1
#: Fraction of the seconds left after a trial that one heat may take.
HEAT_PART = 0.5


class AutoSampler(Searcher):
    """Proposes configurations that are legal, new, fit into memory and are worth their time.

    Works with any Optuna study, autotune's own or a user's: it learns everything it knows from the study's trials.

    Args:
        seed: of the random draws.
        acceptable: the final check of each configuration; by default everything legal and new passes.
        left_s: returns the seconds left for searching. limit_s: total seconds for searching.
        capacity_bytes: device memory that a training may use; ``None`` if unknown or unlimited.
        noise_sd: returns the current estimate of the noise of one launch's logarithmic rate.
        splits: whether scores are rates.
        experience: lessons and costs that the study loop adds to as well; by default the sampler keeps its own.
        excess: returns by how much a launch exceeds what is required, as a natural logarithm, at most 0 if it does not;
            ``None`` if nothing is required.
        judge: returns a launch's score by the objective that chooses among those whose rate is within `within` of the
            fastest one's; ``None`` if the fastest wins.
        turn_s: minimum length of a turn in a heat, by side; there are no heats of a side that is missing.
        enters: returns whether there would be time for what a configuration of a heat owes its user.
        as_launched: returns whether a heat of this reference takes place in the process of the launches with which it
            is compared.
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
        excess: Callable[[Measurement], float] | None = None,
        judge: Callable[[Measurement], float] | None = None,
        within: float = 0.0,
        turn_s: Mapping[Side, float] | None = None,
        enters: Callable[[Config], bool] = lambda config: True,
        as_launched: Callable[[Config], bool] = lambda config: False,
    ) -> None:
        super().__init__(space)
        self._seed = seed
        self._acceptable = acceptable
        self._left_s = left_s
        self._limit_s = limit_s
        self._noise_sd = noise_sd
        self._learnt = Knowledge(
            space,
            seed=seed,
            capacity_bytes=capacity_bytes,
            splits=splits,
            experience=experience or Experience(),
            excess=excess,
            judge=judge,
        )
        #: Includes what is believed of the trials that run.
        self._known = self._learnt
        self._within = within
        self._turn_s = turn_s
        self._enters = enters
        self._as_launched = as_launched
        self._looked: tuple[tuple[int, ...], Look] | None = None
        self._threads = ThreadpoolController()

    @property
    def belief(self) -> float:
        """Belief in the bottleneck model, 0 to 1."""
        return self._known.rates.belief

    def fits(self, study: optuna.Study, config: Config) -> bool:
        self._learnt.learn(study)
        return self._learnt.memory.fits(config)

    def ranking(self, study: optuna.Study) -> tuple[int, ...]:
        return self.look(study).ranking

    def heat(self, study: optuna.Study) -> HeatProposal | None:
        return self.look(study).heat

    def reason_to_end(self, study: optuna.Study) -> str | None:
        look = self.look(study)
        # Before the first complete trial there is no basis for a choice, and anything may be tried.
        exhausted = look.proposal is None and (self._known.complete or not self._known.offers.open.any())
        return look.reason_to_end or (NOTHING_LEFT if exhausted else None)

    def propose(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Value]:
        proposal = self.look(study).proposal
        if proposal is None:
            # None is known to be worthwhile.
            known = self._known
            configs = (known.offers.pool.configs[i] for i in np.flatnonzero(known.offers.open))
            return dict(next((c for c in configs if self._may_try(c)), self.space.baseline))
        study._storage.set_trial_system_attr(trial._trial_id, PREDICTED, proposal.predicted.model_dump())
        return dict(proposal.config)

    def look(self, study: optuna.Study) -> Look:
        """Return the conclusions from the study's finished trials and from what is expected of the running ones;
        computed once per state of the study."""
        learnt = self._learnt
        learnt.learn(study)
        running = list(self._running(study))
        state = learnt.learnt, learnt.heats, learnt.lessons.wrong, *(number for number, _ in running)
        if self._looked is None or self._looked[0] != state:
            # The matrices are small, and idle BLAS threads that spin would take cores from the next trial.
            with self._threads.limit(limits=1, user_api="blas"):
                self._known = learnt.believing(running, self._noise_sd())
                self._looked = (state, self._look())
        return self._looked[1]

    def _running(self, study: optuna.Study) -> Iterator[tuple[int, Config]]:
        """Yield the numbers and configurations of the trials that run, except one that is being proposed."""
        for frozen in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            config = canonical(frozen.params)
            if all(name in config or is_idle(name, config) for name in self.space.choices):
                yield frozen.number, config

    def _look(self) -> Look:
        known = self._known
        known.offers.rule_out(known.lessons)
        if not known.right:
            return Look(None, math.inf, ())
        noise_sd, least = self._noise_sd(), self._least
        fitted = known.rates.fit(noise_sd)
        ranking = fitted.ranking(known.right, self.space.baseline, least)
        # A configuration that does not meet what is required is never the best, unless none does.
        ranking.sort(key=lambda i: known.numbers[i] in known.beyond)
        best, numbers = ranking[0], tuple(known.numbers[i] for i in ranking)
        centre = known.rates.seen[best].config
        fits = self._offer(fitted, [known.rates.seen[i].config for i in ranking[:CENTRES]])
        if not len(known.offers):
            return Look(None, 0.0, numbers)
        outlook = self._outlook(fitted, best, fits)
        heat = self._heat(fitted, best, outlook)
        if heat is not None and heat.gain > LEAST_GAIN:
            return Look(None, max(heat.gain, outlook.left), numbers, heat=heat)
        # Heats do not show whether a training meets what is required.
        unmet = known.meeting is not None and not known.meeting.met
        # Nor do their results count without a trial.
        enough = len(known.complete) + (0 if unmet else known.compared) >= FEWEST_TRIALS and len(known.complete) > 1
        if enough and outlook.left <= least:
            # Before giving up, check whether the models are sure only because their priors are too narrow.
            fitted = known.rates.fit(noise_sd, doubt=DOUBT)
            outlook = self._outlook(fitted, best, fits, refine=True)
        worth, why = outlook.worth, "near the best" if outlook.local else "expected gain"
        if not enough or outlook.left > least:
            # Try this while there is time: the figure for the user's own batch size takes a trial of its own.
            choice = self._at_own_batch(centre) if outlook.local else None
            choice = choice or self._first(worth, outlook.gain, fits, why) or self._risk(worth, centre)
            choice = self._soonest(choice, fitted, fits)
            return Look(self._told(choice, fitted), outlook.left, numbers)
        # Nothing worthwhile is left except configurations not known to fit, and the best at the user's own batch.
        beyond = np.where(fits | (outlook.gain < least), -1.0, worth)
        choice = (
            self._first(beyond, outlook.gain, fits, why)
            or self._at_own_batch(centre)
            or self._risk(beyond, centre)
            or self._better_besides(fitted, ranking, fits)
        )
        if choice is not None:
            return Look(self._told(choice, fitted), outlook.left, numbers)
        left, why_ended = outlook.left, "no trial that is left is expected to gain anything"
        if unmet:
            why_ended = "no trial that is left is likely to meet what is required"
        elif beyond.max() > 0:
            why_ended = "nothing more that would pay is known to fit into memory"
        elif left >= NOTHING:
            gain_text = f"the most promising trial left is expected to gain {100 * left:.2g} %"
            why_ended = f"{gain_text}, and launches of equals are taken to differ by {100 * noise_sd:.2g} %"
        return Look(None, left, numbers, why_ended)

    def _offer(self, fitted: Fitted, centres: list[Config]) -> Bools:
        """Offer the neighbours of ``centres`` and what is expected to be fastest; return which offers certainly fit.

        In a large space, no configuration of a random sample has all the values that trials and heats have shown to be
        good. They are therefore approached one knob at a time, starting from the best of the sample.
        """
        known, offers = self._known, self._known.offers
        climbed: list[Config] = []
        while True:
            offers.surround([*centres, *climbed], known.tried, known.lessons)
            fits = offers.fits(known.memory)
            eligible = offers.open & fits & ~offers.further
            if offers.whole or len(climbed) == CLIMBS or not eligible.any():
                return fits
            top = offers.pool.configs[int(np.where(eligible, fitted.mean(offers.pool), -np.inf).argmax())]
            if top in climbed:
                return fits
            climbed.append(top)

    def _soonest(self, choice: tuple[Config, str] | None, fitted: Fitted, fits: Bools) -> tuple[Config, str] | None:
        """Return, in place of a configuration that was chosen, the one of which a trial takes the least time, of those
        that load otherwise and are expected to be as fast: the proof will launch it again and again."""
        if choice is None:
            return None
        config, why = choice
        known, offers = self._known, self._known.offers
        mean = fitted.mean(offers.pool)
        chosen = float(fitted.mean(known.rates.pool([config]))[0])
        seconds = offers.seconds(known.costs, None)
        equals = [
            i
            for i in np.flatnonzero(offers.open & fits & ~offers.further & (mean >= chosen - self._least))
            if device_part(offers.pool.configs[i]) == device_part(config) and self._allowed(int(i))
        ]
        own_s = next((seconds[i] for i in equals if offers.pool.configs[i] == config), math.inf)
        soonest = min(equals, key=lambda i: float(seconds[i]), default=None)
        if soonest is None or not seconds[soonest] < SOONER * own_s < math.inf:
            return choice
        return offers.pool.configs[soonest], why

    @property
    def _least(self) -> float:
        """Gains that differ by no more than this count as equal."""
        return max(LEAST_GAIN, NOISE_PART * self._noise_sd())

    @property
    def _trial_s(self) -> float:
        """Seconds of a usual trial without compilation."""
        return self._known.costs.plain_s(self._known.space.baseline)

    @property
    def _least_per_s(self) -> float:
        """What a second is worth: what the least worthwhile trials bring that the search would still run."""
        return self._least / max(self._trial_s, 0.5)

    def _heat(self, fitted: Fitted, best: int, outlook: Outlook) -> HeatProposal | None:
        """Return the heat to run before the next trial, if one is worth its seconds."""
        known = self._known
        if self._turn_s is None or known.heats_in_a_row >= IN_A_ROW:
            return None
        # If the training waits for its loader, the loader comes first.
        draft, per_s = None, self._least_per_s
        if "loader" in self._turn_s:
            draft = self._draft_loader(fitted, best, self._turn_s["loader"])
        if "device" in self._turn_s and (draft is None or draft.more <= per_s * draft.seconds):
            beside = known.rates.seen[best].config if outlook.top is None else outlook.top
            draft = self._draft_device(fitted, best, beside, self._turn_s["device"])
        if draft is None:
            return None
        trust = float(known.trust(draft.entrants, self._least).max())
        return draft if trust * draft.more > per_s * draft.seconds else None

    def _draft_device(self, fitted: Fitted, best: int, beside: Config, turn_s: float) -> HeatProposal | None:
        """Return the most worthwhile heat of the device; ``None`` if there is nothing to compare.

        Args:
            best: index of the observation whose configuration is the reference.
            beside: the entrants are judged in combination with the remaining knobs of this configuration, those of the
                loader, which no heat of the device shows.
        """
        known = self._known
        best_config = reference = known.rates.seen[best].config
        if not self._as_launched(best_config):
            reference, beside = known.space.in_heats(best_config), known.space.in_heats(beside)
        is_known = key(reference) == key(best_config)
        if mode_of(reference) in CUDAGRAPH_MODES or not (is_known or known.may_enter(reference, "device")):
            return None
        entrants, judged = [reference], [canonical({**beside, **_switched(reference)})]
        for config in variants(known.space, reference):
            combined = canonical({**beside, **_switched(config)})
            legal = known.may_enter(config, "device") and known.space.refusal(combined) is None
            if legal and self._enters(config):
                entrants.append(config)
                judged.append(combined)
        if len(entrants) < FEWEST:
            return None
        pool = known.rates.pool(judged)
        rng = np.random.default_rng([self._seed, len(known.numbers), known.heats])
        # The part that no sum of effects captures, for configurations that no heat has shown. It is no reason to
        # compile: what one configuration gains from compiling, most others gain as well.
        unshown = ~fitted.shown(pool) & [mode_of(c) == "off" for c in entrants]
        # The best so far is known from its trial.
        unshown[0] &= not is_known
        lack = LACK_SD * unshown[:, None] * rng.standard_normal((len(entrants), HEAT_DRAWS))
        ahead, rates = fitted.differences(best, pool, HEAT_DRAWS, rng, lack)
        steps_s = STEPS * pool.batches / np.exp(rates.mean(axis=1))
        first_s = [known.costs.enters_s(mode_of(c), "" if mode_of(c) == "off" else graph(c)) for c in entrants]
        seconds = np.maximum(steps_s, STEPS / 2 * turn_s) + first_s
        guessed = [not known.costs.has_compiled(mode_of(c)) for c in entrants]
        at_worst_s = seconds + (SLOW_COMPILE - 1.0) * np.where(guessed, first_s, 0.0)
        return self._drafted("device", entrants, ahead, seconds, at_worst_s)

    def _draft_loader(self, fitted: Fitted, best: int, turn_s: float) -> HeatProposal | None:
        """Return the most worthwhile heat of the loader; ``None`` if there is nothing to compare, or the best
        configuration so far hardly waits for it.

        Args:
            best: index of the observation whose configuration is the reference.
        """
        known = self._known
        reference = known.rates.seen[best].config
        others = [c for c in loaders(known.space, reference) if known.may_enter(c, "loader")]
        if len(others) + 1 < FEWEST or fitted.sides is None or known.rates.seen[best].waits < WAITS:
            return None
        entrants = [reference, *others]
        pool = known.rates.pool(entrants)
        rng = np.random.default_rng([self._seed, len(known.numbers), known.heats])
        ahead, _ = fitted.differences(best, pool, HEAT_DRAWS, rng)
        # Each turn starts the workers, and waits for one batch from each.
        rates_per_s = np.exp(fitted.sides.loading(pool))
        start_s = LOADER_START_S + WORKER_START_S * pool.workers
        seconds = LOADER_TURNS * (start_s + np.maximum(1, pool.workers) * pool.batches / rates_per_s + turn_s)
        return self._drafted("loader", entrants, ahead, seconds, seconds)

    def _drafted(
        self, side: Side, entrants: Sequence[Config], ahead: Array, seconds: Array, at_worst_s: Array
    ) -> HeatProposal | None:
        """Return the heat of the reference and the most worthwhile entrants; ``None`` if there are too few.

        Each is the one that adds most per second. The expected maximum is submodular, so this is near the best choice
        (Nemhauser, Wolsey & Fisher, "An analysis of approximations for maximizing submodular set functions", Math.
        Programming 14, 1978). A configuration that adds much less per second than the heat gains without it, counting
        the trial that follows, waits for a later heat.

        Args:
            ahead: by how much each is faster than the best so far, in each draw, ``(N, S)``. seconds, at_worst_s: what
                each takes, as expected and if its compilation is slow, ``(N,)``.
        """
        left_s, trial_s, least_per_s = HEAT_PART * (self._left_s() - self._trial_s), self._trial_s, self._least_per_s
        better = np.maximum(0.0, ahead)
        chosen, top = [0], better[0]
        spent_s = self._known.costs.starts_s(entrants[0]) + float(seconds[0])
        while len(chosen) < MOST:
            rates = (np.maximum(better, top).mean(axis=1) - top.mean()) / seconds
            rates[spent_s + at_worst_s > left_s] = 0.0
            index = int(np.argmax(rates))
            threshold = LATER * float(top.mean()) / (spent_s + trial_s)
            if rates[index] <= max(least_per_s, threshold if len(chosen) >= FEWEST else 0.0):
                break
            chosen.append(index)
            spent_s += float(seconds[index])
            top = np.maximum(top, better[index])
        if len(chosen) < FEWEST:
            return None
        # Configurations outside the heat, such as compiled ones, are no alternative to it: they can be tried later.
        gain, single = float(better[chosen].max(axis=0).mean()), float(better[chosen].mean(axis=1).max())
        # Rounds end when they gain less per second than the heat as a whole (the marginal value theorem: Charnov,
        # "Optimal foraging", Theoretical Population Biology 9, 1976). A later heat decides what is left open.
        per_s = max(least_per_s, gain / (spent_s + trial_s))
        return HeatProposal(side, tuple(entrants[i] for i in chosen), per_s, spent_s, gain, gain - single)

    def _outlook(self, fitted: Fitted, best: int, fits: Bools, *, refine: bool = False) -> Outlook:
        """Compute the prospects of everything on offer.

        Args:
            refine: include values between and beyond those of the ladders, as is done near the end.
        """
        local = self._left_s() < LOCAL_PART * self._limit_s
        known, offers = self._known, self._known.offers
        # The draws depend only on the trials and heats, whatever else happened.
        state = [self._seed, len(known.numbers), len(known.tried), *([known.heats] * bool(known.heats))]
        rng = np.random.default_rng(state)
        gain, rate = fitted.gains(best, offers.pool, DRAWS, rng)
        seconds = offers.seconds(known.costs, np.exp(rate) if known.splits else None)
        is_open = offers.open & (seconds <= self._left_s())
        # A trial is not worth more because it starts sooner, its steps are quick or its queue is emptied soon: few
        # trials are made, and each is to be of the best there is. Compiling takes the time of several.
        cost_s = max(0.5, self._trial_s) + offers.compile_s(known.costs)
        # Gain per second alone prefers what is cheap until the end. With the time, the seconds count for less.
        cost_s **= 1.0 if math.isinf(self._limit_s) else max(0.0, min(1.0, self._left_s() / self._limit_s))
        if not (local or refine):
            is_open &= ~offers.further
        # As long as nothing meets what is required, the gain is to find something that does.
        chances = None if known.meeting is None else known.meeting.chances(offers.pool.whole)
        if known.meeting is not None and not known.meeting.met:
            gain = np.ones_like(gain)
        trust = known.trust(offers.pool.configs, self._least)
        chances = trust if chances is None else trust * chances
        gain = gain * chances
        # The maximum of many rough estimates is biased upwards: re-evaluate the most promising with more draws.
        criteria = [
            np.where(mask, values, 0.0)
            for mask in (is_open & fits, is_open & ~fits)
            for values in (gain, gain / cost_s)
        ]
        shortlist = np.unique(np.concatenate([np.argsort(-values, kind="stable")[:CLOSER] for values in criteria]))
        if known.meeting is None or known.meeting.met:
            gain[shortlist], _ = fitted.gains(best, offers.pool[shortlist], CLOSER_DRAWS, rng)
            gain[shortlist] *= chances[shortlist]
        promising = shortlist[np.argsort(-gain[shortlist], kind="stable")]
        first = next((i for i in promising if is_open[i] and fits[i] and self._allowed(i)), None)
        # Ending too early costs more than a trial too many.
        left_to_gain = 0.0 if first is None else float(gain[first] / math.sqrt(trust[first]))
        top = None if first is None else offers.pool.configs[first]
        # A configuration not known to fit needs another trial first, which costs about as much.
        cost_s *= np.where(fits, 1.0, 2.0)
        # If nothing is expected to gain anything, prefer the fastest.
        worth = np.where(is_open, (gain + NEAREST * np.exp(rate - rate.max())) / cost_s, -1.0)
        if local:
            centre = known.rates.seen[best].config
            worth = np.where([distance(c, centre) <= 1 for c in offers.pool.configs], worth, FAR * worth)
        return Outlook(gain, worth, left_to_gain, top, local)

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

    def _better_besides(self, fitted: Fitted, ranking: list[int], fits: Bools) -> tuple[Config, str] | None:
        """Return a configuration that is probably about as fast as the fastest and scores higher by the objective that
        chooses among such; ``None`` if none is worth a trial."""
        known, offers, scores = self._known, self._known.offers, self._known.scores
        if scores is None:
            return None
        best, observations = ranking[0], known.rates.seen
        least = observations[best].log_rate + math.log1p(-self._within)
        close = [known.numbers[i] for i in ranking if observations[i].log_rate >= least]
        top = max((scores.known[n] for n in close if n in scores.known and n not in known.beyond), default=None)
        if top is None:
            return None
        rng = np.random.default_rng([self._seed, len(known.numbers)])
        ahead, _ = fitted.differences(best, offers.pool, DRAWS, rng)
        about_as_fast = (ahead >= math.log1p(-self._within)).mean(axis=1)
        gain = np.where(offers.open & fits, scores.gains(offers.pool.whole, top) * about_as_fast, 0.0)
        gain = gain if known.meeting is None else gain * known.meeting.chances(offers.pool.whole)
        order = np.argsort(-gain, kind="stable")
        index = next((int(i) for i in order if gain[i] > LEAST_BESIDES and self._allowed(int(i))), None)
        return None if index is None else (offers.pool.configs[index], "about as fast, and better by the objective")

    # The choice of a configuration on offer, with a few words on why.

    def _first(self, worth: Array, gain: Array, fits: Bools, why: str) -> tuple[Config, str] | None:
        """Return the most worthwhile configuration that may be tried, or one that must be tried before it.

        Of several that are about as worthwhile the simplest is returned.

        Args:
            worth, gain: see `Outlook`.
        """
        configs = self._known.offers.pool.configs
        for i in np.argsort(-worth, kind="stable"):
            if worth[i] < 0:
                break
            if not fits[i]:
                stone = self._stepping_stone(configs[i]) if self._known.memory.may_fit(configs[i]) else None
                if stone is not None:
                    return stone, "to learn how memory grows with the batch"
            elif self._allowed(i):
                as_good = fits & (worth >= _AS_WORTHY * worth[i]) & (gain >= gain[i] - self._least)
                order = sorted(np.flatnonzero(as_good), key=lambda j: simplicity(configs[j], self.space.baseline, None))
                return configs[next((j for j in order if self._allowed(int(j))), i)], why
        return None

    def _risk(self, worth: Array, centre: Config) -> tuple[Config, str] | None:
        """Return a configuration to try if none certainly fits: the best at a smaller batch, which shows how memory
        grows, or one that is expected to fit. Without this, a training near the memory limit would have nothing to
        try."""
        if not (worth > 0).any():
            return None
        stone = self._stepping_stone(centre)
        if stone is not None:
            return stone, "to learn how memory grows with the batch"
        configs = self._known.offers.pool.configs
        for i in np.argsort(-worth, kind="stable")[:_RISKS]:
            if worth[i] > 0 and self._allowed(i) and self._known.memory.may_fit(configs[i]):
                return configs[i], "expected to fit, but not sure to"
        return None

    def _at_own_batch(self, config: Config) -> tuple[Config, str] | None:
        """Return the best configuration with the user's own batch and workload knobs, if it has not been tried."""
        user_values = {n: v for n, v in self.space.baseline.items() if n == "batch_size" or n.startswith("workload.")}
        candidate = canonical({**config, **user_values})
        return (candidate, "the best at your own batch") if self._may_try(candidate) else None

    def _allowed(self, index: int) -> bool:
        return self._acceptable(self._known.offers.pool.configs[index])

    def _may_try(self, config: Config) -> bool:
        return self._known.may_try(config) and self._acceptable(config)

    def _stepping_stone(self, config: Config) -> Config | None:
        """Return the same configuration at a smaller batch, or with the batch in more parts, from which its memory can
        be predicted; ``None`` if there is none.

        If no batch of this combination has been observed, this is the largest that certainly fits. One batch does not
        determine a line, so the next smaller one follows.
        """
        if "batch_size" not in self.space.choices or "batch_size" not in config:
            return None
        if len(self._known.memory.batches(config)) > 1:
            return None
        candidates = [canonical({**config, n: v}) for n in AT_ONCE if n in config for v in self.space.rungs(n)]
        smaller = [candidate for candidate in candidates if samples_at_once(candidate) < samples_at_once(config)]
        ranked = sorted(smaller, key=samples_at_once, reverse=True)
        return next((candidate for candidate in ranked if self._may_try(candidate)), None)
