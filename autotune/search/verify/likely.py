"""What is likely where nothing is proven: the ratios of heats and of single launches, with what they are worth.

A proof is separate launches of both in turns (`race`). Where there was no time for them, the search has still seen the
baseline and its candidates: in turns within one process, where the machine's drift cancels, and in launches of their
own. Both views of a ratio are combined by their inverse variances, and where they disagree by more than they should
their common error grows with it (Birge, "The calculation of errors by the method of least squares", Phys. Rev. 40,
1932).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from autotune import stats
from autotune.base.records import Heat, HoldVerdict, Standing, StudyHeat, Trial, TrialStatus
from autotune.knobs.num_workers import workers_of
from autotune.samplers.auto.rates import MOSTLY_DEVICE
from autotune.search.verify.ceilings import FEW_WAITS, HEADROOM
from autotune.search.verify.data_check import takes_s
from autotune.search.verify.race import (
    Comparison,
    Entrant,
    entrant,
    rate_of,
    shared_rounds,
    standing,
    wait_fraction,
)
from autotune.search.verify.train_check import need_s
from autotune.search.verify.winner import MAY_BE_FASTER, Contest, Proof, ceiling_s
from autotune.space import Lessons, Space, device_part, key, loads_as
from autotune.space.formatting import count
from autotune.study.agenda import is_device_bound
from autotune.study.budget import LEAST_LAUNCHES

#: Standard deviation of what a heat tells of a training beside what launches of it tell. In 20 configurations of
#: ResNet-18 the mean difference was 0.7 %, known to ± 1 %.
_BESIDE = 0.02
#: A proof is planned for a ratio of this much, if none was seen, and takes no more than so many rounds.
LEAST_RATIO, _MOST_ROUNDS = 1.05, 12
#: What a ratio is from, where it is from no launches of its own.
_TURNS, _TRIALS = "turns within one process", "trials within one process"
#: By how much rates that are measured one after the other in one process differ, as a prior: the machine's drift.
_WITHIN = stats.LaunchNoise(0.03, 8.0, False)
#: Degrees of freedom of a heat's noise, at least: those of what is assumed of it. No error is less than the last.
_DEGREES, _NORMAL, _LEAST_SE = 8.0, NormalDist().inv_cdf(0.975), 1e-6


@dataclass(frozen=True)
class Likely:
    """A configuration that is likely to be faster than the baseline.

    Attributes:
        ratio: over the baseline, with its 95 % interval, which is that of it alone.
        sure: the interval's lower end where it is allowed for among how many it was chosen (Bonferroni).
        evidence: what the ratio is from, as a phrase.
    """

    one: Entrant
    ratio: tuple[float, float, float]
    sure: float
    evidence: str


@dataclass(frozen=True)
class _View:
    """A ratio's logarithm with its standard error, which has so many degrees of freedom."""

    log: float
    se: float
    degrees: float
    words: str


def with_likely(
    contest: Contest,
    proof: Proof,
    trials: Sequence[Trial],
    heats: Sequence[StudyHeat],
    noise: stats.LaunchNoise,
    *,
    ended: str | None = None,
) -> tuple[Proof, str | None]:
    """Return a proof that has proven nothing with what is likely to be faster as its winner, and the evidence of that
    as a phrase; the proof as it is, and ``None``, if nothing is.

    It is checked how it trains and what it loads as far as there is time.

    Args:
        trials, heats: of the search. noise: of one launch, as far as the search has seen.
        ended: why nothing more may be launched, as a clause; ``None`` if something may be.

    Raises:
        InterruptedSearch: the user interrupted a check.
    """
    final = contest.race.final
    if not final.by_rate or final.rate_within or proof.baseline_unmet is not None:
        return proof, None
    while True:
        found = _likeliest(contest, trials, heats, noise, lambda one: True)
        if found is None:
            return proof, None
        if _passes(contest, found.one, ended):
            break
    own, best = None, _standing(contest, proof, found)
    while not final.space.same_training(found.one.config):
        own = _likeliest(contest, trials, heats, noise, lambda one: final.space.same_training(one.config))
        if own is None or _passes(contest, own.one, ended):
            break
    if final.space.same_training(found.one.config):
        same = best
    else:
        same = proof.best_same_batch if own is None else _standing(contest, proof, own)
    shown = {key(s.config): s for s in (*proof.finalists, same, best)}
    data = [v for one in (found.one, *([own.one] if own else [])) if (v := contest.data_of(one)) is not None]
    return (
        replace(
            proof,
            best=best,
            best_same_batch=same,
            finalists=tuple(shown.values()),
            tie=None,
            dropped={**proof.dropped, **{e.trial.number: e.out for e in contest.finalists if e.out and not e.label}},
            checks=tuple(contest.checks),
            data=tuple({key(v.config): v for v in (*proof.data, *data)}.values()),
            ablation=(),
            hold=HoldVerdict(trial=best.trial, passed=None, reason="it is not proven yet", headroom_wanted=HEADROOM),
        ),
        found.evidence,
    )


