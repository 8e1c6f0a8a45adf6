"""Whether a configuration trains as it should, and whether its loader delivers the same data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import mean, stdev, variance
from typing import Any

from autotune.base.errors import WorkloadError
from autotune.base.records import (
    EAGER_FP32,
    CheckPlan,
    Config,
    DataVerdict,
    Deliveries,
    DeliveryPlan,
    LaunchKind,
    Measurement,
    TrainCheck,
    TrainVerdict,
    TrialResult,
    TrialStatus,
    Value,
)
from autotune.knobs import KNOBS, Scope
from autotune.knobs.compile_mode import eager
from autotune.knobs.persistent_workers import KNOB as PERSISTENT
from autotune.samplers import WARM_COMPILE
from autotune.search.proof import ProofContext
from autotune.search.proof.race import Entrant
from autotune.space import canonical, device_part, is_checked_by, is_loaders, key, loads_as, maths_part, samples_at_once
from autotune.space.formatting import listed
from autotune.stats import compare_data, plan_beside
from autotune.study.launches import ended_from_outside

# Judges from the results of a finalist's launches whether it trains correctly.
#
# A fast configuration can be silently wrong: a number format in which the loss overflows, a layout that scrambles the
# input, a compiler that drops a gradient. The yardstick is the scatter of eager fp32, as in MLPerf's reference
# convergence points (MLPerf Training Rules, "Reference Convergence Points"): runs of the reference that differ only in
# their seeds show how far apart curves of the same training lie.
#
# The thresholds are judgement calls. `benchmarks/results/gate-power.md` shows what they detect: 24 steps of 260 small
# trainings (perceptrons, convolutions, transformers, dropout; SGD and AdamW at learning rates from too low to too high;
# batches of 4 to 64; learnable and random labels), with other seeds than those used to set the thresholds. Of 1,300
# correct runs two failed, both of one training at a learning rate far too high. Frozen tensors and a doubled loss were
# always detected. Where the loss of fp32 fell by more than 30 %, so were gradients that were zero, noise, or of the
# wrong sign, and 94 of 95 trainings with shuffled labels. Where it fell by less than 2 %, a fifth of the zero
# gradients, most of the wrong signs and few of the shuffled labels were detected: a training that has not begun to
# learn shows little. No short check detects a gradient that is wrong by a factor which could be part of the learning
# rate.

#: Losses closer than this fraction of their size count as equal, regardless of the seeds. Rounding to bf16 (8
#: significant bits, 0.4 %) moves a short curve by 1 to 2 %.
FLOOR = 0.05
#: The same for the fall of a loss; smaller, because it is computed from means over several steps.
FALL_FLOOR = 0.01
#: A curve may be this many times as far away as two seeds are from each other: with three pairs observed, a fourth may
#: be the furthest apart.
SLACK = 1.5
#: Fraction of the steps, those with the largest differences, that is left out when curves are compared.
JUMPS = 0.1
#: The loss must fall by this fraction of the fall of the slowest reference.
LEAST_FALL = 0.5
#: Differences below this many standard errors do not count: dropout draws different numbers in different kernels.
ERRORS = 4.0
#: Dropout moves a single loss by no more than this fraction of its size, even for small batches.
DROPOUT = 0.25
#: A reference whose loss rises to more than this multiple of its first value cannot serve as a yardstick.
EXPLODED = 3.0
#: A GradScaler starts at 65536 and may skip some steps before it finds its scale.
SKIPS_ALLOWED = 2
SKIPS_FRACTION = 0.25


@dataclass(frozen=True)
class Judgement:
    """Whether a training matches the eager fp32 training.

    Attributes:
        passed: ``None`` if that cannot be decided.
        reason: one sentence; ``None`` only if passed.
        tolerance: largest accepted mean difference between the curves (see `JUMPS`), in units of the loss.
        distance: the observed mean difference. Both are ``None`` if there are no curves to compare.
    """

    passed: bool | None
    reason: str | None = None
    tolerance: float | None = None
    distance: float | None = None


def judge(candidate: TrainCheck, references: Sequence[TrainCheck], beside: str = EAGER_FP32) -> Judgement:
    """Compare a training with eager fp32 trainings.

    A single reference shows no scatter. Whatever passes against the first reference alone passes against all of them,
    because each further one only widens what is accepted, and whatever is broken fails against any; for everything in
    between, one reference decides nothing.

    Args:
        references: the first started from the candidate's weights, the others from weights of other seeds. All took the
            same steps over the same batches. For a script, they are runs of it as it stands, whose random numbers are
            seeded unless the script does so itself, those of the first with the candidate's seed.
        beside: what the references are called.

    Raises:
        ValueError: there is no reference, or complete curves have different lengths.
    """
    unfit = _unfit(references, beside)
    if unfit is not None:
        return Judgement(None, unfit)
    judgement = _compared(candidate, references, beside)
    is_broken = _broken(candidate) is not None or candidate.changed == 0
    if len(references) == 1 and not judgement.passed and not is_broken:
        why = f"there is one run of {beside} only, which shows no scatter to compare with"
        return Judgement(None, why, judgement.tolerance, judgement.distance)
    return judgement


def _compared(candidate: TrainCheck, references: Sequence[TrainCheck], beside: str) -> Judgement:
    reference = references[0]
    pairs = combinations((r.losses for r in references), 2)
    size = mean(abs(loss) for loss in reference.losses)
    tolerance = max(FLOOR * size, SLACK * max((_distance(a, b) for a, b in pairs), default=0.0))
    reason = _broken(candidate)
    if reason is not None:
        distance_so_far = _distance(candidate.losses, reference.losses) if candidate.losses else None
        return Judgement(False, reason, tolerance, distance_so_far)
    if any(len(r.losses) != len(candidate.losses) for r in references):
        raise ValueError("these curves were not made with the same number of steps")
    distance = _distance(candidate.losses, reference.losses)
    reason = (
        _unchanged(candidate, references, beside)
        or _begins_elsewhere(candidate, references, size, beside)
        or _does_not_fall(candidate, references, size, beside)
    )
    if reason is None and distance > tolerance:
        reason = (
            f"its loss is {_percent(distance, size)} off {beside}'s{_start(beside)} on average, "
            f"and {_percent(tolerance, size)} is accepted"
        )
    if reason is None:
        reason = _metric_differs(candidate, references, beside)
    return Judgement(reason is None, reason, tolerance, distance)


def _unfit(references: Sequence[TrainCheck], beside: str) -> str | None:
    """Return why the references cannot serve as a yardstick; ``None`` if they can."""
    if not references:
        raise ValueError("a training can only be judged by a reference")
    for reference in references:
        if not reference.finite:
            return f"{beside} itself fails: {_not_finite(reference)}"
        if reference.changed == 0:
            return f"{beside} itself changes no parameter"
        first, last = _ends(reference.losses)
        if last - first > EXPLODED * max(abs(first), abs(reference.losses[0])):
            return f"{beside} itself diverges on the saved batches: {first:.4g} → {last:.4g}"
    return None


def _start(beside: str) -> str:
    """Return a clause on what is known about where the references started."""
    return " from the same weights" if beside == EAGER_FP32 else ""


def _broken(candidate: TrainCheck) -> str | None:
    if not candidate.finite:
        return _not_finite(candidate)
    allowed = max(SKIPS_ALLOWED, SKIPS_FRACTION * len(candidate.losses))
    if candidate.scaler_skips > allowed:
        steps = len(candidate.losses) + candidate.scaler_skips
        return f"GradScaler left out {candidate.scaler_skips} of {steps} steps because of overflows"
    return None


def _not_finite(check: TrainCheck) -> str:
    return f"the loss became infinite or no number at step {len(check.losses) + 1}"


def _unchanged(candidate: TrainCheck, references: Sequence[TrainCheck], beside: str) -> str | None:
    """Check for frozen tensors. A tensor whose gradient is pure rounding error may change in some runs and not in
    others, so the reference with the fewest changed tensors counts."""
    least = min(r.changed for r in references)
    if candidate.changed >= least:
        return None
    if candidate.changed == 0:
        return "no parameter changed"
    return f"only {100 * candidate.changed:.3g} % of the trainable tensors changed, in {beside} {100 * least:.3g} %"


def _begins_elsewhere(candidate: TrainCheck, references: Sequence[TrainCheck], size: float, beside: str) -> str | None:
    """Check the first loss: equal weights and batches give equal losses up to rounding and dropout."""
    first, reference = candidate.losses[0], references[0].losses[0]
    reference_losses = [r.losses[0] for r in references]
    differences = _differences(candidate, references[0])[: _quarter(candidate.losses)]
    first_size = max(size, abs(reference))
    dropout = min(ERRORS * stdev(differences), DROPOUT * first_size) if len(differences) > 1 else 0.0
    if abs(first - reference) <= max(
        FLOOR * first_size, SLACK * (max(reference_losses) - min(reference_losses)), dropout
    ):
        return None
    return f"its first loss is {first:.4g}, where {beside} has {reference:.4g}{_start(beside)}"


def _does_not_fall(candidate: TrainCheck, references: Sequence[TrainCheck], size: float, beside: str) -> str | None:
    falls = [_fall(r.losses) for r in references]
    least = min(falls)
    if least <= 0:
        # Eager fp32 does not learn in these steps, so no fall can be required; how far apart the curves may lie is
        # judged separately. ResNet-50 at its usual learning rate rises from 6.7 to 7.4 in nine steps, bf16 to 8.6.
        return None
    error = _fall_error(_differences(candidate, references[0]))
    slack = max((1 - LEAST_FALL) * least, SLACK * (max(falls) - least), FALL_FLOOR * size, ERRORS * error)
    if _fall(candidate.losses) >= least - slack:
        return None
    (first, last), (ref_first, ref_last) = _ends(candidate.losses), _ends(references[0].losses)
    return (
        f"its loss does not fall as it should: {first:.4g} → {last:.4g}, "
        f"where {beside} went {ref_first:.4g} → {ref_last:.4g}"
    )


def _metric_differs(candidate: TrainCheck, references: Sequence[TrainCheck], beside: str) -> str | None:
    """Check the workload's own metric like the losses: the seeds show how far apart its values may be."""
    metrics = [r.metric for r in references if r.metric is not None]
    if candidate.metric is None or len(metrics) < len(references) or len(set(metrics)) == 1 < len(metrics):
        # A metric that is the same for every seed (no class is distinguished yet) shows no scatter to compare with.
        return None
    allowed = max(FLOOR * abs(metrics[0]), SLACK * (max(metrics) - min(metrics)))
    if abs(candidate.metric - metrics[0]) <= allowed:
        return None
    return (
        f"its losses are as they should be, and its metric is {candidate.metric:.4g} afterwards, where {beside} has "
        f"{metrics[0]:.4g}{_start(beside)}, and {allowed:.3g} of difference is accepted"
    )


