"""Does it train? Every finalist beside eager fp32: the same weights, the same batches, the user's batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.knobs import KNOBS, Scope
from autotune.records import CheckPlan, Config, LaunchKind, TrainCheck, TrainVerdict, TrialResult, TrialStatus, Value
from autotune.samplers import WARM_COMPILE
from autotune.space import canonical, key
from autotune.verify.entrant import Entrant, ended_from_outside
from autotune.verify.judgements import judge, maths_key
from autotune.verify.race import Final

#: Seeds of the eager fp32 runs whose differences give the tolerance.
REFERENCE_SEEDS = (0, 1, 2)
#: Fewer steps say nothing about a curve; more cost more than they tell.
FEWEST_STEPS, MOST_STEPS = 8, 24
#: What a check does besides its steps, over the start of a launch.
_START_MARGIN = 1.5


@dataclass(frozen=True)
class _Group:
    """Finalists that train the same way, and the eager fp32 training they are held against."""

    entrants: tuple[Entrant, ...]
    config: dict[str, Value]
    reference: dict[str, Value]


def check_training(final: Final, baseline: Entrant, entrants: Sequence[Entrant], share_s: float) -> list[TrainVerdict]:
    """Check the finalists; those that fail are out of the race.

    Finalists that differ in nothing but loader and batch share one check. What trains exactly as the baseline does
    needs none.
    """
    groups = _groups(final, entrants)
    if not groups:
        return []
    before = final.launches.finished(_reference_name(0, 0), groups[0].reference)
    if before is not None and before.check is not None:
        # On a resume what was checked before, in as many steps: curves of different length do not compare.
        chosen, steps = _affordable(baseline, groups, share_s)[0], len(before.check.losses)
    else:
        chosen, steps = _affordable(baseline, groups, min(share_s, final.launches.budget.left_s))
    stores = list(dict.fromkeys(key(g.reference) for g in groups))
    references: dict[str, list[TrainCheck] | str] = {}
    verdicts = []
    for number, group in enumerate(groups):
        store = stores.index(key(group.reference))
        if group not in chosen:
            verdict = _verdict(group, None, "there was no time to check it")
        else:
            if key(group.reference) not in references:
                references[key(group.reference)] = _run_references(final, group.reference, steps, store)
            verdict = _check(final, group, references[key(group.reference)], steps, store, number)
        verdicts.append(verdict)
        who = " and ".join(f"trial {n}" for n in verdict.trials)
        if verdict.passed is False:
            for one in group.entrants:
                one.out = f"fast but wrong: {verdict.reason}"
            final.observer.says(f"{who}: fast but wrong: {verdict.reason}")
        elif verdict.passed is None:
            final.observer.says(f"{who}: not checked for how it trains: {verdict.reason}")
    return verdicts


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
        groups.append(_Group(tuple(members), config, _eager_fp32(config, baseline)))
    return groups


def _at_users_batch(config: Config, baseline: Config) -> dict[str, Value]:
    """What is checked: the configuration's maths with the baseline's batch, loader and threads."""
    own = {n: v for n, v in baseline.items() if n not in maths_key(baseline)}
    return canonical({**own, **maths_key(config), "batch_size": baseline["batch_size"]})


def _eager_fp32(config: Config, baseline: Config) -> dict[str, Value]:
    """The reference: the baseline, eager and in fp32, with the configuration's own workload knobs, which change what is
    trained because the user wants that."""
    eager = (k for k in KNOBS.values() if k.scope in (Scope.MODEL, Scope.STEP))
    plain = {k.name: k.default for k in eager if k.default is not None}
    own = {n: v for n, v in config.items() if n.startswith("workload.")}
    return canonical({**baseline, **{n: v for n, v in plain.items() if n in baseline}, **own})


def _affordable(baseline: Entrant, groups: Sequence[_Group], share_s: float) -> tuple[list[_Group], int]:
    """Which groups there is time for, the most promising first, and how many steps each check may take."""
    chosen: list[_Group] = []
    steps = 0
    for group in groups:
        fitting = _steps(baseline, [*chosen, group], share_s)
        # One that has to be compiled again may not fit; the next one may.
        if fitting >= FEWEST_STEPS:
            chosen, steps = [*chosen, group], min(fitting, MOST_STEPS)
    return chosen, steps


def _steps(baseline: Entrant, groups: Sequence[_Group], share_s: float) -> int:
    """How many steps each of the checks, and each of their references, could take."""
    batch = int(baseline.config["batch_size"])
    own = baseline.seen[0]
    stores = len({key(g.reference) for g in groups})
    fixed_s = stores * len(REFERENCE_SEEDS) * _START_MARGIN * own.startup_s
    step_s = stores * len(REFERENCE_SEEDS) * batch / own.steady_per_s
    for group in groups:
        one = group.entrants[0]
        seen = one.seen[0]
        # Graphs are cached by their shapes: what was trained at this batch already is not compiled again.
        warm = any(e.config["batch_size"] == batch for e in group.entrants)
        fixed_s += _START_MARGIN * seen.startup_s + (WARM_COMPILE if warm else 1.0) * seen.compile_s
        step_s += batch / seen.steady_per_s
    return int((share_s - fixed_s) / step_s)


def _run_references(final: Final, config: Config, steps: int, store: int) -> list[TrainCheck] | str:
    """The eager fp32 runs, the one from the saved weights first, or why there are none."""
    found = []
    for seed in REFERENCE_SEEDS:
        title = f"eager fp32 for comparison, seed {seed}"
        result = _launch(final, _reference_name(store, seed), title, config, steps, store, seed)
        if result.check is None or not result.check.finite:
            why = result.cause or "its loss was not finite"
            return f"eager fp32 itself could not be run for comparison: {why}"
        found.append(result.check)
    return found


def _reference_name(store: int, seed: int) -> str:
    return f"check-{store}-fp32-{seed}"


def _check(
    final: Final, group: _Group, references: list[TrainCheck] | str, steps: int, store: int, number: int
) -> TrainVerdict:
    if isinstance(references, str):
        return _verdict(group, None, references)
    title = f"checking that trial {group.entrants[0].trial.number} trains"
    result = _launch(final, f"check-{store}-{number}", title, group.config, steps, store, None)
    if result.check is None:
        # The loader is the baseline's. Any other failure is the configuration's own.
        outside = ended_from_outside(result) or result.status is TrialStatus.LOADER_WORKER_DIED
        passed = None if outside else False
        return _verdict(group, passed, f"its check ended as {result.status}: {result.cause}")
    judged = judge(result.check, references)
    return _verdict(group, judged.passed, judged.reason).model_copy(
        update={
            "losses": result.check.losses,
            "reference": references[0].losses,
            "tolerance": judged.tolerance,
            "distance": judged.distance,
        }
    )


def _launch(
    final: Final, launch: str, title: str, config: Config, steps: int, store: int, seed: int | None
) -> TrialResult:
    """One check. ``seed``: of a reference; ``None`` for what is checked."""
    plan = CheckPlan(
        store=str(final.launches.files.checks / str(store)), steps=steps, reference=seed is not None, seed=seed or 0
    )
    result = final.launches.aside(LaunchKind.TRAIN_CHECK, launch, title, config, check=plan)
    final.heed()
    return result


def _verdict(group: _Group, passed: bool | None, reason: str | None) -> TrainVerdict:
    return TrainVerdict(
        trials=tuple(e.trial.number for e in group.entrants), config=group.config, passed=passed, reason=reason
    )