def without_refuted(
    contest: Contest, proof: Proof, trials: Sequence[Trial], heats: Sequence[StudyHeat], noise: stats.LaunchNoise
) -> Proof:
    """Return a proof without those of its `Proof.unproven` that cannot be faster by an amount that matters, by what
    heats and single launches tell of them together.

    Args:
        trials, heats: of the search. noise: of one launch, as far as the search has seen.
    """
    race = contest.race
    if not race.final.by_rate or proof.baseline_unmet is not None:
        return proof
    compared, space, used = race.compared(), race.final.space, _telling(race.final.space, trials, heats)

    def is_open(one: Entrant) -> bool:
        within = _is_within(one, race.baseline)
        found = _likely(one, compared, space, used, _WITHIN if within else noise, 1)
        return found is None or found.ratio[2] > MAY_BE_FASTER

    open_ = {e.trial.number for e in race.entrants if e.trial.number in proof.unproven and is_open(e)}
    return replace(proof, unproven=tuple(number for number in proof.unproven if number in open_))


def _is_within(one: Entrant, baseline: Entrant) -> bool:
    """Whether the trials of both took place in one process."""
    within = one.trial.result.within
    return within is not None and within == baseline.trial.result.within


def _telling(space: Space, trials: Sequence[Trial], heats: Sequence[StudyHeat]) -> list[Heat]:
    """Return the heats that tell of the training."""
    return [heat.heat for heat in heats if heat.heat.side == "device"] if is_device_bound(space, trials) else []


def proof_takes_s(contest: Contest, noise: stats.LaunchNoise, likely: Standing | None = None) -> float:
    """Return about how many more seconds than are left a proof would take: launches of all that may still be the
    fastest in turns until a ratio as it was seen is shown, or one of `LEAST_RATIO`, the check of how a script trains,
    and what is kept for the ceilings.

    Args:
        noise: of one launch, as far as the search has seen. likely: what is likely to be faster.
    """
    race = contest.race
    final, compared, baseline = race.final, race.compared(), race.baseline
    budget = final.launches.budget
    # A study that goes on looks at its workload again.
    begins_s = ceiling_s(final) + baseline.seen[0].startup_s
    others = [e for e in contest.finalists if e.out is None and not e.label]
    named = None if likely is None else likely.trial
    chosen = next((e for e in others if e.trial.number == named), None) or next(iter(others), None)
    if chosen is None:
        # Something to prove comes first.
        return begins_s + (1 + _MOST_ROUNDS / 4) * 2 * baseline.expected_s - max(0.0, budget.left_s)
    rounds = shared_rounds(chosen, baseline)
    ratio = LEAST_RATIO if likely is None else likely.speedup
    if rounds and compared.in_turns(chosen, baseline):
        ratio = max(LEAST_RATIO, compared.ratio(chosen, baseline)[0])
    known = compared.noise if rounds >= LEAST_LAUNCHES else noise
    enough = stats.rounds_to_show(math.log(ratio), known, among=len(others), least=LEAST_LAUNCHES, most=_MOST_ROUNDS)
    # One at least: as many as there were have not sufficed.
    missing = max(1, enough - rounds, LEAST_LAUNCHES - rounds)
    racing = {id(e): e for e in (*race.undecided, baseline, chosen)}
    round_s = sum(e.expected_s for e in racing.values())
    checks_s = need_s(final, baseline, [chosen]) + takes_s(final, [chosen])
    return begins_s + missing * round_s + checks_s - max(0.0, budget.left_s)


def _passes(contest: Contest, one: Entrant, ended: str | None) -> bool:
    """Check an entrant as far as possible; return whether it may be handed over."""
    if ended is None:
        return contest.passes(one)
    contest.leave_unchecked(one, ended)
    return True


def _likeliest(
    contest: Contest,
    trials: Sequence[Trial],
    heats: Sequence[StudyHeat],
    noise: stats.LaunchNoise,
    fits: Callable[[Entrant], bool],
) -> Likely | None:
    """Return what is most certainly faster than the baseline; ``None`` if nothing is that has passed its checks."""
    race = contest.race
    space, compared = race.final.space, race.compared()
    known = {e.trial.number for e in race.entrants}
    complete = [t for t in trials if t.result.status is TrialStatus.COMPLETE and t.result.measurement is not None]
    others = [entrant(t) for t in complete if t.number not in known and key(t.config) != key(space.baseline)]
    lessons = Lessons()
    for config in contest.wrong:
        lessons.learn_wrong(config)
    for config in contest.loading_otherwise:
        lessons.learn_other_data(config, space.baseline)
    candidates = [
        e
        for e in (*(one for one in contest.finalists if not one.label), *others)
        if e.out is None and not lessons.is_wrong(e.config) and race.final.required.allow(e.trial) and fits(e)
    ]
    used = _telling(space, trials, heats)
    among = {key(e.config) for heat in used for e in heat.entrants if e.ratio is not None}
    among |= {key(t.config) for t in complete}
    count_of_others = max(1, len(among - {key(space.baseline)}))
    shown = (_likely(one, compared, space, used, noise, count_of_others) for one in candidates)
    return max((s for s in shown if s is not None and s.sure > 1), key=lambda s: s.sure, default=None)


