"""Any Optuna sampler, kept inside what is legal, new and not already known to fail."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from autotune.errors import UnknownNameError
from autotune.records import Config, Value
from autotune.search.translate import distributions
from autotune.space import NEEDS_WORKERS, Space, canonical

SAMPLERS = ("tpe", "random")
#: Proposals of the inner sampler before the grid is looked through. Duplicates are by design in Optuna.
_PROPOSALS = 100
#: The grid may hold 10⁵ configurations; a fair choice among the first of them is good enough as a last resort.
_GRID_LOOK = 5000


def make_sampler(name: str, seed: int) -> BaseSampler:
    """One of Optuna's samplers by our name.

    Args:
        seed: already mixed with the number of trials that exist, so that a resumed search does not repeat them.

    Raises:
        UnknownNameError: no such sampler.
    """
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "tpe":
        with warnings.catch_warnings():
            # `group` handles knobs that are active in some trials only; it is marked experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # The start is designed, not random.
            return optuna.samplers.TPESampler(
                multivariate=True, group=True, n_startup_trials=4, constant_liar=False, seed=seed
            )
    raise UnknownNameError("sampler", name, SAMPLERS)


class LegalSampler(BaseSampler):
    """Asks another sampler until it proposes something acceptable.

    Args:
        acceptable: whether a canonical configuration may be tried now; asked again for each proposal.
    """

    def __init__(self, inner: BaseSampler, space: Space, acceptable: Callable[[Config], bool], *, seed: int) -> None:
        self._inner = inner
        self._space = space
        self._acceptable = acceptable
        self._rng = random.Random(seed)
        self._spare: dict[str, Value] | None = None

    def look_ahead(self) -> bool:
        """Whether anything acceptable is left. What was found is kept for a proposal that finds nothing, because
        what is acceptable changes with the time."""
        self._spare = next(self._untried(), None)
        return self._spare is not None

    def _untried(self) -> Iterator[dict[str, Value]]:
        return (config for config in self._space.grid() if self._acceptable(config))

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(distributions(self._space))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        # Trials with parameters of their own (enqueued ones) need no proposal.
        if "fixed_params" in trial.system_attrs:
            return {}
        for _ in range(_PROPOSALS):
            proposal = canonical(self._propose(study, trial, search_space))
            if self._acceptable(proposal):
                return dict(proposal)
        remaining = list(islice(self._untried(), _GRID_LOOK))
        return dict(self._rng.choice(remaining)) if remaining else dict(self._spare or {})

    def _propose(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Value]:
        inner_space = self._inner.infer_relative_search_space(study, trial)
        found: dict[str, Value] = self._inner.sample_relative(study, trial, inner_space)
        for name, distribution in search_space.items():
            if name not in found and not (name in NEEDS_WORKERS and found.get("num_workers") == 0):
                found[name] = self._inner.sample_independent(study, trial, name, distribution)
        return found

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._inner.before_trial(study, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: Any, values: Any) -> None:
        self._inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        self._inner.reseed_rng()
