"""Whether a profile keeps its promise, and why not."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune import stats
from autotune.base.clock import timestamp
from autotune.base.errors import AutotuneError, ImpossibleError, MachineError, UsageError, WorkloadError
from autotune.base.layout import StudyFiles
from autotune.base.records import (
    CommandRef,
    Config,
    Fingerprint,
    Measurement,
    StudySpec,
    Trial,
    TrialResult,
    TrialStatus,
)
from autotune.knobs import spell
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.machine.gpu import SLOWDOWNS
from autotune.profile import Profile, check, warnings_for
from autotune.profile.in_force import differences as differences_here
from autotune.profile.in_force import look_here
from autotune.profile.yaml import CODE, PROFILE
from autotune.search.proof import ProofContext
from autotune.search.proof.race import MAX_ROUNDS, Comparison, Entrant, Race
from autotune.search.request import check_request, model_of, require_linux
from autotune.search.setup import Environment, run_of, set_up
from autotune.search.subject import command_name
from autotune.space import key, samples_at_once
from autotune.space.formatting import percent_text, ratio_text
from autotune.study.history import read_launches
from autotune.study.launches import ended_from_outside
from autotune.workload.catalog import find_objective
from autotune.workload.scoring import Scorer

#: Rates measured at different times differ by chance, by at most this many standard deviations of a launch.
_SCATTER = 3
#: A disturbance is reported if it is seen in more than this fraction of the windows.
_OFTEN = 0.1
#: Number of cores that others may use without being reported.
_FEW_CORES = 0.1
#: A larger change of the fraction of a step spent waiting is reported.
_WAITS = 0.1

Ratio = tuple[float, float, float]


def slack(profile: Profile) -> float:
    """Return the fraction by which a profile's rate may differ between one day and another by chance alone.

    A training on a card that is limited by its loader scatters as one on the CPU does.
    """
    device = profile.conditions.device.partition(":")[0]
    waits = (profile.gives.loader_wait_fraction or 0.0) > _WAITS
    return _SCATTER * stats.PRIORS["cpu" if waits else device].sd


def causes(
    profile: Profile,
    differences: Iterable[tuple[str, str, str]],
    baseline: Ratio | None,
    launches: Sequence[Measurement],
    own: Sequence[Measurement],
) -> Iterator[str]:
    """Yield what may have made a profile slower than promised, one sentence each, the most certain first.

    Args:
        differences: rows ``(name, then, now)`` of what is different on this machine.
        baseline: ``(ratio, low, high)`` of the baseline's rate now over its rate then.
        launches: all launches of the check; own: those of the profile's configuration.
    """
    yield from warnings_for(differences)
    around = [w.around for m in launches for w in (*m.windows, *m.discarded) if w.around is not None]
    if sum(bool(a.stops) for a in around) > _OFTEN * len(around):
        yield "something keeps stopping and continuing its processes (SIGSTOP, as cpulimit does)."
    foreign = [a.foreign_cores for a in around if a.foreign_cores is not None]
    if foreign and fmean(foreign) > _FEW_CORES:
        yield f"other processes, or the hypervisor, use {fmean(foreign):.1f} cores."
    for bit, name in SLOWDOWNS.items():
        if sum(bool((a.clocks_event_reasons or 0) & bit) for a in around) > _OFTEN * len(around):
            yield f"{name} holds the card's clocks down."
    wait_then = profile.gives.loader_wait_fraction
    waits = [m.loader_wait_fraction for m in own if m.loader_wait_fraction is not None]
    if wait_then is not None and waits and fmean(waits) > wait_then + _WAITS:
        now = percent_text(fmean(waits))
        yield f"it waits for the loader for {now} of a step; when it was measured, {percent_text(wait_then)}."
    if baseline is None:
        return
    ratio, low, high = baseline
    allowed = slack(profile)
    if high < 1 - allowed:
        yield f"the machine is slower: the baseline gives only {ratio_text(ratio)} of its rate then, too."
    elif low > 1 - allowed:
        yield f"the machine is as fast as then, within the usual scatter: the baseline gives {ratio_text(ratio)}."


#: Fraction of the promise that is wanted by default.
AT_LEAST = 0.95
#: Number of rounds for a profile that is the baseline itself, for which there is no ratio to measure.
_ALONE = 5


@dataclass(frozen=True)
class Recheck:
    """The result of the check. Rates are in samples per second, intervals at 95 %.

    Attributes:
        launches, rate: of the profile's configuration. baseline: the rate of its baseline.
        speedup: ``(speedup, low, high)`` over the baseline; ``None`` for a profile that is the baseline itself.
        ratio: ``(ratio, low, high)`` of the speedup now over the promised one, or of the rates if there is no speedup.
        differences: rows ``(name, then, now)`` of what is different on this machine.
        failed: why the configuration could not be measured, as a clause; ``None`` if it was measured.
        by_rate: rates were compared although there is a speedup, because no speedup was promised.
        unknown: the configuration was not measured, for a reason other than itself, such as lack of time.
        rate_ratio: ``(ratio, low, high)`` of the rate now over the promised one.
        slack: fraction by which rates measured at different times may differ by chance.
        sureness: the low end of the promised speedup's interval over the promised speedup.
        another: what was launched is not what was promised: the profile was edited by hand, or the workload's code has
            changed.
        causes: what may have made it slower, one sentence each, the most certain first.
    """

    launches: int
    differences: tuple[tuple[str, str, str], ...]
    baseline: stats.Rate | None = None
    rate: stats.Rate | None = None
    speedup: Ratio | None = None
    ratio: Ratio | None = None
    failed: str | None = None
    unknown: bool = False
    by_rate: bool = False
    rate_ratio: Ratio | None = None
    slack: float = 0.0
    sureness: float = 1.0
    another: bool = False
    causes: tuple[str, ...] = ()

    def verdict(self, at_least: float) -> bool | None:
        """Whether at least this fraction of the promise is kept; ``None`` if the launches scatter too much to tell.

        The speedup is compared, because the machine's drift cancels in it. The rate may be lower by chance (`slack`),
        but no lower: on a machine that has become slower, the speedup is kept, but the promised rate is not.
        """
        if self.ratio is None:
            return None if self.unknown and not self.another else False
        if self.another or self.too_slow(at_least):
            return False
        if self.speedup is None or self.by_rate:
            # The rates were measured at different times, so no number of launches narrows the interval.
            ratio, _, high = self.ratio
            wanted = at_least * (1 - self.slack)
            return False if high < wanted else True if ratio >= wanted else None
        return kept(self.ratio, at_least, sureness=self.sureness)

    def too_slow(self, at_least: float) -> bool:
        """Whether the rate is further below the promised one than chance explains."""
        return self.rate_ratio is not None and self.rate_ratio[2] < at_least * (1 - self.slack)


def kept(ratio: tuple[float, float, float], at_least: float, *, sureness: float = 1.0) -> bool | None:
    """Whether a promise is kept: False if the whole interval lies below what is wanted; True if the estimate does not
    and the interval excludes a shortfall of twice the tolerance; ``None`` if the interval is too wide for either.

    A promise is an interval, and any value in it was promised, so ``at_least`` times its low end is wanted.

    Args:
        ratio: ``(ratio, low, high)`` of what was measured over what was promised.
        at_least: the fraction wanted; a shortfall of ``1 - at_least`` is tolerated.
        sureness: the low end of the promise over the promise.
    """
    estimate, low, high = ratio
    wanted = at_least * sureness
    if high < wanted:
        return False
    return True if estimate >= wanted and low >= wanted - max(0.0, 1 - at_least) else None


def recheck(
    profile: Profile,
    spec: StudySpec,
    env: Environment,
    folder: Path,
    *,
    at_least: float = AT_LEAST,
    any_code: bool = False,
) -> Recheck:
    """Launch a profile's configuration in turns with its baseline until it is known whether the promise is kept, for at
    most ``spec.budget_s`` seconds.

    Args:
        spec: the request, from `request_for`. folder: for the launches' files.
        at_least: the fraction of the promise that is wanted.
        any_code: the figures decide even if the code is not what was measured, for example because the user names it.

    Raises:
        UsageError: the request cannot be carried out.
        WorkloadError: the workload, or the baseline, fails.
        MachineError: the machine is too busy to measure, or has no such device.
        InterruptedSearch: a signal was received.
    """
    require_linux()
    ref = check_request(spec)
    scorer = Scorer(find_objective(spec.objectives[0]), goal=spec.goal)
    with closing(scorer), run_of(StudyFiles(folder), spec, ref, env) as run:
        try:
            setup = set_up(run)
        except ImpossibleError as error:
            return _impossible(profile, str(error), look_here())
        differences = tuple(check(profile, setup.fingerprint))
        refused = setup.space.refusal(profile.configuration)
        if refused is not None:
            return _impossible(profile, refused, setup.fingerprint)
        launches = setup.run.launches(setup.conditions)
        context = ProofContext(setup.space, launches, scorer, env.observer, env.stop)
        baseline = _entrant(0, profile.baseline.configuration)
        is_baseline = key(profile.configuration) == key(profile.baseline.configuration)
        candidate = baseline if is_baseline else _entrant(profile.provenance.trial, profile.configuration)
        race = Race(context, [baseline] if is_baseline else [baseline, candidate])
        if is_baseline:
            for _ in range(_ALONE):
                if race.round_s([baseline]) <= launches.budget.left_s:
                    race.round([baseline])
        else:
            race.run(spec.budget_s)
            # The race ends at a fixed precision of the ratio, which may not suffice to decide.
            while baseline.again and race.rounds < MAX_ROUNDS:
                result = _kept(profile, race.compared(), baseline, candidate, (), run.files)
                if result.verdict(at_least) is not None or race.round_s(race.entrants) > launches.budget.left_s:
                    break
                race.round(race.entrants)
                if len(race.still_racing) < 2:
                    break
        if not baseline.again:
            raise _no_baseline(_last(run.files, baseline))
        result = _kept(profile, race.compared(), baseline, candidate, differences, run.files)
        decisive = {PROFILE} if any_code else {PROFILE, CODE}
        return replace(result, another=any(name in decisive for name, _, _ in differences))


def _impossible(profile: Profile, refused: str, here: Fingerprint) -> Recheck:
    differences = tuple(differences_here(profile, here))
    reasons = tuple(causes(profile, differences, None, (), ()))
    return Recheck(0, differences, failed=f"it cannot run here: {refused}", causes=reasons)


def request_for(
    profile: Profile,
    *,
    model: str = "",
    command: CommandRef | None = None,
    of_script: Mapping[str, Any] | None = None,
    args: dict[str, str] | None = None,
    data: str = "",
    budget_s: float,
    allow_busy: bool = False,
) -> StudySpec:
    """Return the request that measures under the profile's conditions.

    Args:
        model: the model; empty for the profile's own. The same holds for ``args`` and ``data``.
        command: the script that the profile is for, if it is for one. of_script: fields of the request that apply only
            to a script, such as `StudySpec.flags`.

    Raises:
        UsageError: the profile was measured on a folder and no folder is given; the profile's model has changed and no
            model is given; or both a model and a command are given.
    """
    conditions, baseline = profile.conditions, profile.baseline.configuration
    refuse_behind_store(profile)
    if model and command is not None:
        raise UsageError("both --model and a command say what to train", advice="leave one of them out.")
    data_kind = data or conditions.data
    if data_kind == "folder":
        raise UsageError("the profile was measured on a folder of yours", advice="name the folder with --data DIR.")
    return StudySpec(
        name="verify",
        mark=uuid.uuid4().hex,
        created=timestamp(),
        model=model_of(profile, model) if command is None else command_name(command.words),
        command=command,
        **(of_script or {}),
        args=args or profile.workload.args,
        # A workload that has its own data ignores this.
        data="generated" if data_kind == "none" else data_kind,
        device=conditions.device,
        batch_size=samples_at_once(baseline),
        global_batch=int(baseline["batch_size"]) * conditions.ranks if ACCUMULATION.name in baseline else None,
        ranks=conditions.ranks,
        image_size=conditions.image_size,
        seed=conditions.seed,
        budget_s=budget_s,
        allow_busy=allow_busy,
        baseline={name: spell(value) for name, value in baseline.items()},
        narrowed={name: (spell(value),) for name, value in profile.configuration.items()},
    )


def refuse_behind_store(profile: Profile) -> None:
    """Refuse to compare with a profile that is valid only for a simulated store.

    Raises:
        UsageError: it is.
    """
    if profile.behind_store is not None:
        raise UsageError(
            f"the profile was measured behind a slow store that was put there for the search: {profile.behind_store}",
            advice="a search without --store-latency and --store-bandwidth makes one for the data as it is.",
        )


def _entrant(number: int, config: Config) -> Entrant:
    """Return an entrant that has no earlier measurement. The first round shows how long its launches take."""
    nothing = TrialResult(launch=f"{number:05d}", status=TrialStatus.COMPLETE)
    return Entrant(dict(config), Trial(number=number, config=config, result=nothing))


def _kept(
    profile: Profile,
    compared: Comparison,
    baseline: Entrant,
    candidate: Entrant,
    differences: tuple[tuple[str, str, str], ...],
    files: StudyFiles,
) -> Recheck:
    baseline_rate = compared.rate(baseline)
    gives, before = profile.gives, profile.baseline
    promised = stats.Rate(gives.samples_per_second, *gives.ci95)
    baseline_ratio = stats.speedup(baseline_rate, stats.Rate(before.samples_per_second, *before.ci95))
    own_launches = candidate.again
    launches = own_launches if candidate is baseline else [*own_launches, *baseline.again]
    result = Recheck(
        launches=len(candidate.again),
        differences=differences,
        baseline=baseline_rate,
        slack=slack(profile),
        causes=tuple(causes(profile, differences, baseline_ratio, launches, own_launches)),
    )
    if not candidate.again:
        last = _last(files, candidate)
        is_unknown = last is None or ended_from_outside(last)
        return replace(result, failed=_why_not(last), unknown=is_unknown)
    if candidate.out is not None and candidate is not baseline:
        # Some of its launches went well.
        return replace(result, failed=candidate.out)
    rate = compared.rate(candidate)
    rate_ratio = stats.speedup(rate, promised)
    if candidate is baseline:
        return replace(result, rate=rate, ratio=rate_ratio)
    result = replace(result, rate=rate, rate_ratio=rate_ratio)
    if not compared.in_turns(candidate, baseline):
        return replace(result, failed="it was not measured in turns", unknown=True)
    speedup = compared.ratio(candidate, baseline)
    if gives.speedup is None:
        # The launches are from different times: see `Recheck.verdict`.
        return replace(result, speedup=speedup, ratio=rate_ratio, by_rate=True)
    ratio, low, high = (bound / gives.speedup for bound in speedup)
    sureness = 1.0 if gives.speedup_ci95 is None else min(1.0, gives.speedup_ci95[0] / gives.speedup)
    return replace(result, speedup=speedup, ratio=(ratio, low, high), sureness=sureness)


def _last(files: StudyFiles, one: Entrant) -> TrialResult | None:
    """Return the last launch of an entrant that did not complete."""
    ended = [r for s, r in read_launches(files) if key(s.config) == key(one.config) and r.cause is not None]
    return ended[-1] if ended else None


def _why_not(result: TrialResult | None) -> str:
    return "there was no time for it" if result is None else f"it ended as {result.status}: {result.cause}"


def _no_baseline(result: TrialResult | None) -> AutotuneError:
    message = f"the baseline could not be measured: {_why_not(result)}"
    if result is not None and result.status is TrialStatus.INTERRUPTED:
        return MachineError(message, advice=result.advice)
    return WorkloadError(message, advice=result.advice if result else None, detail=result.evidence if result else None)