def _differences(candidate: TrainCheck, reference: TrainCheck) -> list[float]:
    return [a - b for a, b in zip(candidate.losses, reference.losses, strict=True)]


def _fall_error(differences: Sequence[float]) -> float:
    """Return the standard error of the difference between two curves' falls, from the scatter of their differences.

    It is the standard error of a difference between two means (Snedecor & Cochran, Statistical Methods, ch. 6), for
    equal batches.
    """
    quarter = _quarter(differences)
    if quarter < 2:
        return 0.0
    return math.sqrt((variance(differences[:quarter]) + variance(differences[-quarter:])) / quarter)


def _quarter(losses: Sequence[float]) -> int:
    return max(1, len(losses) // 4)


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    """Return the mean losses over the first and the last quarter."""
    quarter = _quarter(losses)
    return mean(losses[:quarter]), mean(losses[-quarter:])


def _fall(losses: Sequence[float]) -> float:
    first, last = _ends(losses)
    return first - last


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the mean absolute difference over the common steps, without the largest differences.

    At a high learning rate, a loss occasionally jumps up and back at random steps.
    """
    differences = sorted(abs(x - y) for x, y in zip(a, b, strict=False))
    return mean(differences[: len(differences) - int(JUMPS * len(differences))])


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else f"{part:.3g}"


# Checks that every finalist trains like eager fp32, with equal weights and batches, at the user's batch size.

#: Seeds of the eager fp32 runs whose differences determine the tolerance. All but the first run only if a candidate
#: does not pass against the first (see `judge`).
REFERENCE_SEEDS = (0, 1, 2)
#: Fewer steps show nothing of a curve; more cost more than they reveal.
FEWEST_STEPS, MOST_STEPS = 8, 24
#: Duration of a check without its steps, relative to the startup time of a launch.
_START_MARGIN = 1.25


@dataclass(frozen=True)
class _Group:
    """Finalists that train in the same way, and the configuration of their eager fp32 reference.

    Attributes:
        config: what is checked. instead: the check is eager although the finalists compile.
    """

    entrants: tuple[Entrant, ...]
    config: dict[str, Value]
    reference: dict[str, Value]
    instead: bool = False


def check_training(
    context: ProofContext, baseline: Entrant, entrants: Sequence[Entrant], share_s: float
) -> list[TrainVerdict]:
    """Check the finalists. Those that fail drop out of the race.

    Finalists that differ only in loader and batch size share one check. Those that compute exactly as the baseline does
    need none: what their loaders deliver is compared (`check_data`). If there is no time to compile for the user's
    batch size, the same configuration is checked without compiling, and the verdict says so.
    """
    groups, share_s = _groups(context, entrants), min(share_s, context.launches.budget.left_s)
    if not groups:
        return []
    if not context.sees_inside:
        verdicts = [_verdict(context, group, None, "the losses of a program are not seen") for group in groups]
        for verdict in verdicts:
            context.observer.says(_unchecked(verdict))
        return verdicts
    until_s = context.launches.budget.left_s - share_s
    costs = _Costs(context, baseline, groups)
    earlier = context.launches.finished(_reference_name(_store(context, groups[0].reference), 0), groups[0].reference)
    # If there is no time for all references, one may be enough.
    chosen, steps = costs.affordable(groups, share_s, len(REFERENCE_SEEDS))
    chosen_with_one, _ = costs.affordable(groups, share_s, 1)
    is_tight = chosen_with_one.count(None) < chosen.count(None)
    if is_tight:
        # Using few steps leaves the most time for the others.
        chosen, steps = chosen_with_one, FEWEST_STEPS
    if earlier is not None and earlier.check is not None:
        # Every further check has as many steps: curves of different lengths cannot be compared.
        steps = len(earlier.check.losses)
    references: dict[str, _References] = {}
    checked: dict[str, TrainVerdict] = {}

    def has_time(group: _Group) -> bool:
        """Return whether there is time for another check: earlier ones may have needed more references than planned."""
        fixed_s, step_s = costs.of([group], 0)
        budget = context.launches.budget
        return key(group.config) in checked or budget.left_s + budget.grace_s - until_s >= fixed_s + steps * step_s

    verdicts = []
    for group, affordable in zip(groups, chosen, strict=True):
        if affordable is None or (is_tight and verdicts and not has_time(affordable)):
            verdict = _verdict(context, group, None, "there was no time to check it")
        else:
            reference_key, name = key(group.reference), key(affordable.config)
            if reference_key not in references:
                references[reference_key] = _References(context, group.reference, steps, baseline.seen[0], until_s)
            # An eager twin may itself be a finalist.
            if name not in checked:
                checked[name] = _check(context, affordable, references[reference_key])
            verdict = checked[name].model_copy(update={"trials": tuple(e.trial.number for e in group.entrants)})
            if affordable.instead:
                batch = affordable.config["batch_size"]
                how = f"it was checked without compiling, because compiling for batch {batch} would have taken too long"
                reason = f"{verdict.reason} ({how})" if verdict.reason else how
                verdict = verdict.model_copy(update={"reason": reason})
        verdicts.append(verdict)
        if verdict.passed is False:
            for entrant in group.entrants:
                entrant.out = f"fast but wrong: {verdict.reason}"
            titles = " and ".join(entrant.title for entrant in group.entrants)
            context.observer.says(f"{titles}: fast but wrong: {verdict.reason}")
        elif verdict.passed is None:
            context.observer.says(_unchecked(verdict))
    return verdicts


def not_checked(context: ProofContext, one: Entrant, reason: str) -> list[TrainVerdict]:
    """Return the verdict that an entrant's training was not checked; none if it computes like the baseline."""
    return [_verdict(context, group, None, reason) for group in _groups(context, [one])]


def need_s(
    context: ProofContext, baseline: Entrant, entrants: Sequence[Entrant], runs: int = len(REFERENCE_SEEDS)
) -> float:
    """Estimate the duration in seconds of a check of any of these entrants, with so many runs of its reference."""
    groups = _groups(context, entrants) if context.sees_inside else []
    costs = _Costs(context, baseline, groups)
    each = (costs.of([group], runs) for group in groups)
    return max((fixed_s + FEWEST_STEPS * step_s for fixed_s, step_s in each), default=0.0)


def covers(verdict: TrainVerdict, one: Entrant) -> bool:
    """Return whether a verdict is on the way in which an entrant trains. A winner without one of its knobs has its
    trial's number, and may compute in another way."""
    return one.trial.number in verdict.trials and is_checked_by(one.config, verdict.config)


def is_told_by(context: ProofContext, verdict: TrainVerdict, one: Entrant) -> bool:
    """Return whether a verdict says how an entrant trains, or why that was not checked. It says nothing of an entrant
    of a script if only the check of others was impossible."""
    if not covers(verdict, one):
        return False
    return not context.by_command or verdict.passed is not None or verdict.config == _as_checked(context, one.config)


def _as_checked(context: ProofContext, config: Config) -> dict[str, Value]:
    """Return a configuration at the user's batch size; that of a script, with its own loader, is launched like this."""
    return canonical({**config, "batch_size": context.space.baseline["batch_size"]})


def _unchecked(verdict: TrainVerdict) -> str:
    trials = " and ".join(f"trial {n}" for n in verdict.trials)
    return f"{trials}: not checked for how it trains: {verdict.reason}"


def _store(context: ProofContext, reference: Config) -> str:
    """Return the name of the saved weights and batches that a group starts from, which depend only on its reference."""
    # Curves over samples in the order of a `DeliveryPlan` are not comparable with those of studies before it existed.
    return f"{_digest(reference)}{'' if _noted(context) is None else '-ordered'}"


def _noted(context: ProofContext) -> DeliveryPlan | None:
    """Return how much of what a script's loader delivers is noted in its checks; ``None`` if the script is not known to
    continue when an epoch ends early."""
    plan = plan_beside(context.deliveries)
    return None if plan is None or plan.epochs < 2 else plan


def _digest(config: Config) -> str:
    return hashlib.sha256(key(config).encode()).hexdigest()[:8]


def _groups(context: ProofContext, entrants: Sequence[Entrant]) -> list[_Group]:
    baseline = context.space.baseline
    rest = {n: v for n, v in baseline.items() if n not in maths_part(baseline)}
    groups: dict[str, _Group] = {}
    for entrant in entrants:
        # The entrant's maths with the baseline's batch, loader and threads.
        config = _as_checked(context, {**rest, **maths_part(entrant.config)})
        name = key(config)
        if name in groups:
            groups[name] = replace(groups[name], entrants=(*groups[name].entrants, entrant))
        elif config != canonical(baseline):
            # A script trains with its own loader, so the most promising member itself is checked.
            config = _as_checked(context, entrant.config) if context.by_command else config
            groups[name] = _Group((entrant,), config, _reference(config, context))
    return list(groups.values())


def _reference(config: Config, context: ProofContext) -> dict[str, Value]:
    """Return the configuration to compare a training with: a script as it stands, or the user's baseline, eager and in
    fp32.

    Only those knobs of the workload that are declared to change the training on purpose have the values of ``config``.
    """
    space, baseline = context.space, context.space.baseline
    if context.by_command:
        return canonical(baseline)
    eager = (k for k in KNOBS.values() if k.scope in (Scope.MODEL, Scope.STEP))
    plain = {k.name: k.default for k in eager if k.default is not None and k.name in baseline}
    return canonical({**baseline, **plain, **{n: v for n, v in config.items() if n in space.on_purpose}})


class _Costs:
    """How long checks take, without what has been run already, also by an earlier run of the study."""

    def __init__(self, context: ProofContext, baseline: Entrant, groups: Sequence[_Group]) -> None:
        self._baseline, launches = baseline, context.launches
        #: The number of runs of each reference, by its key, and the keys of the configurations that were checked.
        self._runs: dict[str, int] = {}
        self._checked: set[str] = set()
        for group in groups:
            store = _store(context, group.reference)
            names = [_reference_name(store, seed) for seed in REFERENCE_SEEDS]
            finished = [launches.finished(name, group.reference) is not None for name in names]
            self._runs[key(group.reference)] = sum(finished)
            for config in (group.config, canonical(eager(group.config))):
                if launches.finished(_check_name(store, config), config) is not None:
                    self._checked.add(key(config))

    def affordable(self, groups: Sequence[_Group], share_s: float, runs: int) -> tuple[list[_Group | None], int]:
        """Return what there is time to check in each group, and the number of steps of each check and reference.

        The groups are ordered by promise. A group that needs compiling may not fit although its eager twin or the next
        group does.

        Args:
            runs: number of runs of each reference.
        """
        chosen: list[_Group | None] = []
        steps = 0
        for group in groups:
            before = [g for g in chosen if g is not None]
            twin = replace(group, config=canonical(eager(group.config)), instead=True)
            options = [group] if twin.config == group.config else [group, twin]
            chosen.append(None)
            for option in options:
                fixed_s, step_s = self.of([*before, option], runs)
                fitting = int((share_s - fixed_s) / step_s) if step_s else MOST_STEPS
                # An eager twin that is identical to the reference would prove nothing.
                if fitting >= FEWEST_STEPS and option.config != option.reference:
                    chosen[-1], steps = option, min(fitting, MOST_STEPS)
                    break
        return chosen, steps

    def of(self, groups: Sequence[_Group], runs: int) -> tuple[float, float]:
        """Return the seconds that all checks and references take apart from their steps, and the seconds per step."""
        batch, own = int(self._baseline.config["batch_size"]), self._baseline.seen[0]
        missing = sum(max(0, runs - self._runs.get(name, 0)) for name in {key(g.reference) for g in groups})
        fixed_s, step_s = missing * _START_MARGIN * own.startup_s, missing * own.mean_step_s
        for group in {key(g.config): g for g in groups if key(g.config) not in self._checked}.values():
            measurement = group.entrants[0].seen[0]
            if group.instead:
                # Its rate without compiling is unknown, but hardly below the baseline's.
                fixed_s += _START_MARGIN * own.startup_s
                step_s += own.mean_step_s
                continue
            # Compiled graphs are cached by shape: one that has already trained at this batch size is not recompiled.
            warm = any(e.config["batch_size"] == batch for e in group.entrants)
            fixed_s += _START_MARGIN * measurement.startup_s + (WARM_COMPILE if warm else 1.0) * measurement.compile_s
            step_s += measurement.mean_step_s * batch / measurement.batch_size
        return fixed_s, step_s


class _References:
    """The runs of one reference, from the saved weights and then from other seeds, each made on demand.

    Args:
        own: the baseline's measurement. until_s: seconds of the budget that the checks must leave.
    """

    def __init__(self, context: ProofContext, config: Config, steps: int, own: Measurement, until_s: float) -> None:
        self.steps, self.store = steps, _store(context, config)
        self._context, self._config, self._until_s = context, config, until_s
        self._run_s = _START_MARGIN * own.startup_s + steps * own.mean_step_s
        self._runs: list[TrainCheck] = []
        #: Why a run failed, if one did.
        self.failed: str | None = None

    def first(self, runs: int) -> list[TrainCheck]:
        """Return this many runs, or fewer if one fails or there is no time for all."""
        while len(self._runs) < runs and self.failed is None:
            seed = REFERENCE_SEEDS[len(self._runs)]
            if seed and not self._has_time(runs):
                break
            context, name = self._context, _reference_name(self.store, seed)
            which = f"run {seed + 1}" if context.by_command else f"seed {seed}"
            title = f"{context.beside} for comparison, {which}"
            result = _launch(context, name, title, self._config, _plan(context, self.store, self.steps, seed))
            if result.check is None or not result.check.finite:
                why = result.cause or "its loss was not finite"
                self.failed = f"{context.beside} itself could not be run for comparison: {why}"
            else:
                self._runs.append(result.check)
        return self._runs[:runs]

    def _has_time(self, runs: int) -> bool:
        launches, budget = self._context.launches, self._context.launches.budget
        names = [_reference_name(self.store, seed) for seed in REFERENCE_SEEDS[len(self._runs) : runs]]
        missing = sum(launches.finished(name, self._config) is None for name in names)
        return not missing or budget.left_s + budget.grace_s - self._until_s >= missing * self._run_s


def _reference_name(store: str, seed: int) -> str:
    return f"check-{store}-fp32-{seed}"


def _check_name(store: str, config: Config) -> str:
    return f"check-{store}-{_digest(config)}"


def _check(context: ProofContext, group: _Group, yardstick: _References) -> TrainVerdict:
    if not yardstick.first(1):
        return _verdict(context, group, None, yardstick.failed)
    title = f"checking that trial {group.entrants[0].trial.number} trains"
    name = _check_name(yardstick.store, group.config)
    result = _launch(context, name, title, group.config, _plan(context, yardstick.store, yardstick.steps, None))
    # The workload's own knobs that differ from the baseline, undeclared as to whether they change the maths.
    space, own = context.space, {n: v for n, v in group.config.items() if n.startswith("workload.")}
    declared = space.speed_only | space.on_purpose
    undeclared = [n for n, v in own.items() if n not in declared and space.baseline[n] != v]
    hint = (
        f"; if {listed(undeclared)} changes the training on purpose, declare it with `autotune.knob(..., "
        f"changes_maths=True)`"
        if undeclared
        else ""
    )
    if result.check is None and undeclared and result.error_code == WorkloadError.exit_code:
        # A different architecture: its weights cannot start from the baseline's.
        return _verdict(context, group, None, f"{result.cause}{hint}")
    if result.check is None:
        # The loader is the baseline's, so its failure is not the configuration's fault. Any other failure is.
        outside = ended_from_outside(result) or result.status is TrialStatus.LOADER_WORKER_DIED
        passed = None if outside else False
        return _verdict(context, group, passed, f"its check ended as {result.status}: {result.cause}")
    check = result.check
    if context.deliveries is not None and check.deliveries is not None:
        comparison = compare_data(context.deliveries, check.deliveries)
        if comparison.passed is False:
            # Losses on other samples say nothing about how it computes.
            return _verdict(context, group, None, f"its loader delivers other data: {comparison.reason}")
    if samples_at_once(group.config) != samples_at_once(group.reference):
        # Batch normalization has seen other statistics, once per part, which shows in an evaluation.
        check = check.model_copy(update={"metric": None})
    references = yardstick.first(1)
    judgement = _judged(check, references, context.beside)
    differs = judgement.passed is None and judgement.distance is not None
    # What only the candidate seems to lack, other runs of the reference may lack, too.
    lacking = judgement.passed and check.metric_lacks is not None and references[0].metric_lacks is None
    if lacking or differs:
        # It differs from one run; others show how much difference is acceptable.
        references = yardstick.first(len(REFERENCE_SEEDS))
        if yardstick.failed is not None:
            return _verdict(context, group, None, yardstick.failed, differs=differs)
        if len(references) == len(REFERENCE_SEEDS):
            judgement = _judged(check, references, context.beside)
        else:
            why = f"it differs from one run of {context.beside}, and there was no time for others beside it"
            judgement = replace(judgement, passed=None, reason=why)
    reason = f"{judgement.reason}{hint}" if judgement.passed is False else judgement.reason
    lacks = next((c.metric_lacks for c in (*references, result.check) if c.metric_lacks is not None), None)
    if judgement.passed and lacks is not None:
        # What only the candidate cannot do is its fault.
        alone = all(reference.metric_lacks is None for reference in references)
        reason = lacks if alone else f"by its losses alone, as {lacks}"
        judgement = replace(judgement, passed=not alone)
    return _verdict(
        context,
        group,
        judgement.passed,
        reason,
        losses=result.check.losses,
        reference=references[0].losses,
        tolerance=judgement.tolerance,
        distance=judgement.distance,
        metric=check.metric,
        reference_metric=references[0].metric,
        differs=differs and judgement.passed is None,
    )


def _judged(check: TrainCheck, references: Sequence[TrainCheck], beside: str) -> Judgement:
    """Judge by the steps that all runs have taken: a script may end early, and not always after the same step."""
    steps = min(len(check.losses), *(len(r.losses) for r in references))
    if check.finite and steps >= FEWEST_STEPS:
        check = check.model_copy(update={"losses": check.losses[:steps]})
        references = [r.model_copy(update={"losses": r.losses[:steps]}) for r in references]
    return judge(check, references, beside)


def _launch(context: ProofContext, name: str, title: str, config: Config, plan: CheckPlan) -> TrialResult:
    result = context.launches.run_outside(LaunchKind.TRAIN_CHECK, name, title, config, check=plan)
    context.raise_if_stopped()
    return result


def _plan(context: ProofContext, store: str, steps: int, seed: int | None) -> CheckPlan:
    """Return the plan of one run. ``seed`` is the seed of a reference, and ``None`` for the candidate."""
    # All of them train on samples in the same order, in epochs that end equally early.
    noted = _noted(context)
    return CheckPlan(
        store=str(context.launches.files.checks / store),
        steps=steps,
        reference=seed is not None,
        seed=seed or 0,
        deliveries=None if noted is None else noted.model_copy(update={"seed": seed or 0}),
    )


def _verdict(
    context: ProofContext, group: _Group, passed: bool | None, reason: str | None, **more: Any
) -> TrainVerdict:
    trials = tuple(e.trial.number for e in group.entrants)
    return TrainVerdict(trials=trials, config=group.config, passed=passed, reason=reason, beside=context.beside, **more)


# Compares what a finalist's loader delivers with what the baseline's does.

#: Seconds that such a launch takes beyond its startup, as a first guess.
TAKES_S = 5.0
_NO_TIME = "there was no time to compare what its loader delivers"


def check_data(context: ProofContext, one: Entrant) -> DataVerdict:
    """Compare what a finalist's loader delivers with what the baseline's does, unless an earlier run of the study has
    done so."""
    baseline, number = context.space.baseline, one.trial.number
    if loads_as(one.config, baseline):
        return not_compared(context, one, "")
    if not context.sees_inside:
        return _not(one, "what a program's loader delivers is not seen")
    config = _as_loaded(context, one.config)
    baseline_deliveries = own_deliveries(context)
    if isinstance(baseline_deliveries, str):
        return _not(one, baseline_deliveries)
    plan = plan_beside(baseline_deliveries)
    if plan is None:
        return _not(one, baseline_deliveries.lost or "no batch of a loader of PyTorch's was seen")
    # The check of how it trains may have noted it.
    name = _check_name(_store(context, _reference(config, context)), config)
    result = context.launches.finished(name, config)
    if result is None or result.check is None or result.check.deliveries is None:
        result = _result(context, f"data-{_digest(config)}", f"comparing what trial {number} loads", config, plan)
    if result is None:
        return _not(one, _NO_TIME)
    deliveries = None if result.check is None else result.check.deliveries
    if deliveries is None:
        is_from_outside = ended_from_outside(result) or result.check is not None
        cause = f"its launch ended as {result.status}: {result.cause}" if result.check is None else "nothing was noted"
        return _not(one, cause, passed=None if is_from_outside else False)
    comparison = compare_data(baseline_deliveries, deliveries)
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
    config = _as_loaded(context, context.space.baseline)
    result = _result(context, "data-own", "noting what the baseline loads", config, DeliveryPlan())
    if result is None:
        return _NO_TIME
    if result.check is None or result.check.deliveries is None:
        return f"what the baseline's loader delivers was not noted: {result.cause or 'nothing came'}"
    return result.check.deliveries


def _repeats(context: ProofContext, own: Deliveries, plan: DeliveryPlan) -> bool:
    """Return whether the baseline delivers the same again; otherwise a difference means nothing."""
    config = _as_loaded(context, context.space.baseline)
    again = _result(context, "data-again", "comparing what the baseline loads with itself", config, plan)
    deliveries = None if again is None or again.check is None else again.check.deliveries
    # If there is no time to find out, a difference counts as a real one.
    return deliveries is None or compare_data(own, deliveries).passed is not False


def _as_loaded(context: ProofContext, config: Config) -> dict[str, Value]:
    """Return the configuration to launch: for a script the configuration itself, for a workload its loader with all
    else as in the baseline; both at the user's own batch size."""
    own = {n: v for n, v in config.items() if is_loaders(n)}
    return _as_checked(context, config if context.by_command else {**device_part(context.space.baseline), **own})


def _result(context: ProofContext, name: str, title: str, config: Config, plan: DeliveryPlan) -> TrialResult | None:
    """Run a launch that notes what is delivered, or return an earlier one's result; ``None`` if no time is left."""
    launches = context.launches
    if launches.finished(name, config) is None and launches.budget.left_s <= 0:
        return None
    # Only the deliveries matter, so the first loss also ends the launch.
    check = CheckPlan(store=str(launches.files.checks), steps=1, deliveries=plan)
    return _launch(context, name, title, config, check)


def _not(one: Entrant, reason: str, *, passed: bool | None = None) -> DataVerdict:
    return DataVerdict(trial=one.trial.number, config=one.config, passed=passed, reason=reason)


def takes_s(context: ProofContext, entrants: Sequence[Entrant]) -> float:
    """Return the seconds to reserve for comparing the winner's data, if a finalist's loader is set differently."""
    differing = [one for one in entrants if not loads_as(one.config, context.space.baseline)]
    if not differing or not context.sees_inside:
        return 0.0
    start_s = min((m.startup_s for one in differing for m in one.seen), default=0.0)
    # For a workload, the baseline's deliveries are noted as well.
    return (start_s + TAKES_S) * (1 if context.by_command else 2)
