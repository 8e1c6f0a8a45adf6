"""Checks that every finalist trains like eager fp32, with equal weights and batches and the user's batch size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from autotune.base.errors import WorkloadError
from autotune.space.formatting import listed
from autotune.knobs import KNOBS, Scope
from autotune.knobs.compile_mode import eager
from autotune.base.records import (
    CheckPlan,
    Config,
    DeliveryPlan,
    LaunchKind,
    TrainCheck,
    TrainVerdict,
    TrialResult,
    TrialStatus,
    Value,
)
from autotune.samplers import WARM_COMPILE
from autotune.space import Space, canonical, key, maths_part, samples_at_once
from autotune.stats import compare_data, plan_beside
from autotune.search.verify.entrant import Entrant, ended_from_outside
from autotune.search.verify.final import Final
from autotune.search.verify.judgements import judge

#: Seeds of the eager fp32 runs whose differences determine the tolerance.
REFERENCE_SEEDS = (0, 1, 2)
#: Fewer steps show nothing of a curve; more cost more than they tell.
FEWEST_STEPS, MOST_STEPS = 8, 24
#: Duration of a check without its steps, relative to the startup time of a launch.
_START_MARGIN = 1.25


@dataclass(frozen=True)
class _Group:
    """Finalists that train in the same way, and the configuration of their eager fp32 reference.

    Attributes:
        config: what is checked. instead: it is eager, and the finalists compile.
    """

    entrants: tuple[Entrant, ...]
    config: dict[str, Value]
    reference: dict[str, Value]
    instead: bool = False


def check_training(
    final: Final,
    baseline: Entrant,
    entrants: Sequence[Entrant],
    share_s: float,
    *,
    earlier: Sequence[TrainVerdict] = (),
) -> list[TrainVerdict]:
    """Check the finalists. Those that fail drop out of the race.

    Args:
        earlier: verdicts of this study, whose eager fp32 runs need not be run again.

    Finalists that differ only in loader and batch size share one check. Those that compute exactly as the baseline does
    need none: what their loaders deliver is compared (see `autotune.search.verify.data_check`). If compiling for the user's
    batch size would take longer than there is time, the same configuration is checked without compiling, and the
    verdict says so.
    """
    groups, share_s = _groups(final, entrants), min(share_s, final.launches.budget.left_s)
    if not groups:
        return []
    if not final.sees_inside:
        why = "the losses of a program are not seen"
        verdicts = [_verdict(group, None, why).model_copy(update={"beside": final.beside}) for group in groups]
        for verdict in verdicts:
            final.observer.says(_unchecked(verdict))
        return verdicts
    paid, done = _paid(final, groups, earlier)
    before = final.launches.finished(_reference_name(_store(final, groups[0].reference), 0), groups[0].reference)
    if before is not None and before.check is not None:
        # Every further check has as many steps: curves of different lengths cannot be compared.
        chosen, steps = _affordable(baseline, groups, share_s, paid, done)[0], len(before.check.losses)
    else:
        chosen, steps = _affordable(baseline, groups, share_s, paid, done)
    references: dict[str, list[TrainCheck] | str] = {}
    checked: dict[str, TrainVerdict] = {}
    verdicts = []
    for group, affordable in zip(groups, chosen, strict=True):
        store = _store(final, group.reference)
        if affordable is None:
            untold = _verdict(group, None, "there was no time to check it")
            verdict = untold.model_copy(update={"beside": final.beside})
        else:
            if key(group.reference) not in references:
                references[key(group.reference)] = _run_references(final, group.reference, steps, store)
            # An eager twin may be a finalist itself.
            name = key(affordable.config)
            if name not in checked:
                yardstick = references[key(group.reference)]
                checked[name] = _check(final, affordable, yardstick, steps, store)
            verdict = _verdict_for(affordable, checked[name])
        verdicts.append(verdict)
        if verdict.passed is False:
            for one in group.entrants:
                one.out = f"fast but wrong: {verdict.reason}"
            final.observer.says(f"{_who(verdict)}: fast but wrong: {verdict.reason}")
        elif verdict.passed is None:
            final.observer.says(_unchecked(verdict))
    return verdicts


def not_checked(final: Final, one: Entrant, reason: str) -> list[TrainVerdict]:
    """Return that it was not checked how an entrant trains, for this reason; nothing if it computes as the baseline."""
    verdicts = [_verdict(group, None, reason) for group in _groups(final, [one])]
    return [verdict.model_copy(update={"beside": final.beside}) for verdict in verdicts]


def train_alike(final: Final, one: Entrant, other: Entrant) -> bool:
    """Return whether one check tells of both: they differ only in loader and batch size."""
    baseline = final.space.baseline
    return key(_at_users_batch(one.config, baseline)) == key(_at_users_batch(other.config, baseline))


def need_s(final: Final, baseline: Entrant, entrants: Sequence[Entrant], earlier: Sequence[TrainVerdict] = ()) -> float:
    """Return about how many seconds a check on any of these entrants takes at least, with its references.

    Args:
        earlier: see `check_training`.
    """
    groups = _groups(final, entrants) if final.sees_inside else []
    paid, done = _paid(final, groups, earlier)
    costs = [_cost(baseline, [group], paid, done) for group in groups]
    return max((fixed_s + FEWEST_STEPS * step_s for fixed_s, step_s in costs), default=0.0)


def is_told_by(final: Final, verdict: TrainVerdict, one: Entrant) -> bool:
    """Return whether a verdict says how an entrant of a script trains, or why that was not checked. That others could
    not be checked says nothing of it."""
    if one.trial.number not in verdict.trials:
        return False
    return verdict.passed is not None or verdict.config == _as_checked(final, one.config)


def _paid(final: Final, groups: Sequence[_Group], earlier: Sequence[TrainVerdict]) -> tuple[set[str], set[str]]:
    """Return keys of the references and of the checks that have been run already, also by an earlier run of the
    study."""
    launches = final.launches
    paid = {key(_reference(v.config, final)) for v in earlier if v.reference}
    done = set()
    for group in groups:
        store = _store(final, group.reference)
        names = [_reference_name(store, seed) for seed in REFERENCE_SEEDS]
        if all(launches.finished(name, group.reference) is not None for name in names):
            paid.add(key(group.reference))
        for config in (group.config, canonical(eager(group.config))):
            if launches.finished(_check_name(store, config), config) is not None:
                done.add(key(config))
    return paid, done


def _as_checked(final: Final, config: Config) -> dict[str, Value]:
    """Return what is launched to check a script's configuration: with its loader, at the user's batch size."""
    return canonical({**config, "batch_size": final.space.baseline["batch_size"]})


def _unchecked(verdict: TrainVerdict) -> str:
    return f"{_who(verdict)}: not checked for how it trains: {verdict.reason}"


def _who(verdict: TrainVerdict) -> str:
    return " and ".join(f"trial {n}" for n in verdict.trials)


def _store(final: Final, reference: Config) -> str:
    """Name the saved weights and batches that a group starts from, which depend on its reference alone."""
    # Curves over samples in the order of `DeliveryPlan` are not comparable with those of a study before it.
    return f"{_digest(reference)}{'' if _noted(final) is None else '-ordered'}"


def _noted(final: Final) -> DeliveryPlan | None:
    """Return how much of what a script's loader delivers is noted in its checks; ``None`` if it is not known to go on
    when an epoch ends early."""
    plan = plan_beside(final.deliveries)
    return None if plan is None or plan.epochs < 2 else plan


def _digest(config: Config) -> str:
    return hashlib.sha256(key(config).encode()).hexdigest()[:8]


def _groups(final: Final, entrants: Sequence[Entrant]) -> list[_Group]:
    baseline = final.space.baseline
    found: dict[str, list[Entrant]] = {}
    for one in entrants:
        config = _at_users_batch(one.config, baseline)
        if config != canonical(baseline):
            found.setdefault(key(config), []).append(one)
    groups = []
    for members in found.values():
        config = _at_users_batch(members[0].config, baseline)
        if final.by_command:
            # A script trains with its loader: it is the most promising of them itself that is checked.
            config = _as_checked(final, members[0].config)
        groups.append(_Group(tuple(members), config, _reference(config, final)))
    return groups


def _at_users_batch(config: Config, baseline: Config) -> dict[str, Value]:
    """Return the configuration to check: the maths of ``config`` with the baseline's batch, loader and threads."""
    own = {n: v for n, v in baseline.items() if n not in maths_part(baseline)}
    return canonical({**own, **maths_part(config), "batch_size": baseline["batch_size"]})


