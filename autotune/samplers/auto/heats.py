"""Which configurations to compare in a heat, and whether that is worth more than going on with a trial.

A heat tells, nearly without error, which of its entrants computes fastest. So what it is worth is the value of perfect
information about them: how much faster the best of them is expected to be than the one that would be tried without it.
The models' draws leave open which one that is, and so does what no sum of effects says of a configuration (Raiffa &
Schlaifer, Applied Statistical Decision Theory, 1961, ch. 4; in the search for a maximum: Frazier, Powell & Dayanik, "A
knowledge-gradient policy for sequential information collection", SIAM J. Control Optim. 47, 2008).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.base.records import Config, Side, Value
from autotune.knobs import KNOBS
from autotune.knobs.compile_mode import CUDAGRAPH_MODES, mode_of
from autotune.knobs.num_workers import WORKERS
from autotune.samplers.auto.features import Array
from autotune.samplers.auto.posterior import Knowledge
from autotune.samplers.auto.regression import Fitted
from autotune.samplers.auto.shown import LACK_SD
from autotune.samplers.sampler import HeatProposal, graph
from autotune.space import Space, canonical, key

#: More entrants are compared in the next heat, beside the best of this one.
MOST = 20
#: With fewer a trial tells as much.
FEWEST = 3
#: An entrant that brings less than this part of what the others bring per second waits for a later heat: at the
#: beginning of a search, when there is much to gain, compiling does.
LATER = 0.2
#: The first compilation in a mode may take this many times the guess; nothing else can be done in the meantime. Of
#: ResNet-50's at 96 px on two cores, guessed to take 60 s, one machine's took 33 s and another's 150 s.
SLOW_COMPILE = 2.5
#: Draws from the models.
DRAWS = 256
#: Counted steps that an entrant takes on average, and the first of each turn: many drop out after the first round.
STEPS = 6.0
#: Fraction of its time that a training waits for a loader that is worth comparing with others.
WAITS = 0.2
#: Turns that a loader takes on average, and the seconds of starting one, and each of its workers.
LOADER_TURNS, LOADER_START_S, WORKER_START_S = 2.0, 0.2, 0.05
#: Number of variants to choose from; of more, as many are drawn at random.
_VARIANTS = 4096


@dataclass(frozen=True)
class Draft:
    """A heat that could be run.

    Attributes:
        proposal: who is compared.
        gain: expected improvement by the best of them over the best so far, in natural logarithms. more: how much of
            it is not expected of the most promising one.
    """

    proposal: HeatProposal
    gain: float
    more: float


@dataclass(frozen=True)
class Terms:
    """What a heat may take, and what it must bring.

    Attributes:
        turn_s: a turn lasts at least this long. left_s: seconds that the heat may take.
        least_per_s: an entrant joins if it adds this much per second to the expected improvement.
        trial_s: seconds of the trial that follows, without which nothing is gained.
        seed: of the draws. enters: returns whether there would be time for what a configuration owes its user.
    """

    turn_s: float
    left_s: float
    least_per_s: float
    trial_s: float
    seed: Sequence[int]
    enters: Callable[[Config], bool]


def draft_device(known: Knowledge, fitted: Fitted, best: int, beside: Config, terms: Terms) -> Draft | None:
    """Return the heat of the device that is worth most; ``None`` if there is nothing to compare.

    Args:
        best: the observation whose configuration is the reference.
        beside: the entrants are judged by what they give with the other knobs of this configuration, which no heat
            shows: those of the loader.
    """
    reference = known.rates.seen[best].config
    if mode_of(reference) in CUDAGRAPH_MODES:
        return None
    entrants, judged = [reference], [canonical({**beside, **_switched(reference)})]
    for config in variants(known.space, reference):
        with_it = canonical({**beside, **_switched(config)})
        legal = known.may_enter(config, "device") and known.space.refusal(with_it) is None
        if legal and terms.enters(config):
            entrants.append(config)
            judged.append(with_it)
    if len(entrants) < FEWEST:
        return None
    pool = known.rates.pool(judged)
    rng = np.random.default_rng(list(terms.seed))
    # What no sum of effects says of those that no heat has shown. It is no reason to compile: what compiling gives to
    # one configuration, it mostly gives to the next.
    unshown = ~fitted.shown(pool) & [mode_of(c) == "off" for c in entrants]
    # The best so far is known from its trial.
    unshown[0] = False
    own = LACK_SD * unshown[:, None] * rng.standard_normal((len(entrants), DRAWS))
    ahead, rates = fitted.differences(best, pool, DRAWS, rng, own)
    steps_s = STEPS * pool.batches / np.exp(rates.mean(axis=1))
    compile_s = [known.costs.compile_s(mode_of(c), "" if mode_of(c) == "off" else graph(c)) for c in entrants]
    seconds = np.maximum(steps_s, STEPS / 2 * terms.turn_s) + compile_s
    guessed = [not known.costs.has_compiled(mode_of(c)) for c in entrants]
    at_worst_s = seconds + (SLOW_COMPILE - 1.0) * np.where(guessed, compile_s, 0.0)
    return _drafted("device", entrants, ahead, seconds, at_worst_s, known.costs.starts_s(reference), terms)


def draft_loader(known: Knowledge, fitted: Fitted, best: int, terms: Terms) -> Draft | None:
    """Return the heat of the loader that is worth most; ``None`` if there is nothing to compare, or the best so far
    hardly waits for it.

    Args:
        best: the observation whose configuration is the reference.
    """
    reference = known.rates.seen[best].config
    others = [c for c in loaders(known.space, reference) if known.may_enter(c, "loader")]
    if len(others) + 1 < FEWEST or fitted.sides is None or known.rates.seen[best].waits < WAITS:
        return None
    entrants = [reference, *others]
    pool = known.rates.pool(entrants)
    rng = np.random.default_rng(list(terms.seed))
    ahead, _ = fitted.differences(best, pool, DRAWS, rng)
    # Each turn starts the workers, and waits for a batch of each.
    rates_per_s = np.exp(fitted.loading(pool))
    start_s = LOADER_START_S + WORKER_START_S * pool.workers
    seconds = LOADER_TURNS * (start_s + np.maximum(1, pool.workers) * pool.batches / rates_per_s + terms.turn_s)
    return _drafted("loader", entrants, ahead, seconds, seconds, known.costs.starts_s(reference), terms)


def _drafted(
    side: Side,
    entrants: Sequence[Config],
    ahead: Array,
    seconds: Array,
    at_worst_s: Array,
    begin_s: float,
    terms: Terms,
) -> Draft | None:
    """Return the heat of the most worthwhile entrants; ``None`` if there are too few.

    Args:
        ahead: by how much each is faster than the best so far, in each draw, ``(N, S)``. seconds, at_worst_s: expected
            of each, and if its compilation is slow, ``(N,)``.
    """
    better = np.maximum(0.0, ahead)
    chosen, spent_s = _greedy(better, seconds, at_worst_s, begin_s, terms)
    if len(chosen) < FEWEST:
        return None
    # What is not in the heat, such as a compile, is no alternative to it: it can be tried afterwards.
    gain, single = float(better[chosen].max(axis=0).mean()), float(better[chosen].mean(axis=1).max())
    # Rounds end when they bring less per second than the whole does (the marginal value theorem: Charnov, "Optimal
    # foraging", Theoretical Population Biology 9, 1976). What is left open, a later heat decides.
    per_s = max(terms.least_per_s, gain / (spent_s + terms.trial_s))
    proposal = HeatProposal(side, tuple(entrants[i] for i in chosen), per_s, spent_s)
    return Draft(proposal, gain, gain - single)


def _greedy(better: Array, seconds: Array, at_worst_s: Array, begin_s: float, terms: Terms) -> tuple[list[int], float]:
    """Return the chosen configurations, the first of which is given, and the seconds they take.

    Each is the one that adds most per second. The expected maximum is submodular, so this is near the best choice
    (Nemhauser, Wolsey & Fisher, "An analysis of approximations for maximizing submodular set functions", Math.
    Programming 14, 1978). One that adds much less per second than the heat brings without it, with the trial that
    follows, waits for a later heat.

    Args:
        better: improvement of each configuration in each draw, ``(N, S)``. seconds, at_worst_s: of each, ``(N,)``.
    """
    chosen, top = [0], better[0]
    spent_s = begin_s + float(seconds[0])
    while len(chosen) < MOST:
        rates = (np.maximum(better, top).mean(axis=1) - top.mean()) / seconds
        rates[spent_s + at_worst_s > terms.left_s] = 0.0
        one = int(np.argmax(rates))
        later = LATER * float(top.mean()) / (spent_s + terms.trial_s)
        if rates[one] <= max(terms.least_per_s, later if len(chosen) >= FEWEST else 0.0):
            break
        chosen.append(one)
        spent_s += float(seconds[one])
        top = np.maximum(top, better[one])
    return chosen, spent_s


def _switched(config: Config) -> dict[str, Value]:
    """Return the part of a configuration that a running training can be switched to."""
    return {n: v for n, v in config.items() if n in KNOBS and KNOBS[n].switchable}


def variants(space: Space, reference: Config) -> Iterator[dict[str, Value]]:
    """Yield the configurations that a training of the reference can be switched to; some, if there are very many."""
    names = [n for n in _switched(reference) if n in space.choices and n not in space.between_launches]
    values = [(*space.rungs(n), *space.beside(n, reference[n])) for n in names]
    every = range(math.prod(map(len, values)))
    for number in every if len(every) <= _VARIANTS else random.Random(0).sample(every, _VARIANTS):
        choice = []
        left = number
        for some in values:
            left, place = divmod(left, len(some))
            choice.append(some[place])
        found = canonical({**reference, **dict(zip(names, choice, strict=True))})
        if key(found) != key(reference) and space.why_apart(reference, found) is None:
            yield found


def loaders(space: Space, reference: Config) -> list[dict[str, Value]]:
    """Return the reference with other numbers of workers.

    What else a loader has, its own rate does not show: queues smooth the waits of a training, pinning helps the device,
    and workers that persist the epoch turn.
    """
    counts = space.rungs(WORKERS) if WORKERS in space.choices and WORKERS not in space.between_launches else ()
    others = [space.completed({**reference, WORKERS: n}) for n in counts if n != reference.get(WORKERS)]
    return [config for config in others if space.refusal(config) is None]
