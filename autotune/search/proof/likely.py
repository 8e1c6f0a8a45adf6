"""What is likely if nothing is proven: ratios from heats and from single launches, weighted by their precision.

A proof consists of separate launches of both configurations in turns (`race`). If there was no time for them, the
search has still observed the baseline and its candidates: in turns within one process, where the machine's drift
cancels out, and in separate launches. Both views of a ratio are combined by their inverse variances; if they disagree
by more than they should, their common error grows accordingly (Birge, "The calculation of errors by the method of least
squares", Phys. Rev. 40, 1932).
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
from autotune.search.proof.ceilings import FEW_WAITS, HEADROOM
from autotune.search.proof.race import (
    Comparison,
    Entrant,
    entrant,
    measured_rate,
    shared_rounds,
    standing,
    wait_fraction,
)
from autotune.search.proof.train_check import need_s, takes_s
from autotune.search.proof.winner import MAY_BE_FASTER, Contest, Proof, ceiling_s
from autotune.space import Lessons, Space, device_part, key, loads_as
from autotune.space.formatting import count
from autotune.study.agenda import is_device_bound
from autotune.study.budget import LEAST_LAUNCHES

#: Standard deviation of the difference between what a heat and what launches show of a training. In 20 configurations
#: of ResNet-18 the mean difference was 0.7 %, known to ± 1 %.
_BESIDE = 0.02
#: The same of a ratio from one process in which how much freed memory is given back depends on what else is in it, and
#: of one between a launch in such a process and another. The largest difference seen, 1.84 where launches had 1.35
#: (PyTorch's MNIST example in bf16), is taken for two standard deviations.
_UNLIKE = 0.16
#: A proof is planned for at least this ratio, and takes no more than this many rounds.
LEAST_RATIO, _MOST_ROUNDS = 1.05, 12
#: Where a ratio comes from if not from separate launches.
_TURNS, _TRIALS = "turns within one process", "trials within one process"
#: Prior for the variation between rates measured one after the other in one process: the machine's drift.
_WITHIN = stats.LaunchNoise(0.03, 8.0, False)
#: Degrees of freedom of a noise between launches that is only assumed: nothing else shows whether it is several times
#: as large, as on a host whose other guests are busy. Of equals whose launches differ by 10 % instead of the assumed 5,
#: 15 % were called likely to be faster with the eight of the prior.
_ASSUMED_DEGREES = 2.0
#: Degrees of freedom assumed for a heat's noise, which has at least as many; the normal quantile of a 95 % interval;
#: the smallest standard error.
_DEGREES, _NORMAL, _LEAST_SE = 8.0, NormalDist().inv_cdf(0.975), 1e-6
#: More degrees of freedom make no difference.
_MOST_DEGREES = 1e6


@dataclass(frozen=True)
class Likely:
    """A configuration that is likely to be faster than the baseline.

    Attributes:
        ratio: speedup over the baseline with its 95 % interval, which is that of this ratio alone.
        sure: lower end of the interval that allows for the number of candidates it was chosen from.
        evidence: where the ratio comes from, as a phrase.
    """

    one: Entrant
    ratio: tuple[float, float, float]
    sure: float
    evidence: str


@dataclass(frozen=True)
class _View:
    """A ratio's logarithm with its standard error and the degrees of freedom of that; and whether the error is one of
    noise that is pooled over candidates."""

    log: float
    se: float
    degrees: float
    words: str
    pooled: bool = False


def with_likely(
    contest: Contest,
    proof: Proof,
    trials: Sequence[Trial],
    heats: Sequence[StudyHeat],
    noise: stats.LaunchNoise,
    *,
    ended: str | None = None,
) -> tuple[Proof, str | None]:
    """Return a proof that has proven nothing with the configuration that is likely to be faster as its winner, and the
    evidence as a phrase; the proof unchanged, and ``None``, if nothing is likely to be.

    How the winner trains and what it loads is checked if there is time.

    Args:
        trials, heats: those of the search. noise: noise of one launch, as observed by the search.
        ended: why nothing more may be launched, as a clause; ``None`` if something may be.
    """
    context = contest.race.context
    if not context.by_rate or context.rate_within or proof.baseline_unmet is not None:
        return proof, None
    space = context.space

    def passing(fits: Callable[[Entrant], bool]) -> Likely | None:
        """Return the likeliest of those that fit which passes the checks, as far as they can be made."""
        while (found := _likeliest(contest, trials, heats, noise, fits)) is not None:
            if ended is None:
                passes = contest.passes(found.one)
            else:
                contest.leave_unchecked(found.one, ended)
                passes = contest.refusal(found.one) is None
            if passes:
                break
        return found

    likely = passing(lambda one: True)
    if likely is None:
        # Checks may have shown something of those that seemed to be.
        return replace(proof, checks=tuple(contest.checks), dropped=contest.dropped, doubted=contest.doubted), None
    is_own_batch = space.same_training(likely.one.config)
    own_batch = likely if is_own_batch else passing(lambda one: space.same_training(one.config))
    best = _standing(contest, proof, likely)
    best_same_batch = proof.best_same_batch if own_batch is None else _standing(contest, proof, own_batch)
    standings = {key(s.config): s for s in (*proof.finalists, best_same_batch, best)}
    winners = (likely,) if own_batch is None else (likely, own_batch)
    data = [v for winner in winners if (v := contest.data_of(winner.one)) is not None]
    return (
        replace(
            proof,
            best=best,
            best_same_batch=best_same_batch,
            finalists=tuple(standings.values()),
            tie=None,
            dropped=contest.dropped,
            doubted=contest.doubted,
            checks=tuple(contest.checks),
            data=tuple({key(v.config): v for v in (*proof.data, *data)}.values()),
            ablation=(),
            hold=HoldVerdict(trial=best.trial, passed=None, reason="it is not proven yet", headroom_wanted=HEADROOM),
        ),
        likely.evidence,
    )


def without_refuted(
    contest: Contest, proof: Proof, trials: Sequence[Trial], heats: Sequence[StudyHeat], noise: stats.LaunchNoise
) -> Proof:
    """Return a proof without those of its `Proof.unproven` that cannot be faster by an amount that matters, judging by
    heats and single launches together.

    Args:
        trials, heats: those of the search. noise: noise of one launch, as observed by the search.
    """
    race = contest.race
    if not race.context.by_rate or proof.baseline_unmet is not None:
        return proof
    compared, space, telling = race.compared(), race.context.space, telling_heats(race.context.space, trials, heats)

    def is_open(one: Entrant) -> bool:
        is_within = _is_within(one, race.baseline)
        likely = _likely(one, compared, space, telling, _WITHIN if is_within else noise)
        return likely is None or likely.ratio[2] > MAY_BE_FASTER

    open_ = {e.trial.number for e in race.entrants if e.trial.number in proof.unproven and is_open(e)}
    return replace(proof, unproven=tuple(number for number in proof.unproven if number in open_))


def _is_within(one: Entrant, baseline: Entrant) -> bool:
    """Return whether the trials of both took place in one process."""
    within = one.trial.result.within
    return within is not None and within == baseline.trial.result.within


def telling_heats(space: Space, trials: Sequence[Trial], heats: Sequence[StudyHeat]) -> list[Heat]:
    """Return the heats of the device, if what is gained there is gained by the training."""
    return [heat.heat for heat in heats if heat.heat.side == "device"] if is_device_bound(space, trials) else []


def proof_takes_s(contest: Contest, noise: stats.LaunchNoise, likely: Standing | None) -> float:
    """Estimate how many seconds more than are left a proof would take: launches in turns of all that may still be the
    fastest until the observed ratio, or at least `LEAST_RATIO`, is shown; the check of how a script trains; and the
    time reserved for the ceilings.

    Args:
        noise: noise of one launch, as observed by the search. likely: the configuration likely to be faster.
    """
    race = contest.race
    context, compared, baseline = race.context, race.compared(), race.baseline
    budget = context.launches.budget
    # A study that continues probes its workload again.
    fixed_s = ceiling_s(context) + baseline.seen[0].startup_s
    others = [e for e in contest.finalists if not e.label and (e.out is None or e.trial.number in contest.doubted)]
    likely_number = None if likely is None else likely.trial
    chosen = next((e for e in others if e.trial.number == likely_number), None) or next(iter(others), None)
    if chosen is None:
        # Something to prove must be found first.
        return fixed_s + (1 + _MOST_ROUNDS / 4) * 2 * baseline.expected_s - max(0.0, budget.left_s)
    rounds = shared_rounds(chosen, baseline)
    ratio = LEAST_RATIO if likely is None else likely.speedup
    if rounds and compared.in_turns(chosen, baseline):
        ratio = max(LEAST_RATIO, compared.ratio(chosen, baseline)[0])
    launch_noise = compared.noise if rounds >= LEAST_LAUNCHES else noise
    enough = stats.rounds_to_show(
        math.log(ratio), launch_noise, among=len(others), least=LEAST_LAUNCHES, most=_MOST_ROUNDS
    )
    # At least one more: those so far have not sufficed.
    missing = max(1, enough - rounds, LEAST_LAUNCHES - rounds)
    racing = {id(e): e for e in (*race.undecided, baseline, chosen)}
    round_s = sum(e.expected_s for e in racing.values())
    checks_s = need_s(context, baseline, [chosen]) + takes_s(context, [chosen])
    return fixed_s + missing * round_s + checks_s - max(0.0, budget.left_s)


def _likeliest(
    contest: Contest,
    trials: Sequence[Trial],
    heats: Sequence[StudyHeat],
    noise: stats.LaunchNoise,
    fits: Callable[[Entrant], bool],
) -> Likely | None:
    """Return the configuration that is most certainly faster than the baseline and has failed no check, if any is."""
    race = contest.race
    space, compared = race.context.space, race.compared()
    entered = {e.trial.number for e in race.entrants}
    complete = [t for t in trials if t.result.status is TrialStatus.COMPLETE and t.result.measurement is not None]
    others = [entrant(t) for t in complete if t.number not in entered and key(t.config) != key(space.baseline)]
    lessons = Lessons()
    for config in contest.wrong:
        lessons.learn_wrong(config, space.changed_maths(config))
    for config in contest.loading_otherwise:
        lessons.learn_other_data(config, space.baseline)
    candidates = [
        e
        for e in (*(one for one in contest.finalists if not one.label), *others)
        if e.out is None
        and contest.refusal(e) is None
        and not lessons.is_wrong(e.config)
        and race.context.required.allow(e.trial)
        and fits(e)
    ]
    telling = telling_heats(space, trials, heats)
    # A pruned trial might have been luckier.
    launched = {key(t.config) for t in trials if t.result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)}
    in_heats = {key(e.config) for heat in telling for e in heat.entrants if e.ratio is not None}
    baseline = {key(space.baseline)}
    among = len(launched - baseline), len((launched | in_heats) - baseline)
    estimates = (_likely(one, compared, space, telling, noise, among) for one in candidates)
    return max((s for s in estimates if s is not None and s.sure > 1), key=lambda s: s.sure, default=None)


def _likely(
    one: Entrant,
    compared: Comparison,
    space: Space,
    heats: Sequence[Heat],
    noise: stats.LaunchNoise,
    among: tuple[int, int] = (1, 1),
) -> Likely | None:
    """Return what heats and launches show of an entrant; ``None`` if nothing.

    Args:
        among: from how many it was chosen if only launches show it, which a heat's errors have nothing to do with; and
            if heats do, too.
    """
    heat_views = list(_by_heats(one, compared.baseline, space, heats))
    views = list(_by_launches(one, compared, space, noise))
    if heat_views:
        by_heats = _combined(heat_views)
        # An error that all heats have in common is not reduced by more of them.
        views.append(replace(by_heats, se=math.hypot(by_heats.se, _BESIDE)))
    if not views:
        return None
    combined = _combined(views)
    ratio, degrees = math.exp(combined.log), max(1.0, combined.degrees)
    half = stats.t_quantile(degrees) * combined.se
    is_pooled = len(views) == 1 and views[0].pooled
    wide_half = stats.t_of_largest(degrees, among[bool(heat_views)], shared=is_pooled) * combined.se
    phrases = list(dict.fromkeys(view.words for view in reversed(views)))
    words = " and ".join(w for w in phrases if w != _TRIALS or len(phrases) == 1)
    return Likely(one, (ratio, *stats.interval_of(ratio, half)), math.exp(combined.log - wide_half), words)


def _combined(views: Sequence[_View]) -> _View:
    """Return the mean of some views, weighted by their inverse variances, its error multiplied by Birge's ratio if they
    disagree. The degrees of freedom are Satterthwaite's."""
    weights = [1 / view.se**2 for view in views]
    total = sum(weights)
    log = sum(w * view.log for w, view in zip(weights, views, strict=True)) / total
    se = 1 / math.sqrt(total)
    if len(views) > 1:
        squares = sum(((view.log - log) / view.se) ** 2 for view in views)
        se *= max(1.0, math.sqrt(squares / (len(views) - 1)))
    degrees = 1 / sum((w / total) ** 2 / view.degrees for w, view in zip(weights, views, strict=True))
    return _View(log, se, degrees, views[0].words)