def _reference(config: Config, final: Final) -> dict[str, Value]:
    """Return what a configuration trains beside: eager fp32, or a script as it stands."""
    return canonical(final.space.baseline) if final.by_command else _eager_fp32(config, final.space)


def _eager_fp32(config: Config, space: Space) -> dict[str, Value]:
    """Return the reference: the user's baseline, eager and in fp32.

    Only the workload's knobs that are declared to change the training on purpose have the values of ``config``.
    """
    baseline = space.baseline
    eager = (k for k in KNOBS.values() if k.scope in (Scope.MODEL, Scope.STEP))
    plain = {k.name: k.default for k in eager if k.default is not None}
    own = {n: v for n, v in config.items() if n in space.on_purpose}
    return canonical({**baseline, **{n: v for n, v in plain.items() if n in baseline}, **own})


def _undeclared(config: Config, space: Space) -> list[str]:
    """Return the workload's knobs that differ from the baseline's without a word on whether they change the maths."""
    declared = space.speed_only | space.on_purpose
    return [n for n, v in config.items() if n.startswith("workload.") and n not in declared and space.baseline[n] != v]


def _affordable(
    baseline: Entrant, groups: Sequence[_Group], share_s: float, paid: Set[str], done: Set[str]
) -> tuple[list[_Group | None], int]:
    """Return what there is time to check of each group, and the number of steps of each check.

    The groups are ordered by promise. A group that needs compiling may not fit while its eager twin or the next does.

    Args:
        paid, done: keys of the references and of the checks that have been run already.
    """
    chosen: list[_Group | None] = []
    steps = 0
    for group in groups:
        before = [g for g in chosen if g is not None]
        twin = replace(group, config=canonical(eager(group.config)), instead=True)
        options = [group] if twin.config == group.config else [group, twin]
        chosen.append(None)
        for option in options:
            fitting = _steps(baseline, [*before, option], share_s, paid, done)
            # An eager twin that trains as the reference does would prove nothing.
            if fitting >= FEWEST_STEPS and option.config != option.reference:
                chosen[-1], steps = option, min(fitting, MOST_STEPS)
                break
    return chosen, steps