def _likely(
    one: Entrant, compared: Comparison, space: Space, heats: Sequence[Heat], noise: stats.LaunchNoise, among: int
) -> Likely | None:
    turns = list(_by_heats(one, compared.baseline, space, heats))
    views = list(_by_launches(one, compared, noise))
    if turns:
        shown = _combined(turns)
        # What all heats have in common, more of them do not lessen.
        views.append(replace(shown, se=math.hypot(shown.se, _BESIDE)))
    if not views:
        return None
    found = _combined(views)
    ratio, degrees = math.exp(found.log), max(1.0, found.degrees)
    half = stats.t_quantile(degrees) * found.se
    surest = stats.t_quantile(degrees, 1 - 0.025 / among) * found.se
    seen = list(dict.fromkeys(view.words for view in reversed(views)))
    words = " and ".join(w for w in seen if w != _TRIALS or len(seen) == 1)
    return Likely(one, (ratio, *stats.interval_of(ratio, half)), math.exp(found.log - surest), words)


def _combined(views: Sequence[_View]) -> _View:
    """Return the mean of some views, weighted by their inverse variances, with Birge's ratio where they disagree. The
    degrees of freedom are Satterthwaite's."""
    weights = [1 / view.se**2 for view in views]
    whole = sum(weights)
    log = sum(w * view.log for w, view in zip(weights, views, strict=True)) / whole
    se = 1 / math.sqrt(whole)
    if len(views) > 1:
        squares = sum(((view.log - log) / view.se) ** 2 for view in views)
        se *= max(1.0, math.sqrt(squares / (len(views) - 1)))
    degrees = 1 / sum((w / whole) ** 2 / view.degrees for w, view in zip(weights, views, strict=True))
    return _View(log, se, degrees, views[0].words)


def _by_heats(one: Entrant, baseline: Entrant, space: Space, heats: Sequence[Heat]) -> Iterator[_View]:
    """Yield what heats tell of a configuration that loads as the baseline does.

    A heat shows the device's part. The baseline's waits for its loader are added to the time of both; with workers,
    only where there are hardly any.
    """
    if not loads_as(one.config, space.baseline):
        return
    waits = [wait_fraction(e.seen) for e in (baseline, one)]
    most = FEW_WAITS if workers_of(space.baseline) else MOSTLY_DEVICE
    if any(part is None or part > most for part in waits):
        return
    part = waits[0] or 0.0
    mine, usual = key(device_part(one.config)), key(device_part(space.baseline))
    for heat in heats:
        rows = {key(device_part(e.config)): e for e in heat.entrants if e.ratio is not None}
        of_it, own = rows.get(mine), rows.get(usual)
        if of_it is None or own is None or not of_it.ratio or not own.ratio:
            continue
        ends = [(e.ratio, e.ratio_ci95[0]) for e in (of_it, own) if e.ratio and e.ratio_ci95 is not None]
        if len(ends) < 2 or not all(low > 0 for _, low in ends):
            continue
        # The quantile that made the interval is not known; a normal one makes the error no smaller than it is.
        se = math.hypot(*(math.log(ratio / low) / _NORMAL for ratio, low in ends))
        ratio = 1 / ((1 - part) * own.ratio / of_it.ratio + part)
        yield _View(math.log(ratio), max(_LEAST_SE, se), _DEGREES, _TURNS)


def _by_launches(one: Entrant, compared: Comparison, noise: stats.LaunchNoise) -> Iterator[_View]:
    """Yield what launches of their own tell: those in turns with the baseline's, or else the search's."""
    rounds = shared_rounds(one, compared.baseline)
    if rounds and compared.in_turns(one, compared.baseline):
        ratio, low, _ = compared.ratio(one, compared.baseline)
        degrees = compared.noise.degrees
        words = f"{count(rounds, 'launch', 'launches')} of each in turns" if rounds > 1 else "one launch of each"
    else:
        mine, theirs = one.trial.result.measurement, compared.baseline.trial.result.measurement
        if mine is None or theirs is None:
            return
        words = "one launch of each"
        if _is_within(one, compared.baseline):
            words = _TRIALS
        rates = [stats.launch_rate(rate_of(m), noise) for m in (mine, theirs)]
        ratio, low, _ = stats.speedup(*rates)
        degrees = noise.degrees
    degrees = max(1.0, degrees)
    if low > 0 and math.isfinite(low):
        se = math.log(ratio / low) / stats.t_quantile(degrees)
        yield _View(math.log(ratio), max(_LEAST_SE, se), degrees, words)


def _standing(contest: Contest, proof: Proof, likely: Likely) -> Standing:
    """Return the figures of what is likely to be faster: the baseline's rate times the ratio."""
    compared, usual = contest.race.compared(), proof.baseline.samples_per_second
    ratio, low, high = likely.ratio
    rate = stats.Rate(usual * ratio, usual * low, usual * high)
    return standing(likely.one, rate, likely.ratio, contest.race.final.scorer, compared.compile_s(likely.one))
