"""Any Optuna sampler, kept inside what is legal, new and not already known to fail."""

from __future__ import annotations

import math
import random
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import UnknownNameError
from autotune.records import Config, Value
from autotune.samplers.translate import distributions
from autotune.space import Space, canonical, distance, is_idle

SAMPLERS = ("auto", "tpe", "tpe-multivariate", "gp", "random", "grid")
#: Proposals of the inner sampler before its last one's nearest neighbour is taken. Duplicates are by design in Optuna.
#: A Gaussian process takes its time, and proposes the same again.
_PROPOSALS, _PROPOSALS_OF_GP = 10, 1
NOTHING_LEFT = "everything legal that fits into the time left has been tried"
#: The grid may hold 10⁵ configurations; the first of them are good enough as a last resort.
_GRID_LOOK = 5000


def make_sampler(name: str, seed: int) -> BaseSampler | None:
    """One of Optuna's samplers by our name, as Optuna has it by default.

    Args:
        seed: already mixed with the number of trials that exist, so that a resumed search does not repeat them.

    Returns:
        ``None`` for ``grid``, which needs no proposals: Optuna's own grid does not know that some knobs are inactive
        where others have a certain value.

    Raises:
        UnknownNameError: no such sampler.
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
            # `group` handles knobs that are active in some trials only; it is marked experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(multivariate=together, group=together, seed=seed)
    raise UnknownNameError("sampler", name, SAMPLERS)


class Searcher(BaseSampler):
    """An Optuna sampler over one space that also says when nothing more is worth trying."""

    def __init__(self, space: Space) -> None:
        self.space = space

    @abstractmethod
    def reason_to_end(self, study: optuna.Study) -> str | None:
        """Why there is nothing more to propose, one sentence, or ``None``."""

    @abstractmethod
    def proposal(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Value]:
        """The configuration to try next, without its inactive knobs."""

    def fits(self, study: optuna.Study, config: Config) -> bool:
        """Whether a configuration surely fits into memory, by the trials so far; one that knows nothing of memory takes
        it to."""
        return True

    def ranking(self, study: optuna.Study) -> tuple[int, ...]:
        """Numbers of the complete trials, the most promising first; empty where only their scores say which that is."""
        return ()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(distributions(self.space))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        # Trials with parameters of their own (enqueued ones) need no proposal.
        return {} if "fixed_params" in trial.system_attrs else self.proposal(study, trial)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        # Only what an enqueued trial left open comes here: the baseline's own value, where there is one.
        return self.space.baseline.get(param_name, self.space.legal(param_name)[0])


class LegalSampler(Searcher):
    """Asks another sampler until it proposes something acceptable.

    Args:
        inner: ``None``: in the order of the grid.
        acceptable: whether a canonical configuration may be tried now; asked again for each proposal.
    """

    def __init__(
        self, inner: BaseSampler | None, space: Space, acceptable: Callable[[Config], bool], *, seed: int
    ) -> None:
        of_gp = isinstance(inner, optuna.samplers.GPSampler)
        super().__init__(space)
        self._proposals = 0 if inner is None else _PROPOSALS_OF_GP if of_gp else _PROPOSALS
        #: A Gaussian process sees complete trials alone.
        self._view = CompleteView(space) if of_gp else None
        self._inner = inner or optuna.samplers.RandomSampler(seed=seed)
        self._acceptable = acceptable
        self._rng = random.Random(seed)
        self._spare: dict[str, Value] | None = None

    def reason_to_end(self, study: optuna.Study) -> str | None:
        """Why there is nothing more to propose, or ``None``: something acceptable is left. What was found is kept for a
        proposal that finds nothing, because what is acceptable changes with the time."""
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
        # Nearer to what it wanted than a choice by chance.
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
    """A study as a sampler has to see it that learns from complete trials alone: what was ended early with the rate
    seen, and what is infeasible as the slowest so far. Our own record of the study knows no such scores."""

    def __init__(self, space: Space) -> None:
        self._offered: dict[str, BaseDistribution] = dict(distributions(space))
        self._study = optuna.create_study(direction="maximize")
        self._entered: set[int] = set()
        self._slowest = math.inf
        self._asked: optuna.Trial | None = None

    def of(self, study: optuna.Study) -> optuna.Study:
        """The view, up to date with the study."""
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
        """A trial of the view, for a sampler that keeps notes on its trials; none is ever run."""
        if self._asked is not None:
            self._study.tell(self._asked, state=TrialState.FAIL)
        self._asked = self._study.ask()
        return self._study._storage.get_trial(self._asked._trial_id)