def _steps(baseline: Entrant, groups: Sequence[_Group], share_s: float, paid: Set[str], done: Set[str]) -> int:
    """Return how many steps each check and each reference can take."""
    fixed_s, step_s = _cost(baseline, groups, paid, done)
    return int((share_s - fixed_s) / step_s) if step_s else MOST_STEPS


def _cost(baseline: Entrant, groups: Sequence[_Group], paid: Set[str], done: Set[str]) -> tuple[float, float]:
    """Return how many seconds checks and references take without their steps, and for a step of each."""
    batch = int(baseline.config["batch_size"])
    own = baseline.seen[0]
    stores = len({key(g.reference) for g in groups} - paid)
    fixed_s = stores * len(REFERENCE_SEEDS) * _START_MARGIN * own.startup_s
    step_s = stores * len(REFERENCE_SEEDS) * own.mean_step_s
    for group in {key(g.config): g for g in groups if key(g.config) not in done}.values():
        one = group.entrants[0]
        seen = one.seen[0]
        if group.instead:
            # Its rate without compiling is not known, and is hardly below the baseline's.
            fixed_s += _START_MARGIN * own.startup_s
            step_s += own.mean_step_s
            continue
        # Compiled graphs are cached by shape: one already trained at this batch size is not compiled again.
        warm = any(e.config["batch_size"] == batch for e in group.entrants)
        fixed_s += _START_MARGIN * seen.startup_s + (WARM_COMPILE if warm else 1.0) * seen.compile_s
        step_s += seen.mean_step_s * batch / seen.batch_size
    return fixed_s, step_s


def _run_references(final: Final, config: Config, steps: int, store: str) -> list[TrainCheck] | str:
    """Run eager fp32 from the saved weights and then from other seeds. Return the results, or why there are none."""
    found = []
    for seed in REFERENCE_SEEDS:
        which = f"run {seed + 1}" if final.by_command else f"seed {seed}"
        title = f"{final.beside} for comparison, {which}"
        result = _launch(final, _reference_name(store, seed), title, config, steps, store, seed)
        if result.check is None or not result.check.finite:
            why = result.cause or "its loss was not finite"
            return f"{final.beside} itself could not be run for comparison: {why}"
        found.append(result.check)
    return found


def _reference_name(store: str, seed: int) -> str:
    return f"check-{store}-fp32-{seed}"


def _check_name(store: str, config: Config) -> str:
    return f"check-{store}-{_digest(config)}"


