"""Compares what a finalist's loader delivers with what the baseline's does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from autotune import stats
from autotune.base.records import (
    CheckPlan,
    Config,
    DataVerdict,
    Deliveries,
    DeliveryPlan,
    LaunchKind,
    TrialResult,
    Value,
)
from autotune.knobs.persistent_workers import KNOB as PERSISTENT
from autotune.search.proof import ProofContext
from autotune.search.proof.race import Entrant, ended_from_outside
from autotune.search.proof.train_check import checked
from autotune.space import canonical, device_part, is_loaders, key, loads_as

#: Seconds that such a launch takes beyond its startup, as a first guess.
TAKES_S = 5.0
_NO_TIME = "there was no time to compare what its loader delivers"


def check_data(context: ProofContext, one: Entrant) -> DataVerdict:
    """Compare what a finalist's loader delivers with what the baseline's does, unless an earlier run of the study has
    done so."""
    baseline = context.space.baseline
    number = one.trial.number
    if loads_as(one.config, baseline):
        return not_compared(context, one, "")
    if not context.sees_inside:
        return _not(one, "what a program's loader delivers is not seen")
    config = _compared(context, one.config)
    baseline_deliveries = own_deliveries(context)
    if isinstance(baseline_deliveries, str):
        return _not(one, baseline_deliveries)
    plan = stats.plan_beside(baseline_deliveries)
    if plan is None:
        return _not(one, baseline_deliveries.lost or "no batch of a loader of PyTorch's was seen")
    result = checked(context, config)
    if result is None or result.check is None or result.check.deliveries is None:
        result = _result(context, f"data-{_digest(config)}", f"comparing what trial {number} loads", config, plan)
    if result is None:
        return _not(one, _NO_TIME)
    deliveries = None if result.check is None else result.check.deliveries
    if deliveries is None:
        is_from_outside = ended_from_outside(result) or result.check is not None
        cause = f"its launch ended as {result.status}: {result.cause}" if result.check is None else "nothing was noted"
        return _not(one, cause, passed=None if is_from_outside else False)
    comparison = stats.compare_data(baseline_deliveries, deliveries)
    passed, reason = comparison.passed, comparison.reason
    if passed and one.config.get(PERSISTENT.name) and not baseline.get(PERSISTENT.name) and comparison.epochs < 2:
        passed, reason = None, "no second epoch was seen with workers that persist"
    if passed is False and not _repeats(context, baseline_deliveries, plan):
        passed, reason = None, "the baseline itself delivers other samples in each launch"
    return DataVerdict(
        trial=number,
        config=one.config,
        passed=passed,
        reason=reason,
        batches=comparison.batches,
        samples=comparison.samples,
        epochs=comparison.epochs,
    )


def not_compared(context: ProofContext, one: Entrant, reason: str) -> DataVerdict:
    """Return the verdict that an entrant's deliveries were not compared, for this reason; or, if its loader is set as
    the baseline's, that they need no comparison."""
    if loads_as(one.config, context.space.baseline):
        return DataVerdict(trial=one.trial.number, config=one.config, passed=True, needless=True)
    return _not(one, reason)


def own_deliveries(context: ProofContext) -> Deliveries | str:
    """Return what the baseline's loader delivers, or why that is unknown. For a script, the probe has noted it."""
    if context.by_command:
        return context.deliveries or "what the script's own loader delivers was not noted"
    config = _compared(context, context.space.baseline)
    result = _result(context, "data-own", "noting what the baseline loads", config, DeliveryPlan())
    if result is None:
        return _NO_TIME
    if result.check is None or result.check.deliveries is None:
        return f"what the baseline's loader delivers was not noted: {result.cause or 'nothing came'}"
    return result.check.deliveries


def _repeats(context: ProofContext, own: Deliveries, plan: DeliveryPlan) -> bool:
    """Return whether the baseline delivers the same again; otherwise a difference means nothing."""
    config = _compared(context, context.space.baseline)
    again = _result(context, "data-again", "comparing what the baseline loads with itself", config, plan)
    deliveries = None if again is None or again.check is None else again.check.deliveries
    # If there is no time to find out, a difference counts as a real one.
    return deliveries is None or stats.compare_data(own, deliveries).passed is not False


def _compared(context: ProofContext, config: Config) -> dict[str, Value]:
    """Return the configuration to launch: for a script the configuration itself, for a workload its loader with all
    else as in the baseline; both at the user's own batch size."""
    baseline = context.space.baseline
    batch = baseline["batch_size"]
    if context.by_command:
        return canonical({**config, "batch_size": batch})
    return canonical(
        {**device_part(baseline), **{n: v for n, v in config.items() if is_loaders(n)}, "batch_size": batch}
    )


def _result(context: ProofContext, name: str, title: str, config: Config, plan: DeliveryPlan) -> TrialResult | None:
    """Run a launch that notes what is delivered, or return an earlier one's result; ``None`` if no time is left."""
    launches = context.launches
    if launches.finished(name, config) is None and launches.budget.left_s <= 0:
        return None
    # Only the deliveries matter, so the first loss also ends the launch.
    check = CheckPlan(store=str(launches.files.checks), steps=1, deliveries=plan)
    result = launches.run_outside(LaunchKind.TRAIN_CHECK, name, title, config, check=check)
    context.raise_if_stopped()
    return result


def _not(one: Entrant, reason: str, *, passed: bool | None = None) -> DataVerdict:
    return DataVerdict(trial=one.trial.number, config=one.config, passed=passed, reason=reason)


def _digest(config: Config) -> str:
    return hashlib.sha256(key(config).encode()).hexdigest()[:8]


def takes_s(context: ProofContext, entrants: Sequence[Entrant]) -> float:
    """Return the seconds to reserve for comparing the winner's data, if a finalist's loader is set differently."""
    baseline = context.space.baseline
    differing = [one for one in entrants if not loads_as(one.config, baseline)]
    if not differing or not context.sees_inside:
        return 0.0
    start_s = min((m.startup_s for one in differing for m in one.seen), default=0.0)
    # For a workload, the baseline's deliveries are noted as well.
    return (start_s + TAKES_S) * (1 if context.by_command else 2)
