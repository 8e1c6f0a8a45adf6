"""The proof of a search, and the choice of its winner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune import stats
from autotune.base.records import Bottleneck, Config, DataVerdict, HoldVerdict, KnobPart, Standing, TrainVerdict, Trial
from autotune.knobs import KNOBS
from autotune.search.proof import ProofContext
from autotune.search.proof.ceilings import (
    TAKEOVER,
    ablate,
    bottlenecks,
    check_holding,
    reads_apart,
    set_back,
    takeover_fits,
    takeover_rounds,
)
from autotune.search.proof.race import TARGETS, Comparison, Entrant, Race, entrant, finalists, peak_bytes, shared_rounds
from autotune.search.proof.train_check import (
    check_data,
    check_training,
    covers,
    is_told_by,
    need_s,
    not_checked,
    not_compared,
    takes_s,
)
from autotune.space import key, maths_part, simplicity
from autotune.study.agenda import MATHS_PAYS
from autotune.study.budget import LEAST_LAUNCHES

# Chooses the winner: the baseline unless something is shown to be faster, then the simplest of the unbeaten entrants,
# then that one without its useless knobs.


def winner_among(context: ProofContext, compared: Comparison, group: Sequence[Entrant]) -> tuple[Entrant, Entrant]:
    """Return the winner of a group of contenders that contains the baseline.

    The baseline wins unless something is shown to be better. Otherwise, if the objective is the rate, the winner is the
    simplest of those that are shown to be faster and that nothing beats. It must also have run about as fast as the
    leader, to within the race's target precision: a simpler configuration may well be slower, and a few launches may
    fail to show the difference.

    An entrant that does not meet the requirements is no contender. If that is the baseline, the best of the others
    wins.

    Returns:
        The winner, and the fastest entrant, over which the winner may have been preferred (`tie_between`).
    """
    others = [e for e in group if e is not compared.baseline]
    group = [e for e in group if compared.unmet(e) is None]
    proven = [e for e in others if e in group and compared.beats_baseline(e, len(others))]
    if not group:
        return compared.baseline, compared.baseline
    if context.rate_within:
        leader = compared.leader(proven or group)
        near = [e for e in group if compared.ratio(leader, e)[0] <= 1 / (1 - context.rate_within)]
        return max(near, key=compared.score), leader
    if not context.by_rate:
        best = compared.leader(proven or [compared.baseline])
        return best, best
    # An entrant that dropped out after few rounds has an imprecise ratio to the baseline; others have beaten it.
    unbeaten = [e for e in proven if all(compared.ratio(rival, e)[1] <= 1 for rival in proven)] or proven
    leader = compared.leader(unbeaten or group)
    winner = compared.baseline
    if unbeaten:
        ties = [e for e in unbeaten if compared.ratio(leader, e)[0] <= 1 + TARGETS[context.device]]
        winner = min(ties, key=lambda e: simplicity(e.config, context.space.baseline, peak_bytes(e.seen)))
    return winner, leader


def still_wins(context: ProofContext, compared: Comparison, one: Entrant) -> bool:
    """Return whether an entrant that was chosen is still better than the baseline, judging by the rounds so far."""
    if one.out is not None or compared.unmet(one) is not None:
        return False
    return context.rate_within > 0 or compared.beats_baseline(one, compared.rivals(one))


def tie_between(compared: Comparison, leader: Entrant, winner: Entrant) -> str | None:
    """Return one sentence on the entrant over which the winner was preferred, and why; ``None`` if there was none."""
    if leader is winner:
        return None
    ratio, low, high = compared.ratio(leader, winner)
    if ratio <= 1:
        return None
    rivals = compared.rivals(leader)
    simpler = "the baseline" if winner is compared.baseline else f"trial {winner.trial.number}"
    if shared_rounds(leader, winner) == 1:
        return (
            f"Trial {leader.trial.number} ran at {ratio:.3f}× {simpler} in one launch of each in turns, which is no "
            f"proof of being faster, and {simpler} is simpler."
        )
    # The difference is shown for one entrant alone, but not for the best of several.
    luck = f" for it alone, and one of {rivals} may seem so by luck" if low > 1 and rivals > 1 else ""
    return (
        f"Trial {leader.trial.number} ran at {ratio:.3f}× {simpler} (95 %: {low:.3f} to {high:.3f}{luck}): that is no "
        f"proof of being faster, and {simpler} is simpler."
    )


def set_back_useless(
    race: Race, winner: Entrant, parts: Sequence[KnobPart], passes: Callable[[Entrant], bool] = lambda one: True
) -> Entrant:
    """Return the winner with the knobs that were not shown to matter set back, if a measurement confirms this; else the
    winner itself.

    One without which the winner is shown to be faster comes first. Then all of them are set back together; if there is
    no time for that, or if some of them matter in combination, one after the other, the least useful first.

    Args:
        passes: checks a simpler configuration that is as good; returns whether it may take the winner's place.
    """
    target = TARGETS[race.context.device]
    gains = {p.knob: p.gain for p in parts if p.gain is not None and p.gain[1] <= 1 and p.gain[0] <= 1 + target}
    useless = sorted(gains, key=lambda name: gains[name][0])
    for name in [name for name in useless[:1] if gains[name][2] < 1]:
        faster = _simpler(race, winner, [name], passes)
        if faster is not None:
            winner = faster
            useless.remove(name)
    simplest = _simpler(race, winner, useless, passes)
    if simplest is not None:
        return simplest
    for name in useless if len(useless) > 1 else []:
        winner = _simpler(race, winner, [name], passes) or winner
    return winner


def _simpler(race: Race, winner: Entrant, names: Sequence[str], passes: Callable[[Entrant], bool]) -> Entrant | None:
    """Return the winner with some knobs set back, if the race shows it to be better than the baseline and does not show
    it to be worse than the winner; ``None`` if not, or if nothing can be set back."""
    space = race.context.space
    config = set_back(space, winner.config, [n for n in names if n in winner.config])
    # What the user has pinned stays as it is, and the baseline is already in the race.
    if key(config) in (key(winner.config), key(space.baseline)) or space.refusal(config) is not None:
        return None
    # The ablation may have launched it.
    variants = [candidate for candidate in race.entrants if candidate.label]
    simpler = next((candidate for candidate in variants if key(candidate.config) == key(config)), None)
    if simpler is None:
        label = f"simplified {len(variants)}"
        simpler = Entrant(config, winner.trial, expected_s=winner.expected_s, label=label)
    race.purpose = TAKEOVER
    if not takeover_fits(race, winner, simpler):
        return None
    if simpler not in race.entrants:
        race.entrants.append(simpler)
    for racing in takeover_rounds(race, winner, simpler):
        race.round(racing)
    compared = race.compared()
    if not compared.in_turns(simpler, winner) or not still_wins(race.context, compared, simpler):
        return None
    if (race.context.rate_within or not race.context.by_rate) and compared.score(simpler) < compared.score(winner):
        return None
    ratio, low, _ = compared.ratio(winner, simpler)
    return simpler if low <= 1 and ratio <= 1 + TARGETS[race.context.device] and passes(simpler) else None


# The proof of a winner, or that there is none: the order of the checks, and the share of the budget for each.

#: The search may check how a script's trial trains if that takes no more than this fraction of the budget left.
EARLY_SHARE = 0.15
#: Fractions of `ProofContext.budget_s`.
CHECK_SHARE, RACE_SHARE, HOLD_SHARE, CEILING_SHARE, ABLATION_SHARE = 0.12, 0.25, 0.05, 0.07, 0.18
#: Share of the ceilings if a first epoch is to be measured, too.
COLD_SHARE = 0.2
#: A configuration whose interval reaches above this speedup may be faster by an amount that matters.
MAY_BE_FASTER = 1.05


def ceiling_s(context: ProofContext) -> float:
    """Return how long the ceilings may take: none are measured for a script."""
    if context.by_command:
        return 0.0
    return (COLD_SHARE if reads_apart(context) else CEILING_SHARE) * context.budget_s


def _check_s(context: ProofContext) -> float:
    """Return how long the training checks may take."""
    # A script starts anew for each run of a check, and neither holding nor ceilings are measured for one.
    share = CHECK_SHARE + HOLD_SHARE + CEILING_SHARE if context.by_command else CHECK_SHARE
    return share * context.budget_s


@dataclass
class Proof:
    """The figures of record, and the results of the checks.

    Attributes:
        finalists: the baseline, and all configurations that were launched again in turns with it.
        unproven: numbers of trials that may be better than the baseline but were not launched again in turns with it.
        baseline_unmet: the requirements that the baseline does not meet, as a clause.
        tie: one sentence on the configuration over which the winner was preferred, if no difference in rate was shown.
        dropped: why finalists dropped out, by trial number; doubted: those that would have won, and are not known to
            train.
    """

    baseline: Standing
    best: Standing
    best_same_batch: Standing
    finalists: tuple[Standing, ...] = ()
    unproven: tuple[int, ...] = ()
    baseline_unmet: str | None = None
    tie: str | None = None
    dropped: dict[int, str] = field(default_factory=dict)
    doubted: dict[int, str] = field(default_factory=dict)
    bottlenecks: tuple[Bottleneck, ...] = ()
    checks: tuple[TrainVerdict, ...] = ()
    hold: HoldVerdict | None = None
    ablation: tuple[KnobPart, ...] = ()
    data: tuple[DataVerdict, ...] = ()


class Contest:
    """The finalists of a search, which race against the baseline, and the verdicts on whether they train and load
    alike.

    If none of them is faster, the search may continue and enter others.
    """

    def __init__(self, context: ProofContext, baseline: Trial) -> None:
        self.race = Race(context, [entrant(baseline)])
        self.checks: list[TrainVerdict] = []
        #: Trials that the search has found to train wrongly.
        self._wrong_early: list[Entrant] = []
        #: Entrants that would have won, and are not known to train.
        self._doubted: list[Entrant] = []
        self._data: dict[str, DataVerdict] = {}
        self._newest = 0

    @property
    def finalists(self) -> list[Entrant]:
        """All finalists so far, without the baseline."""
        return self.race.entrants[1:]

    def check_early(self, trial: Trial) -> list[Config]:
        """Check how a trial of a script trains while the search goes on, if that takes little of the time left; return
        its configuration if it trains wrongly, else nothing."""
        context, baseline, one = self.race.context, self.race.baseline, entrant(trial)
        share_s = EARLY_SHARE * context.launches.budget.left_s
        if not context.sees_inside or need_s(context, baseline, [one], runs=1) > share_s:
            return []
        # What is open is checked again by the proof, which has more time.
        self.checks[:0] = [v for v in check_training(context, baseline, [one], share_s) if v.passed is not None]
        if not self._is_wrong(one):
            return []
        self._wrong_early.append(one)
        return [one.config]

    def _is_wrong(self, one: Entrant) -> bool:
        return any(verdict.passed is False and covers(verdict, one) for verdict in self.checks)

    def choose(self, complete: Sequence[Trial], noise: stats.LaunchNoise) -> list[Trial]:
        """Return the trials to enter next out of the complete ones, which are sorted by promise; the noise is that of
        the search's launches."""
        race, baseline, required = self.race, self.race.baseline, self.race.context.required
        entered = {one.trial.number for one in race.entrants}
        new = [t for t in complete if t.number not in entered and required.allow(t)]
        if len(entered) > 1 and required.allow(baseline.trial):
            # Of the trials that were less promising than the losers, only those that were faster in the search may win;
            # and none if the losers were raced.
            new = [t for t in new if (t.score or 0.0) > (baseline.trial.score or 0.0)]
            new = [t for t in new if t.number > self._newest or not race.rounds]
        return finalists(race.context.space, new, noise, self._leanest(new))

    def _leanest(self, new: Sequence[Trial]) -> list[Trial]:
        """Return the trials with about the highest rate, best first by an objective that chooses among them."""
        within, scorer = self.race.context.rate_within, self.race.context.scorer
        top = max((t.rate_per_s or 0.0 for t in new), default=0.0)
        if not within:
            return []
        near = [t for t in new if (t.rate_per_s or 0.0) >= (1 - within) * top]
        measured = ((t, m) for t in near if (m := t.result.measurement) is not None)
        scored = [(t, score) for t, m in measured if (score := scorer.known(m)) is not None]
        return [t for t, _ in sorted(scored, key=lambda one: -one[1])]

    def race_finalists(
        self, context: ProofContext, trials: Sequence[Trial], newest: int, *, as_round: bool = False
    ) -> None:
        """Let these trials race. An entrant that does not train or load as it should drops out.

        A workload's finalists are checked beforehand, which takes a fraction of a launch. A script is started anew for
        each run of a check, so only the leader is checked.

        Args:
            context: the conditions from now on. newest: number of the search's last trial. as_round: the search's
                own launches are one (see `StudyLoop.counts_as_round`).
        """
        limit_s, race = context.budget_s, self.race
        race.context, self._newest = context, newest
        others = [entrant(t) for t in trials]
        if not context.by_command:
            self._check(others)
        # Time that the search did not need because it tried everything goes to the race.
        reserved_s = ABLATION_SHARE * limit_s + takes_s(context, others)
        if context.by_command:
            reserved_s += min(_check_s(context), need_s(context, race.baseline, others))
        else:
            reserved_s += HOLD_SHARE * limit_s + ceiling_s(context)
        rounds = -1
        while others and race.rounds > rounds:
            rounds = race.rounds
            race.join(others)
            if as_round and not rounds:
                race.adopt()
                self._check_before_rounds(others)
            racing_before = -1
            while racing_before != len(race.still_racing):
                race.run(max(RACE_SHARE * limit_s, context.launches.budget.left_s + race.earlier_s - reserved_s))
                racing_before = len(race.still_racing)
                self.checked_winner()
            # Entrants for which there was no time beside the more promising ones.
            crowded_out = [e for e in others if e.out is None and shared_rounds(e, race.baseline) < LEAST_LAUNCHES]
            others = crowded_out if self.is_lost else []

    def _check_before_rounds(self, entered: Sequence[Entrant]) -> None:
        """Check how the fastest in the search's own launches of a script trains if there is time for that or for a
        second round, but not for both: that it is likely to be faster is known, and it may compute something else."""
        context, baseline, compared = self.race.context, self.race.baseline, self.race.compared()
        leader = max(entered, key=lambda one: compared.ratio(one, baseline)[0])
        pays = context.by_rate and compared.ratio(leader, baseline)[0] >= MATHS_PAYS
        if not pays or not self._may_train_otherwise(leader):
            return
        check_s, left_s = need_s(context, baseline, [leader], runs=1), context.launches.budget.left_s
        if check_s <= left_s < check_s + self.race.round_s([baseline, leader]):
            self._trains(leader)

    def checked_winner(self, fits: Callable[[Entrant], bool] = lambda one: True) -> tuple[Entrant, Entrant]:
        """Return the winner among the contenders that fit, which has passed the checks, and the fastest of them. One
        that trains differently from the baseline, or whose loader delivers other samples, drops out."""
        race = self.race
        while True:
            compared = race.compared()
            result = winner_among(race.context, compared, [e for e in compared.contenders() if fits(e)])
            if result[0] is race.baseline or self.passes(result[0]):
                return self._checked_or_safe(result, compared, fits)
            race.reopen()

    def _checked_or_safe(
        self, result: tuple[Entrant, Entrant], compared: Comparison, fits: Callable[[Entrant], bool]
    ) -> tuple[Entrant, Entrant]:
        """Return the winner and the fastest; instead of a winner that computes something else, and for whose check
        there was no time, one that computes the same, if it is shown to be faster than the baseline, too, and not much
        slower."""
        (winner, leader), context = result, self.race.context
        if not self._may_train_otherwise(winner):
            return result
        alike = [e for e in compared.contenders() if fits(e) and context.space.same_maths(e.config)]
        safe, _ = winner_among(context, compared, alike)
        if safe is self.race.baseline or compared.ratio(winner, safe)[0] >= MATHS_PAYS or not self.passes(safe):
            return result
        return safe, leader

    def _may_train_otherwise(self, one: Entrant) -> bool:
        """Return whether an entrant computes something else than the baseline, and was not checked."""
        checked = any(verdict.passed and covers(verdict, one) for verdict in self.checks)
        return not checked and not self.race.context.space.same_maths(one.config)

    def tie(self, compared: Comparison, leader: Entrant, winner: Entrant) -> str | None:
        """Return one sentence on the entrant over which the winner was preferred, and why; ``None`` if the winner was
        itself the fastest."""
        if self.race.context.rate_within:
            # It was preferred by its score.
            return None
        preferred = winner is not self.race.baseline and not self._may_train_otherwise(winner)
        if leader is winner or not preferred or not self._may_train_otherwise(leader):
            return tie_between(compared, leader, winner)
        ratio, low, high = compared.ratio(leader, winner)
        return (
            f"Trial {leader.trial.number} ran at {ratio:.3f}× trial {winner.trial.number} (95 %: {low:.3f} to "
            f"{high:.3f}), but there was no time to check how it trains."
        )

    def passes(self, one: Entrant) -> bool:
        """Check how an entrant trains and what it loads, unless that is known; return whether it stays in the race."""
        return self._trains(one) and self.delivers(one)

    def leave_unchecked(self, one: Entrant, reason: str) -> None:
        """Note that nothing further is checked about an entrant, for this reason."""
        if not self._knows_training(one):
            self.checks[:0] = not_checked(self.race.context, one, reason)
        if key(one.config) not in self._data:
            self._data[key(one.config)] = not_compared(self.race.context, one, reason)

    def refusal(self, one: Entrant) -> str | None:
        """Return why an entrant may not be promised, by the checks so far; ``None`` if it may be."""
        own = [verdict for verdict in self.checks if covers(verdict, one)]
        wrong = next((verdict for verdict in own if verdict.passed is False), None)
        if wrong is not None:
            return f"fast but wrong: {wrong.reason}"
        if any(verdict.passed for verdict in own):
            return None
        doubt = next((verdict for verdict in own if verdict.differs), None)
        if doubt is not None:
            return doubt.reason
        changed = self.race.context.space.changed_maths(one.config).items()
        for verdict in self.checks:
            if (verdict.differs or verdict.passed is False) and changed & verdict.config.items():
                return f"not checked, and it computes like one that is not known to train: {verdict.reason}"
        return None

    def _trains(self, one: Entrant) -> bool:
        if self.refusal(one) is None and not self._knows_training(one):
            # One check covers those that differ only in loader and batch size.
            alike = [e for e in self._unchecked if e is not one and maths_part(e.config) == maths_part(one.config)]
            self._check([one, *alike])
            if one.out is not None:
                # Whatever is wrong with it may be wrong with the others, which should not race for nothing.
                self._check(self._unchecked)
        refusal = self.refusal(one)
        if one.out is None and refusal is not None:
            one.out = refusal
            if not self._is_wrong(one):
                self._doubted.append(one)
                self.race.context.observer.says(f"{one.title} is out: {refusal}")
        return one.out is None

    def _knows_training(self, one: Entrant) -> bool:
        """Return whether a verdict says how an entrant trains, or why that is unknown."""
        return any(is_told_by(self.race.context, verdict, one) for verdict in self.checks)

    @property
    def _unchecked(self) -> list[Entrant]:
        """Finalists still in the race whose training has not been checked."""
        checked = {number for verdict in self.checks for number in verdict.trials}
        return [e for e in self.finalists if e.out is None and not e.label and e.trial.number not in checked]

    def _check(self, entrants: Sequence[Entrant]) -> None:
        context, share_s = self.race.context, _check_s(self.race.context)
        if context.by_command:
            # It may also use what the race has left over, since only the gains come after it.
            share_s = max(share_s, context.launches.budget.left_s - takes_s(context, entrants))
        self.checks[:0] = check_training(context, self.race.baseline, entrants, share_s)

    def delivers(self, one: Entrant) -> bool:
        """Compare what an entrant loads, unless that has been done; return whether it stays in the race."""
        verdict = self._data.get(key(one.config))
        if verdict is None:
            context = self.race.context
            verdict = self._data[key(one.config)] = check_data(context, one)
            if verdict.passed is False:
                one.out = f"fast, but it loads other data: {verdict.reason}"
                context.observer.says(f"{one.title} is {one.out}")
            elif verdict.passed is None:
                context.observer.says(f"{one.title}: what it loads was not compared: {verdict.reason}")
        return verdict.passed is not False

    def data_of(self, one: Entrant) -> DataVerdict | None:
        """Return the verdict on an entrant's data; ``None`` if they were not compared."""
        return self._data.get(key(one.config))

    @property
    def doubted(self) -> dict[int, str]:
        """Why entrants that would have won are not known to train, by their trials' numbers."""
        return {e.trial.number: e.out for e in self._doubted if e.out is not None and not e.label}

    @property
    def dropped(self) -> dict[int, str]:
        """Why trials dropped out, by their numbers."""
        entrants = (*self._wrong_early, *self._doubted, *self.race.entrants)
        return {e.trial.number: e.out for e in entrants if e.out is not None and not e.label}

    @property
    def loading_otherwise(self) -> list[Config]:
        """Configurations whose loader delivers other samples than the baseline's."""
        return [verdict.config for verdict in self._data.values() if verdict.passed is False]

    @property
    def is_lost(self) -> bool:
        """Whether no finalist is faster than the baseline, and more rounds would hardly change that."""
        return self.race.is_decided and _winner(self.race)[0] is self.race.baseline

    @property
    def wrong(self) -> list[Config]:
        """Configurations that do not train like eager fp32."""
        failed = [verdict.config for verdict in self.checks if verdict.passed is False]
        return [*failed, *(one.config for one in self.finalists if self._is_wrong(one))]


