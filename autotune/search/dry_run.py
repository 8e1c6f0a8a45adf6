"""What a search is going to do, before it does anything."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from math import prod

import optuna
from optuna.distributions import BaseDistribution

from autotune.records import Config
from autotune.samplers import AutoSampler, Experience, Proposal
from autotune.samplers.translate import distributions
from autotune.search.setup import Setup
from autotune.space import Space, canonical
from autotune.stats import PRIORS
from autotune.study.loop import SEARCH_SHARE

#: Start-up, first batch and warm-up of a small training; the probe shows no more than that.
START_S = 3.0
#: Above this many the size of a space is estimated.
COUNT_UP_TO = 20_000
_DRAWS = 20_000


@dataclass(frozen=True)
class Beforehand:
    """What is known before the first trial.

    Attributes:
        size: how many configurations are legal; exact: counted, not estimated.
        first: what is going to be tried after the baseline if every trial comes out as expected; empty where the
            sampler goes by chance.
        trial_s, search_s: about how long a trial takes without compiling, and how long searching may.
    """

    space: Space
    size: int
    exact: bool
    first: tuple[Proposal, ...]
    trial_s: float
    search_s: float


def look_beforehand(setup: Setup, count: int) -> Beforehand:
    """See `Beforehand`.

    Args:
        count: of trials to look ahead.
    """
    space, spec = setup.space, setup.run.spec
    size, exact = size_of(space)
    trial_s = START_S + setup.launches().plan.max_measure_s / 2
    count = min(count, spec.trials - 1 if spec.trials else count)
    first = _first(setup, trial_s, count) if spec.sampler == "auto" else ()
    return Beforehand(space, size, exact, first, trial_s, SEARCH_SHARE * spec.budget_s)


def size_of(space: Space) -> tuple[int, bool]:
    """How many configurations are legal, and whether that was counted; of a large space it is estimated from the part
    of combinations drawn at random that are legal."""
    counted = sum(1 for _ in islice(space.grid(), COUNT_UP_TO + 1))
    if counted <= COUNT_UP_TO:
        return counted, True
    choices = {name: space.legal(name) for name in space.choices}
    whole = prod(len(values) for values in choices.values())
    rng = random.Random(0)
    weight = 0.0
    for _ in range(_DRAWS):
        drawn = {n: rng.choice(values) for n, values in choices.items()}
        config = canonical(drawn)
        if space.combination_refusal(config) is None:
            # A configuration with inactive knobs stands for all their values.
            weight += 1 / prod(len(choices[n]) for n in drawn if n not in config)
    return round(whole * weight / _DRAWS), False


def _first(setup: Setup, trial_s: float, count: int) -> tuple[Proposal, ...]:
    """Ask the sampler, tell it what it expected, and so on."""
    space, spec = setup.space, setup.run.spec
    search_s = SEARCH_SHARE * spec.budget_s
    sampler = AutoSampler(
        space,
        seed=spec.seed,
        left_s=lambda: search_s,
        limit_s=search_s,
        capacity_bytes=setup.capacity_bytes,
        noise_sd=lambda: PRIORS[setup.probe.device.partition(":")[0]].sd,
        experience=Experience(usual_s=trial_s),
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    offered: dict[str, BaseDistribution] = dict(distributions(space))

    def tell(config: Config, rate: float) -> None:
        told = {n: offered[n] for n in config}
        study.add_trial(optuna.trial.create_trial(params=dict(config), distributions=told, value=rate))

    # All that counts are ratios.
    tell(space.baseline, 1.0)
    found: list[Proposal] = []
    while len(found) < count:
        proposal = sampler.look(study).proposal
        if proposal is None:
            break
        found.append(proposal)
        tell(proposal.config, proposal.predicted.rate_per_s)
    return tuple(found)