def _by_heats(one: Entrant, baseline: Entrant, space: Space, heats: Sequence[Heat]) -> Iterator[_View]:
    """Yield what heats show about a configuration that loads as the baseline does.

    A heat shows the device's part. The baseline's waits for its loader are added to the time of both; with workers,
    only if there are hardly any.
    """
    if not loads_as(one.config, space.baseline):
        return
    waits = [wait_fraction(e.seen) for e in (baseline, one)]
    most = FEW_WAITS if workers_of(space.baseline) else MOSTLY_DEVICE
    if any(part is None or part > most for part in waits):
        return
    part = waits[0] or 0.0
    own_key, baseline_key = key(device_part(one.config)), key(device_part(space.baseline))
    for heat in heats:
        rows = {key(device_part(e.config)): e for e in heat.entrants if e.ratio is not None}
        own_row, baseline_row = rows.get(own_key), rows.get(baseline_key)
        if own_row is None or baseline_row is None or not own_row.ratio or not baseline_row.ratio:
            continue
        ends = [(e.ratio, e.ratio_ci95[0]) for e in (own_row, baseline_row) if e.ratio and e.ratio_ci95 is not None]
        if len(ends) < 2 or not all(low > 0 for _, low in ends):
            continue
        # The quantile behind the interval is unknown; the normal one does not make the error smaller than it is.
        se = math.hypot(*(math.log(ratio / low) / _NORMAL for ratio, low in ends))
        if not space.is_as_in_heats(own_row.config):
            se = math.hypot(se, _UNLIKE)
        ratio = 1 / ((1 - part) * baseline_row.ratio / own_row.ratio + part)
        yield _View(math.log(ratio), max(_LEAST_SE, se), _DEGREES, _TURNS)