def prove(contest: Contest, noise: stats.LaunchNoise) -> Proof:
    """Prove a winner, given the noise of the search's launches; the baseline wins if nothing is shown to be better."""
    race, checks, others = contest.race, contest.checks, contest.finalists
    context, first = race.context, race.baseline
    launches, limit_s = context.launches, context.budget_s
    winner, leader, hold = _winner_that_holds(contest)
    preferred = winner
    if not context.space.same_training(winner.config):
        # The winner at the user's own batch size is checked while there is time.
        contest.checked_winner(lambda one: context.space.same_training(one.config))
    # Only the ceilings come after the ablation, so it may use what is left.
    parts = ablate(race, winner, max(ABLATION_SHARE * limit_s, launches.budget.left_s - ceiling_s(context)))
    winner, hold = _without_useless(contest, winner, parts, hold)
    if winner is not first:
        _narrow(race, winner)
    compared = race.compared()
    if winner is not first and not still_wins(context, compared, winner):
        # The rounds since then have refuted the proof. Another finalist may still be better than the baseline.
        winner.out = winner.out or compared.unmet(winner)
        race.reopen()
        winner, leader, hold = _winner_that_holds(contest)
        compared, preferred, parts = race.compared(), winner, ()
    own_batch = winner
    if not context.space.same_training(winner.config):
        own_batch, _ = contest.checked_winner(lambda one: context.space.same_training(one.config))
        compared = race.compared()
    explained = {e.name: e for e in (first, winner, own_batch)}
    limits = bottlenecks(context, compared, list(explained.values()), ceiling_s(context))
    compared_entrants = [e for e in race.entrants if compared.in_turns(e, first)]
    is_baseline_unfit = compared.unmet(first) is not None
    not_compared_entrants = [e for e in others if e.out is None and e not in compared_entrants]
    unproven = [e.trial.number for e in not_compared_entrants if is_baseline_unfit or _promising(e, first, noise)]
    return Proof(
        baseline=compared.standing(first),
        best=compared.standing(winner),
        best_same_batch=compared.standing(own_batch),
        # Variants of the winner appear as the gains of its knobs.
        finalists=tuple(compared.standing(e) for e in compared_entrants if not e.label or e in (winner, own_batch)),
        unproven=tuple(unproven),
        baseline_unmet=compared.unmet(first),
        tie=contest.tie(compared, leader, preferred),
        dropped=contest.dropped,
        doubted=contest.doubted,
        bottlenecks=tuple(limits),
        checks=tuple(checks),
        hold=hold,
        ablation=parts,
        data=tuple(v for e in explained.values() if (v := contest.data_of(e)) is not None),
    )


