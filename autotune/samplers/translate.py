"""Converts between our space and Optuna's: distributions, suggestions, and reported results."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState

from autotune.base.records import INFEASIBLE, StudyHeat, TrialStatus, Value
from autotune.space import Space, is_idle

#: Name of the constraint; Optuna treats values above zero as infeasible.
CONSTRAINT = "feasible"
#: Excess that is told of a figure that is not known: not infinity, which Optuna's storage does not take.
_MOST_EXCESS = 1e3
#: Attribute of an Optuna trial that holds our own record of it.
RECORD = "autotune"
#: Start of the names of an Optuna study's attributes that hold its heats.
HEAT = "autotune_heat_"
#: Attribute of an Optuna trial that holds its `Prediction`.
PREDICTED = "autotune_predicted"


def distributions(space: Space) -> dict[str, CategoricalDistribution]:
    """One categorical distribution per knob, over its legal values.

    The baseline's value is always included, even if ``--set`` excludes it: trial 0 uses it.
    """
    found = {}
    for name in space.choices:
        values = list(space.legal(name))
        stated = space.baseline.get(name)
        if stated is not None and not any(v == stated and type(v) is type(stated) for v in values):
            values.insert(0, stated)
        found[name] = CategoricalDistribution(values)
    return found


def suggest(trial: optuna.Trial, space: Space) -> dict[str, Value]:
    """Suggest a configuration for a trial, without inactive knobs."""
    config: dict[str, Value] = {}
    for name, distribution in distributions(space).items():
        if is_idle(name, config):
            continue
        config[name] = trial.suggest_categorical(name, distribution.choices)  # type: ignore[assignment]
    return config


def tell(
    study: optuna.Study,
    trial: optuna.Trial,
    status: TrialStatus,
    *,
    scores: Sequence[float],
    rate_seen_per_s: float | None,
    excess: float = 0.0,
) -> None:
    """Report to Optuna how a trial ended.

    ``complete``: its scores, with a violated constraint if it does not meet what is required. Infeasible: PRUNED with a
    violated constraint, because TPE ignores FAIL. ``pruned``: PRUNED with the rate seen, so that TPE ranks it below
    complete trials. Anything else: FAIL, because it says nothing about the configuration.

    Args:
        scores: by each objective; empty if there is none.
        excess: by how much the trial fails to meet what is required, at most 0 if it meets it.
    """
    # If the process was killed between this and tell(), the constraint is set already; Optuna warns about a second one.
    if not trial.storage.get_trial(trial._trial_id).constraints:
        violated = 1.0 if status in INFEASIBLE else min(excess, _MOST_EXCESS)
        trial.set_constraint(CONSTRAINT, max(0.0, violated))
    if status is TrialStatus.COMPLETE and scores:
        study.tell(trial, list(scores))
    elif status in INFEASIBLE:
        study.tell(trial, state=TrialState.PRUNED)
    elif status is TrialStatus.PRUNED:
        if rate_seen_per_s is not None:
            trial.report(rate_seen_per_s, step=1)
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, state=TrialState.FAIL)


def heats_of(study: optuna.Study) -> list[StudyHeat]:
    """Return the heats of a study, in order."""
    attributes = study.user_attrs
    return [StudyHeat.model_validate(attributes[name]) for name in sorted(attributes) if name.startswith(HEAT)]
