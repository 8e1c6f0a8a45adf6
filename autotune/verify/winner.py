"""Chooses the winner: the baseline unless something is shown to be faster, then the simplest of the unbeaten ones, then
the same without a knob of no use."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.verify.ablation import WORTH_HAVING, Ablation
from autotune.verify.comparison import Comparison
from autotune.verify.entrant import Entrant, peak_bytes, simplicity
from autotune.verify.race import TARGETS, Final, Race

#: Rounds in which a configuration without a knob of no use races against the winner.
ROUNDS_MORE = 2


def winner_among(final: Final, compared: Comparison, group: Sequence[Entrant]) -> tuple[Entrant, str | None]:
    """Return the winner of a group that contains the baseline.

    The baseline wins unless something is shown to be faster. Otherwise the winner is the simplest of those shown to be
    faster that nothing beats. Such an entrant must also have run about as fast as the leader, to within the race's
    target precision: a simpler configuration may well be slower, and few launches may fail to show the difference.

    Returns:
        The winner, and a sentence on what it was preferred to if it was not the fastest.
    """
    if not final.by_rate:
        return compared.leader(group), None
    others = [e for e in group if e is not compared.baseline]
    unbeaten = _unbeaten(compared, [e for e in others if compared.shown_faster(e, len(others))])
    leader = compared.leader(unbeaten or group)
    winner = compared.baseline
    if unbeaten:
        ties = [e for e in unbeaten if compared.ratio(leader, e)[0] <= 1 + TARGETS[final.device]]
        winner = min(ties, key=lambda e: simplicity(e.config, final.space.baseline, peak_bytes(e.seen)))
    return winner, None if winner is leader else _tie(compared, leader, winner, among=len(others))


def _unbeaten(compared: Comparison, shown: list[Entrant]) -> list[Entrant]:
    """Return the entrants to which no other is shown to be superior.

    An entrant that dropped out has an imprecise ratio to the baseline, from few rounds; others have beaten it.
    """
    return [e for e in shown if all(compared.ratio(rival, e)[1] <= 1 for rival in shown)] or shown


def _tie(compared: Comparison, leader: Entrant, winner: Entrant, *, among: int) -> str:
    """Return one sentence that says what the winner was preferred to, and why.

    Args:
        among: number of entrants, any of which may seem faster by luck.
    """
    ratio, low, high = compared.ratio(leader, winner)
    simpler = "the baseline" if winner is compared.baseline else f"trial {winner.trial.number}"
    # Shown for one entrant alone, but not for the best of several.
    luck = f" for it alone, and one of {among} may seem so by luck" if low > 1 else ""
    return (
        f"Trial {leader.trial.number} ran at {ratio:.3f}× {simpler} (95 %: {low:.3f} to {high:.3f}{luck}): that is no "
        f"proof of being faster, and {simpler} is simpler."
    )


def without_useless_knob(race: Race, winner: Entrant, ablation: Ablation) -> Entrant:
    """Return the winner without a knob of no use if measuring it confirms that; else the winner itself."""
    simpler = ablation.simpler
    budget = race.final.launches.budget
    # The launches get their own names, so that a resume does not take these rounds for the race's.
    race.purpose = "simpler"
    if simpler is None or race.round_s([race.baseline, winner, simpler], ROUNDS_MORE) > budget.left_s:
        return winner
    race.entrants.append(simpler)
    for _ in range(ROUNDS_MORE):
        race.round([race.baseline, winner, simpler])
    if simpler.out is not None or not simpler.again:
        return winner
    compared = race.compared()
    # Keep a win that is shown: do not trade it for a simpler configuration that is not shown to be faster.
    shown = compared.ratio(simpler, race.baseline)[1] > 1 or not race.final.by_rate
    return simpler if shown and compared.ratio(winner, simpler)[2] < WORTH_HAVING else winner