def _narrow(race: Race, winner: Entrant) -> None:
    """Spend the time that nothing else needs on the figures to be reported: the winner's, and those of the fastest at
    the user's own batch size."""
    space, budget = race.context.space, race.context.launches.budget
    compared = race.compared()
    others = [e for e in compared.contenders() if e is not race.baseline and space.same_training(e.config)]
    racing = [race.baseline, winner]
    if others and not space.same_training(winner.config):
        racing.append(compared.leader(others))
    for entrants in (racing, racing[:2]):
        race.narrow(entrants, lambda: budget.left_s - ceiling_s(race.context))


def _promising(one: Entrant, baseline: Entrant, noise: stats.LaunchNoise) -> bool:
    """Return whether a configuration may be faster than the baseline, judging by the search's own launches of both,
    which took place at different times: the ratio only tells whether another launch is worthwhile."""
    rate, baseline_rate = one.trial.rate_per_s, baseline.trial.rate_per_s
    if not rate or not baseline_rate:
        return True
    reach = math.sqrt(2) * stats.t_quantile(noise.degrees) * noise.sd
    return rate / baseline_rate > math.exp(-reach)


def _without_useless(
    contest: Contest, winner: Entrant, parts: Sequence[KnobPart], hold: HoldVerdict | None
) -> tuple[Entrant, HoldVerdict | None]:
    """Set back the winner's useless knobs, and check the result as the winner was checked.

    Returns:
        The winner, unless the simpler configuration passes the checks; the verdict on holding.
    """
    race, checks, final_hold = contest.race, contest.checks, hold
    context, limit_s = race.context, race.context.budget_s
    # A winner that is known to train correctly, or to load the same data, is not given up for one that is not.
    is_winner_checked = any(verdict.passed and covers(verdict, winner) for verdict in checks)
    winner_data = contest.data_of(winner)

    def passes(simpler: Entrant) -> bool:
        nonlocal final_hold
        delivers, data = contest.delivers(simpler), contest.data_of(simpler)
        is_less = winner_data is not None and winner_data.passed and (data is None or not data.passed)
        if not delivers or is_less:
            return False
        verdicts: list[TrainVerdict] = []
        if maths_part(simpler.config) != maths_part(winner.config):
            verdicts = check_training(context, race.baseline, [simpler], _check_s(context))
            if any(v.passed is False or v.differs or (is_winner_checked and not v.passed) for v in verdicts):
                return False
        if _needs_holding(simpler, winner, hold):
            simpler_hold = check_holding(context, simpler, HOLD_SHARE * limit_s)
            if not simpler_hold.passed:
                return False
            final_hold = simpler_hold
        # The simpler configuration has the winner's trial number, so its verdicts come first.
        checks[:0] = verdicts
        return True

    return set_back_useless(race, winner, parts, passes), final_hold


