"""The winner is proven, not sampled: everything between the end of the search and the profile.

In this order, each within its part of the budget: do the finalists train like eager fp32 (`train_gate`), how fast are
they when launched again in turns with the baseline (`race`), does the winner stay inside the device's memory
(`holding`), what limits it (`ceilings`), and what did each of its knobs give (`ablation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune import stats
from autotune.records import Bottleneck, HoldVerdict, KnobPart, Standing, TrainVerdict, Trial
from autotune.verify.ablation import WORTH_HAVING, Ablation, ablate
from autotune.verify.ceilings import bottlenecks
from autotune.verify.entrant import Entrant, entrant, finalists, peak_bytes, simplicity
from autotune.verify.holding import check_holding
from autotune.verify.race import TARGETS, Final, Race
from autotune.verify.train_gate import check_training

__all__ = ["Final", "Proof", "prove", "race_winner"]

#: Parts of the budget.
CHECK_SHARE, RACE_SHARE, HOLD_SHARE, CEILING_SHARE, ABLATION_SHARE = 0.12, 0.25, 0.05, 0.07, 0.15

#: In which a configuration without a knob of no use is held against the winner.
ROUNDS_MORE = 2


@dataclass
class Proof:
    """The figures of record, and what was found out about the finalists.

    Attributes:
        finalists: everybody who was launched again, the baseline first.
        tie: what the winner was preferred to although nothing showed it to be faster, one sentence.
        dropped: why finalists are out, by trial number.
    """

    baseline: Standing
    best: Standing
    best_same_batch: Standing
    finalists: tuple[Standing, ...] = ()
    tie: str | None = None
    dropped: dict[int, str] = field(default_factory=dict)
    bottlenecks: tuple[Bottleneck, ...] = ()
    checks: tuple[TrainVerdict, ...] = ()
    hold: HoldVerdict | None = None
    ablation: tuple[KnobPart, ...] = ()


def prove(final: Final, complete: Sequence[Trial], baseline: Trial, noise: stats.LaunchNoise) -> Proof:
    """Prove a winner, or that there is none: then the baseline is the winner.

    With no time for a single round the search's own figures stand, each resting on one launch.

    Args:
        complete: complete trials, the most promising first.
        noise: of one launch, as far as the search has seen.

    Raises:
        InterruptedSearch: a signal came.
    """
    launches = final.launches
    limit_s = launches.budget.limit_s
    first = entrant(baseline)
    others = [entrant(t) for t in finalists(final.space, complete, noise)]
    checks = check_training(final, first, others, CHECK_SHARE * limit_s)
    race = Race(final, [first, *others])
    # What the search did not need (everything was tried) is better spent on telling the best apart.
    unused_s = launches.budget.left_s + race.earlier_s - (HOLD_SHARE + CEILING_SHARE + ABLATION_SHARE) * limit_s
    race.run(max(RACE_SHARE * limit_s, unused_s))
    hold: HoldVerdict | None = None
    while True:
        winner, tie = _winner(race, race.compared().contenders())
        if winner is first:
            # Nothing has to hold and no knob gave anything: that time is better spent on being surer.
            rounds = race.rounds
            race.run(launches.budget.left_s - CEILING_SHARE * limit_s)
            if race.rounds > rounds:
                continue
            break
        hold = check_holding(final, winner, HOLD_SHARE * limit_s)
        if hold.passed is not False:
            break
    compared = race.compared()
    same = [e for e in compared.contenders() if final.space.same_batch(e.config)]
    own_batch, _ = _winner(race, same or [first])
    limits = bottlenecks(final, compared, _unique([first, winner, own_batch]), CEILING_SHARE * limit_s)
    ablation = ablate(final, compared, winner, ABLATION_SHARE * limit_s)
    simpler = _without_the_useless(race, winner, ablation)
    if own_batch is winner and final.space.same_batch(simpler.config):
        own_batch = simpler
    winner = simpler
    compared = race.compared()
    return Proof(
        baseline=compared.standing(first),
        best=compared.standing(winner),
        best_same_batch=compared.standing(own_batch),
        finalists=tuple(compared.standing(e) for e in race.entrants if e.again or e is first),
        tie=tie,
        dropped={e.trial.number: e.out for e in race.entrants if e.out is not None and not e.label},
        bottlenecks=tuple(limits),
        checks=tuple(checks),
        hold=hold,
        ablation=ablation.parts,
    )


def race_winner(
    final: Final, complete: Sequence[Trial], baseline: Trial, noise: stats.LaunchNoise
) -> tuple[Race, Entrant]:
    """Only the race, on all that is left of the budget, and who wins it: for where nothing else can be asked.

    Args:
        complete, noise: see `prove`.

    Raises:
        InterruptedSearch: a signal came.
    """
    race = Race(final, [entrant(baseline), *(entrant(t) for t in finalists(final.space, complete, noise))])
    budget = final.launches.budget
    race.run(max(RACE_SHARE * budget.limit_s, budget.left_s + race.earlier_s))
    return race, _winner(race, race.compared().contenders())[0]


def _unique(entrants: Sequence[Entrant]) -> list[Entrant]:
    return list({e.name: e for e in entrants}.values())


def _winner(race: Race, group: Sequence[Entrant]) -> tuple[Entrant, str | None]:
    """The best of a group that the baseline is in, or what is as good and simpler.

    The baseline stays where nothing is shown to be faster than it. Only who is can win, and of these the simplest among
    the best: it takes more to be one of those than that few launches show no difference, because what is simpler may
    well be slower. It has to have run as fast, too, to within what the race aims to tell apart.

    Returns:
        The winner, and what it was preferred to, if it was not the fastest itself.
    """
    compared = race.compared()
    if not race.final.by_rate:
        return compared.leader(group), None
    others = [e for e in group if e is not race.baseline]
    shown = [e for e in others if compared.shown_faster(e, len(others))]
    # Who dropped out has a ratio to the baseline from few rounds, which may be anything; against the others it lost.
    unbeaten = [e for e in shown if all(compared.ratio(rival, e)[1] <= 1 for rival in shown)] or shown
    leader = compared.leader(unbeaten or group)
    winner = race.baseline
    if unbeaten:
        ties = [e for e in unbeaten if compared.ratio(leader, e)[0] <= 1 + TARGETS[race.final.device]]
        winner = min(ties, key=lambda e: simplicity(e.config, race.final.space.baseline, peak_bytes(e.seen)))
    if winner is leader:
        return winner, None
    ratio, low, high = compared.ratio(leader, winner)
    simpler = "the baseline" if winner is race.baseline else f"trial {winner.trial.number}"
    # Shown for one by itself, and not for the best of several.
    luck = f" for it alone, and one of {len(others)} may seem so by luck" if low > 1 else ""
    return winner, (
        f"Trial {leader.trial.number} ran at {ratio:.3f}× {simpler} (95 %: {low:.3f} to {high:.3f}{luck}): that is no "
        f"proof of being faster, and {simpler} is simpler."
    )


def _without_the_useless(race: Race, winner: Entrant, ablation: Ablation) -> Entrant:
    """The winner with a knob of no use set back, once that was measured beside it; else the winner itself."""
    simpler = ablation.simpler
    budget = race.final.launches.budget
    # Under a name of their own: a resume must not take these rounds for the race's.
    race.purpose = "simpler"
    if simpler is None or race.round_s([race.baseline, winner, simpler], ROUNDS_MORE) > budget.left_s:
        return winner
    race.entrants.append(simpler)
    for _ in range(ROUNDS_MORE):
        race.round([race.baseline, winner, simpler])
    if simpler.out is not None or not simpler.again:
        return winner
    compared = race.compared()
    # A win that is shown is not given away for half of it.
    shown = compared.ratio(simpler, race.baseline)[1] > 1 or not race.final.by_rate
    return simpler if shown and compared.ratio(winner, simpler)[2] < WORTH_HAVING else winner
