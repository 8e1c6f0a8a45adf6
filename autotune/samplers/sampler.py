"""Restricts any Optuna sampler to configurations that are legal, new and not known to fail."""

from __future__ import annotations

import math
import random
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autotune.base.errors import UnknownNameError
from autotune.base.records import Config, Side, Value
from autotune.samplers.translate import distributions
from autotune.space import Space, canonical, distance, is_idle

SAMPLERS = ("auto", "tpe", "tpe-multivariate", "gp", "random", "grid")
#: How many proposals to request from the inner sampler before taking the nearest neighbour of the last one. Optuna
#: proposes duplicates by design. A Gaussian process is slow, and proposes the same configuration again.
_PROPOSALS, _PROPOSALS_OF_GP = 10, 1
NOTHING_LEFT = "everything legal that fits into the time left has been tried"
#: The grid may hold 10⁵ configurations; as a last resort, only this many are looked at.
_GRID_LOOK = 5000


def make_sampler(name: str, seed: int) -> BaseSampler | None:
    """Create one of Optuna's samplers by our name for it, with Optuna's defaults.

    Args:
        seed: already mixed with the number of existing trials, so that a resumed search does not repeat them.

    Returns:
        ``None`` for ``grid``, which needs no proposals: Optuna's own grid sampler cannot handle knobs that are inactive
        where others have a certain value.

    Raises:
        UnknownNameError: there is no such sampler.
    """
    if name == "grid":
        return None
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed)
    if name in ("tpe", "tpe-multivariate"):
        together = name == "tpe-multivariate"
        with warnings.catch_warnings():
            # `group` handles knobs that are active only in some trials; it is marked experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(multivariate=together, group=together, seed=seed)
    raise UnknownNameError("sampler", name, SAMPLERS)


@dataclass(frozen=True)
class HeatProposal:
    """Configurations to compare in a heat.

    Attributes:
        side: whether the device or the loader is compared.
        entrants: the first is the reference.
        least_per_s: what a second is worth elsewhere in the search: the improvement that it brings, in natural
            logarithms of the objective.
        seconds: what the heat is expected to take.
    """

    side: Side
    entrants: tuple[Config, ...]
    least_per_s: float
    seconds: float


class Searcher(BaseSampler):
    """An Optuna sampler over one space that also decides when nothing more is worth trying."""

    def __init__(self, space: Space) -> None:
        self.space = space

    @abstractmethod
    def reason_to_end(self, study: optuna.Study) -> str | None:
        """Return why there is nothing more to propose, in one sentence, or ``None``."""

    @abstractmethod
    def proposal(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Value]:
        """Return the configuration to try next, without its inactive knobs."""

    def heat(self, study: optuna.Study) -> HeatProposal | None:
        """Return the heat to run before the next trial, or ``None`` if a trial is worth more, which is the default: for
        samplers that learn only from trials."""
        return None

    def fits(self, study: optuna.Study, config: Config) -> bool:
        """Return whether a configuration certainly fits into memory, according to the trials so far. The default, for
        samplers without a memory model, is True."""
        return True

    def ranking(self, study: optuna.Study) -> tuple[int, ...]:
        """Return the numbers of the complete trials, most promising first; empty if only their scores rank them."""
        return ()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(distributions(self.space))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        # Trials with their own parameters (enqueued ones) need no proposal.
        return {} if "fixed_params" in trial.system_attrs else self.proposal(study, trial)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        # Called only for what an enqueued trial left open: use the baseline's own value if there is one.
        return self.space.baseline.get(param_name, self.space.legal(param_name)[0])


class LegalSampler(Searcher):
    """Queries another sampler until it proposes something acceptable.

    Args:
        inner: ``None`` for the order of the grid.
        acceptable: whether a canonical configuration may be tried now; called again for each proposal.
    """

    def __init__(
        self, inner: BaseSampler | None, space: Space, acceptable: Callable[[Config], bool], *, seed: int
    ) -> None:
        of_gp = isinstance(inner, optuna.samplers.GPSampler)
        super().__init__(space)
        self._proposals = 0 if inner is None else _PROPOSALS_OF_GP if of_gp else _PROPOSALS
        #: A Gaussian process learns only from complete trials.
        self._view = CompleteView(space) if of_gp else None
        self._inner = inner or optuna.samplers.RandomSampler(seed=seed)
        self._acceptable = acceptable
        self._rng = random.Random(seed)
        self._spare: dict[str, Value] | None = None

    def reason_to_end(self, study: optuna.Study) -> str | None:
        """Return why there is nothing more to propose, or ``None`` if an acceptable configuration is left. That one is
        kept in case `proposal` finds none, because what is acceptable changes over time."""
        self._spare = next(self._untried(), None)
        return NOTHING_LEFT if self._spare is None else None

    def _untried(self) -> Iterator[dict[str, Value]]:
        return (config for config in self.space.grid() if self._acceptable(config))

    def proposal(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for _ in range(self._proposals):
            found = canonical(self._ask(study, trial))
            if self._acceptable(found):
                return found
        remaining = list(islice(self._untried(), _GRID_LOOK if self._proposals else 1))
        self._rng.shuffle(remaining)
        # Closer to the inner sampler's intent than a random choice.
        return min(remaining, key=lambda c: distance(c, found), default=dict(self._spare or {}))

    def _ask(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Value]:
        if self._view is not None:
            study = self._view.of(study)
            trial = self._view.ask()
        inner_space = self._inner.infer_relative_search_space(study, trial)
        found: dict[str, Value] = self._inner.sample_relative(study, trial, inner_space)
        for name, distribution in distributions(self.space).items():
            if name not in found and not is_idle(name, found):
                found[name] = self._inner.sample_independent(study, trial, name, distribution)
        return found

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._inner.before_trial(study, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: Any, values: Any) -> None:
        self._inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        self._inner.reseed_rng()


class CompleteView:
    """A copy of a study for a sampler that learns only from complete trials. Pruned trials are added with the rate
    seen, infeasible ones with the slowest rate so far. The study itself does not contain these scores."""

    def __init__(self, space: Space) -> None:
        self._offered: dict[str, BaseDistribution] = dict(distributions(space))
        self._study = optuna.create_study(direction="maximize")
        self._entered: set[int] = set()
        self._slowest = math.inf
        self._asked: optuna.Trial | None = None

    def of(self, study: optuna.Study) -> optuna.Study:
        """Return the view, updated from the study."""
        finished = [t for t in study.get_trials(deepcopy=False) if t.state.is_finished()]
        for trial in finished:
            value = trial.value if trial.value is not None else trial.intermediate_values.get(1)
            infeasible = any(c > 0 for c in trial.constraints.values())
            if trial.number in self._entered or not trial.params or (value is None and not infeasible):
                continue
            self._entered.add(trial.number)
            self._slowest = min(self._slowest, math.inf if value is None else value)
            told = self._slowest if value is None else value
            if math.isfinite(told):
                self._study.add_trial(
                    optuna.trial.create_trial(
                        params=dict(trial.params),
                        distributions={n: self._offered[n] for n in trial.params},
                        value=told,
                    )
                )
        return self._study

    def ask(self) -> FrozenTrial:
        """Return a trial of the view, for a sampler that attaches data to its trials; it is never run."""
        if self._asked is not None:
            self._study.tell(self._asked, state=TrialState.FAIL)
        self._asked = self._study.ask()
        return self._study._storage.get_trial(self._asked._trial_id)
