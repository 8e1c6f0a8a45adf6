"""Compares what the loader of a finalist delivers with what that of the baseline does."""

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
from autotune.search.verify.final import Final
from autotune.search.verify.race import Entrant, ended_from_outside
from autotune.search.verify.train_check import checked
from autotune.space import canonical, is_loaders, key, loads_as

#: Seconds of such a launch beyond its start, as a first guess.
TAKES_S = 5.0
_NO_TIME = "there was no time to compare what its loader delivers"


def check_data(final: Final, one: Entrant) -> DataVerdict:
    """Compare what a finalist's loader delivers with what the baseline's does. What an earlier run of the study has
    compared is not compared again."""
    baseline = final.space.baseline
    number = one.trial.number
    if loads_as(one.config, baseline):
        return not_compared(final, one, "")
    if not final.sees_inside:
        return _not(one, "what a program's loader delivers is not seen")
    config = _compared(final, one.config)
    own = own_deliveries(final)
    if isinstance(own, str):
        return _not(one, own)
    plan = stats.plan_beside(own)
    if plan is None:
        return _not(one, own.lost or "no batch of a loader of PyTorch's was seen")
    result = checked(final, config)
    if result is None or result.check is None or result.check.deliveries is None:
        result = _result(final, f"data-{_digest(config)}", f"comparing what trial {number} loads", config, plan)
    if result is None:
        return _not(one, _NO_TIME)
    other = None if result.check is None else result.check.deliveries
    if other is None:
        outside = ended_from_outside(result) or result.check is not None
        why = f"its launch ended as {result.status}: {result.cause}" if result.check is None else "nothing was noted"
        return _not(one, why, passed=None if outside else False)
    found = stats.compare_data(own, other)
    passed, reason = found.passed, found.reason
    if passed and one.config.get(PERSISTENT.name) and not baseline.get(PERSISTENT.name) and found.epochs < 2:
        passed, reason = None, "no second epoch was seen with workers that persist"
    if passed is False and not _repeats(final, own, plan):
        passed, reason = None, "the baseline itself delivers other samples in each launch"
    return DataVerdict(
        trial=number,
        config=one.config,
        passed=passed,
        reason=reason,
        batches=found.batches,
        samples=found.samples,
        epochs=found.epochs,
    )


def not_compared(final: Final, one: Entrant, reason: str) -> DataVerdict:
    """Return that what an entrant's loader delivers was not compared, for this reason, unless it is set as the
    baseline's, which needs no comparison."""
    if loads_as(one.config, final.space.baseline):
        return DataVerdict(trial=one.trial.number, config=one.config, passed=True, needless=True)
    return _not(one, reason)


def own_deliveries(final: Final) -> Deliveries | str:
    """Return what the baseline's loader delivers, or why that is not known: of a script, its probe has noted it."""
    if final.by_command:
        return final.deliveries or "what the script's own loader delivers was not noted"
    config = _compared(final, final.space.baseline)
    result = _result(final, "data-own", "noting what the baseline loads", config, DeliveryPlan())
    if result is None:
        return _NO_TIME
    if result.check is None or result.check.deliveries is None:
        return f"what the baseline's loader delivers was not noted: {result.cause or 'nothing came'}"
    return result.check.deliveries


def _repeats(final: Final, own: Deliveries, plan: DeliveryPlan) -> bool:
    """Return whether the baseline delivers the same once more; otherwise nothing follows from a difference."""
    config = _compared(final, final.space.baseline)
    again = _result(final, "data-again", "comparing what the baseline loads with itself", config, plan)
    noted = None if again is None or again.check is None else again.check.deliveries
    # Without time to see it, a difference is taken for one.
    return noted is None or stats.compare_data(own, noted).passed is not False


def _compared(final: Final, config: Config) -> dict[str, Value]:
    """Return what is launched: of a script the configuration itself, of a workload its loader beside all else as in the
    baseline; both at the user's own batch size."""
    baseline = final.space.baseline
    batch = baseline["batch_size"]
    if final.by_command:
        return canonical({**config, "batch_size": batch})
    others = {n: v for n, v in baseline.items() if not is_loaders(n)}
    return canonical({**others, **{n: v for n, v in config.items() if is_loaders(n)}, "batch_size": batch})


def _result(final: Final, name: str, title: str, config: Config, plan: DeliveryPlan) -> TrialResult | None:
    """Run a launch that notes what is delivered, or return what an earlier one has; ``None`` if no time is left."""
    launches = final.launches
    if launches.finished(name, config) is None and launches.budget.left_s <= 0:
        return None
    # Nothing is looked at but what is delivered: the first loss ends it as well.
    check = CheckPlan(store=str(launches.files.checks), steps=1, deliveries=plan)
    result = launches.run_outside(LaunchKind.TRAIN_CHECK, name, title, config, check=check)
    final.raise_if_stopped()
    return result


def _not(one: Entrant, reason: str, *, passed: bool | None = None) -> DataVerdict:
    return DataVerdict(trial=one.trial.number, config=one.config, passed=passed, reason=reason)


def _digest(config: Config) -> str:
    return hashlib.sha256(key(config).encode()).hexdigest()[:8]


def takes_s(final: Final, entrants: Sequence[Entrant]) -> float:
    """Return the seconds to keep for comparing the winner's data, if a finalist's loader is set otherwise."""
    baseline = final.space.baseline
    others = [one for one in entrants if not loads_as(one.config, baseline)]
    if not others or not final.sees_inside:
        return 0.0
    start_s = min((m.startup_s for one in others for m in one.seen), default=0.0)
    # Of a workload the baseline's are noted as well.
    return (start_s + TAKES_S) * (1 if final.by_command else 2)