def _needs_holding(simpler: Entrant, winner: Entrant, hold: HoldVerdict | None) -> bool:
    """Return whether the winner with some knobs set back may use so much more memory that holding must be checked."""
    changed = [n for n, v in winner.config.items() if n in KNOBS and KNOBS[n].memory and simpler.config.get(n) != v]
    if not changed or (
        changed == ["batch_size"] and int(simpler.config["batch_size"]) <= int(winner.config["batch_size"])
    ):
        return False
    simpler_bytes, winner_bytes = peak_bytes(simpler.again), peak_bytes(winner.again)
    if hold is None or hold.hold is None or simpler_bytes is None or winner_bytes is None:
        return True
    # The extra memory of a long run may be twice that of its own launches.
    extra = 2 * max(0, simpler_bytes - winner_bytes) / hold.hold.capacity_bytes
    return hold.hold.headroom - extra < hold.headroom_wanted


def race_winner(
    context: ProofContext, complete: Sequence[Trial], baseline: Trial, noise: stats.LaunchNoise
) -> tuple[Race, Entrant]:
    """Run only the race, with all that is left of the budget; return the race and its winner. Used for replays, which
    cannot run the other checks. For ``complete`` and ``noise`` see `Contest.choose`."""
    race = Race(context, [entrant(baseline), *(entrant(t) for t in finalists(context.space, complete, noise))])
    budget = context.launches.budget
    race.run(max(RACE_SHARE * context.budget_s, budget.left_s + race.earlier_s))
    return race, _winner(race)[0]


def _winner(race: Race) -> tuple[Entrant, Entrant]:
    """Return the winner and the fastest entrant by the rounds so far."""
    compared = race.compared()
    return winner_among(race.context, compared, compared.contenders())


def _winner_that_holds(contest: Contest) -> tuple[Entrant, Entrant, HoldVerdict | None]:
    """Return the winner that holds, or else the baseline; the fastest entrant; and the last verdict on holding."""
    race = contest.race
    launches = race.context.launches
    hold: HoldVerdict | None = None
    while True:
        winner, leader = contest.checked_winner()
        if winner is not race.baseline:
            limit_s = race.context.budget_s
            # The check ends when the memory has settled, so it rarely takes all of the spare time.
            unused_s = launches.budget.left_s - ceiling_s(race.context) - ABLATION_SHARE * limit_s
            hold = check_holding(race.context, winner, max(HOLD_SHARE * limit_s, unused_s))
            if hold.passed is not False:
                return winner, leader, hold
            race.reopen()
            continue
        # The baseline won, so holding and ablation are not needed: more rounds are a better use of their time.
        rounds = race.rounds
        race.run(launches.budget.left_s - ceiling_s(race.context))
        if race.rounds == rounds:
            return winner, leader, hold
