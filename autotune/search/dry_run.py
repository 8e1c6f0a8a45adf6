"""A dry run: the size of the space, the first trials and the duration of a search, without measuring anything."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from math import prod

import optuna
from optuna.distributions import BaseDistribution

from autotune.base.records import Config
from autotune.samplers import AutoSampler, Experience, Proposal
from autotune.samplers.sampler import distributions
from autotune.search.setup import Setup
from autotune.space import Space, canonical
from autotune.stats import PRIORS
from autotune.study.budget import SEARCH_SHARE

#: Assumed time for start-up, first batch and warm-up of a small training, which a probe does not measure.
START_S = 3.0
#: The size of a space with more configurations than this is estimated, not counted.
COUNT_UP_TO = 20_000
_DRAWS = 20_000


@dataclass(frozen=True)
class DryRun:
    """The expected course of a search.

    Attributes:
        size: number of legal configurations.
        exact: the size is counted, not estimated.
        first: the trials after the baseline, if every trial gives the expected result; empty for a random sampler.
        trial_s: approximate duration of a trial without compilation, in seconds.
        search_s: maximum duration of the search, without the proof, in seconds.
    """

    space: Space
    size: int
    exact: bool
    first: tuple[Proposal, ...]
    trial_s: float
    search_s: float


def dry_run_of(setup: Setup, count: int) -> DryRun:
    """Return the expected course of a search.

    Args:
        count: number of trials to predict.
    """
    space, spec = setup.space, setup.run.spec
    size, exact = size_of(space)
    trial_s = START_S + setup.launches().plan.max_measure_s / 2
    count = min(count, spec.trials - 1 if spec.trials else count)
    first = _first(setup, trial_s, count) if spec.sampler == "auto" else ()
    return DryRun(space, size, exact, first, trial_s, SEARCH_SHARE * spec.budget_s)


def size_of(space: Space) -> tuple[int, bool]:
    """Return the number of legal configurations, and whether it was counted.

    The size of a large space is estimated from the legal share of randomly drawn combinations.
    """
    counted = sum(1 for _ in islice(space.grid(), COUNT_UP_TO + 1))
    if counted <= COUNT_UP_TO:
        return counted, True
    choices = {name: space.rungs(name) for name in space.choices}
    whole = prod(len(values) for values in choices.values())
    rng = random.Random(0)
    weight = 0.0
    for _ in range(_DRAWS):
        combination = {n: rng.choice(values) for n, values in choices.items()}
        config = canonical(combination)
        if space.combination_refusal(config) is None:
            # A configuration with inactive knobs is drawn once for each of their values.
            weight += 1 / prod(len(choices[n]) for n in combination if n not in config)
    return round(whole * weight / _DRAWS), False


def _first(setup: Setup, trial_s: float, count: int) -> tuple[Proposal, ...]:
    """Ask the sampler for trials, and report to it for each the result that it expected."""
    space, spec = setup.space, setup.run.spec
    search_s = SEARCH_SHARE * spec.budget_s
    sampler = AutoSampler(
        space,
        seed=spec.seed,
        left_s=lambda: search_s,
        limit_s=search_s,
        capacity_bytes=setup.capacity_bytes,
        noise_sd=lambda: PRIORS[setup.probe.device.partition(":")[0]].sd,
        experience=Experience(
            trial_s,
            compile_limit_s=setup.launches().limits.compile_s,
            must_compile=space.must_compile,
            sample_bytes=space.sample_bytes,
        ),
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    all_distributions: dict[str, BaseDistribution] = dict(distributions(space))

    def tell(config: Config, rate: float) -> None:
        chosen = {n: all_distributions[n] for n in config}
        study.add_trial(optuna.trial.create_trial(params=dict(config), distributions=chosen, value=rate))

    # Only ratios of rates matter.
    tell(space.baseline, 1.0)
    proposals: list[Proposal] = []
    while len(proposals) < count:
        proposal = sampler.look(study).proposal
        if proposal is None:
            break
        proposals.append(proposal)
        tell(proposal.config, proposal.predicted.rate_per_s)
    return tuple(proposals)