def _by_launches(one: Entrant, compared: Comparison, space: Space, noise: stats.LaunchNoise) -> Iterator[_View]:
    """Yield what separate launches show: those in turns with the baseline if their noise is known, or else all."""
    parts: list[tuple[float, float]] = []
    rounds = shared_rounds(one, compared.baseline)
    if rounds and compared.knows_turns and compared.in_turns(one, compared.baseline):
        ratio, low, _ = compared.ratio(one, compared.baseline)
        degrees = compared.degrees(one)
        if low > 0 and math.isfinite(low):
            parts.append((math.log(ratio / low) / stats.t_quantile(degrees), degrees))
        is_pooled = True
        words = f"{count(rounds, 'launch', 'launches')} of each in turns"
    else:
        launched = [one.launches, compared.baseline.launches]
        if not all(launched):
            return
        is_within = _is_within(one, compared.baseline)
        words = "one launch of each" if max(map(len, launched)) == 1 else "launches at different times"
        words = _TRIALS if is_within else words
        noise = compared.launch_noise(noise)
        rates = [stats.mean_rate([measured_rate(m) for m in measurements], noise) for measurements in launched]
        ratio = rates[0].per_s / rates[1].per_s
        is_pooled = noise.learnt and all(rate.noise is not None for rate in rates)
        if noise.learnt or is_within:
            parts.append(stats.ratio_error(*rates))
        else:
            # Windows show nothing of what differs between launches.
            assumed_sd = noise.sd * math.sqrt(sum(1 / len(measurements) for measurements in launched))
            parts.append((assumed_sd, _ASSUMED_DEGREES))
            parts += [(r.relative_se, r.degrees) for r in rates if r.noise is None and r.relative_se and r.degrees]
        within = [each.trial.result.within is not None for each in (one, compared.baseline)]
        if any(within) and not (all(within) and space.is_as_in_heats(space.baseline)):
            parts.append((_UNLIKE, _DEGREES))
            is_pooled = False
    if parts:
        se, degrees = math.hypot(*(part for part, _ in parts)), stats.satterthwaite(parts)
        yield _View(math.log(ratio), max(_LEAST_SE, se), min(max(1.0, degrees), _MOST_DEGREES), words, is_pooled)


def _standing(contest: Contest, proof: Proof, likely: Likely) -> Standing:
    """Return the figures of the configuration likely to be faster: the baseline's rate times the ratio."""
    compared, baseline_per_s = contest.race.compared(), proof.baseline.samples_per_second
    ratio, low, high = likely.ratio
    rate = stats.Rate(baseline_per_s * ratio, baseline_per_s * low, baseline_per_s * high)
    return standing(likely.one, rate, likely.ratio, contest.race.context.scorer, compared.compile_s(likely.one))