def checked(final: Final, config: Config) -> TrialResult | None:
    """Return the launch in which a configuration was checked; ``None`` if it was not."""
    return final.launches.finished(_check_name(_store(final, _reference(config, final)), config), config)


def _check(final: Final, group: _Group, references: list[TrainCheck] | str, steps: int, store: str) -> TrainVerdict:
    if isinstance(references, str):
        return _verdict(group, None, references)
    title = f"checking that trial {group.entrants[0].trial.number} trains"
    result = _launch(final, _check_name(store, group.config), title, group.config, steps, store, None)
    undeclared = _undeclared(group.config, final.space)
    hint = (
        f"; if {listed(undeclared)} changes the training on purpose, declare it with `autotune.knob(..., "
        f"changes_maths=True)`"
        if undeclared
        else ""
    )
    if result.check is None and undeclared and result.error_code == WorkloadError.exit_code:
        # Another architecture: its weights cannot start where the baseline's do.
        return _verdict(group, None, f"{result.cause}{hint}")
    if result.check is None:
        # The loader is the baseline's, so its failure is not the configuration's. Any other failure is.
        outside = ended_from_outside(result) or result.status is TrialStatus.LOADER_WORKER_DIED
        passed = None if outside else False
        return _verdict(group, passed, f"its check ended as {result.status}: {result.cause}")
    check = result.check
    # A script may end earlier than asked for, and not always with the same step.
    steps = min(len(check.losses), *(len(r.losses) for r in references))
    if check.finite and steps >= FEWEST_STEPS:
        check = check.model_copy(update={"losses": check.losses[:steps]})
        references = [r.model_copy(update={"losses": r.losses[:steps]}) for r in references]
    if final.deliveries is not None and check.deliveries is not None:
        same = compare_data(final.deliveries, check.deliveries)
        if same.passed is False:
            # Of losses on other samples, none says how it computes.
            return _verdict(group, None, f"its loader delivers other data: {same.reason}")
    if samples_at_once(group.config) != samples_at_once(group.reference):
        # Batch normalization has seen other statistics, as often as there are parts: an evaluation tells of that.
        check = check.model_copy(update={"metric": None})
    judged = judge(check, references, final.beside)
    reason = f"{judged.reason}{hint}" if judged.passed is False else judged.reason
    lacks = next((c.metric_lacks for c in (*references, result.check) if c.metric_lacks is not None), None)
    if judged.passed and lacks is not None:
        # What only the candidate cannot do is its fault.
        alone = all(reference.metric_lacks is None for reference in references)
        reason = lacks if alone else f"by its losses alone, as {lacks}"
        judged = replace(judged, passed=not alone)
    return _verdict(group, judged.passed, reason).model_copy(
        update={
            "losses": result.check.losses,
            "reference": references[0].losses,
            "beside": final.beside,
            "tolerance": judged.tolerance,
            "distance": judged.distance,
            "metric": check.metric,
            "reference_metric": references[0].metric,
        }
    )


def _launch(
    final: Final, launch: str, title: str, config: Config, steps: int, store: str, seed: int | None
) -> TrialResult:
    """Run one check. ``seed`` is that of a reference, and ``None`` for the candidate."""
    # All of them train on samples in the same order, in epochs that end as early.
    noted = _noted(final)
    plan = CheckPlan(
        store=str(final.launches.files.checks / store),
        steps=steps,
        reference=seed is not None,
        seed=seed or 0,
        deliveries=None if noted is None else noted.model_copy(update={"seed": seed or 0}),
    )
    result = final.launches.run_outside(LaunchKind.TRAIN_CHECK, launch, title, config, check=plan)
    final.raise_if_stopped()
    return result


def _verdict_for(group: _Group, found: TrainVerdict) -> TrainVerdict:
    """Return the verdict on a group whose configuration has been checked."""
    reason = found.reason
    if group.instead:
        batch = group.config["batch_size"]
        how = f"it was checked without compiling, because compiling for batch {batch} would have taken too long"
        reason = f"{reason} ({how})" if reason else how
    return found.model_copy(update={"trials": tuple(e.trial.number for e in group.entrants), "reason": reason})


def _verdict(group: _Group, passed: bool | None, reason: str | None) -> TrainVerdict:
    return TrainVerdict(
        trials=tuple(e.trial.number for e in group.entrants), config=group.config, passed=passed, reason=reason
    )
