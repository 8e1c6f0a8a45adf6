"""Who won: the baseline, unless something is shown to be faster; then the simplest of those that nothing beats; and of
that what is as good without a knob of no use."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.verify.ablation import WORTH_HAVING, Ablation
from autotune.verify.comparison import Comparison
from autotune.verify.entrant import Entrant, peak_bytes, simplicity
from autotune.verify.race import TARGETS, Final, Race

#: In which a configuration without a knob of no use is held against the winner.
ROUNDS_MORE = 2


def winner_among(final: Final, compared: Comparison, group: Sequence[Entrant]) -> tuple[Entrant, str | None]:
    """The best of a group that the baseline is in, or what is as good and simpler.

    The baseline stays where nothing is shown to be faster than it. Only who is can win, and of these the simplest among
    the best: it takes more to be one of those than that few launches show no difference, because what is simpler may
    well be slower. It has to have run as fast, too, to within what the race aims to tell apart.

    Returns:
        The winner, and what it was preferred to, if it was not the fastest itself.
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
    """Those that none of the others is shown to be faster than.

    Who dropped out has a ratio to the baseline from few rounds, which may be anything; against the others it lost.
    """
    return [e for e in shown if all(compared.ratio(rival, e)[1] <= 1 for rival in shown)] or shown


def _tie(compared: Comparison, leader: Entrant, winner: Entrant, *, among: int) -> str:
    """What the winner was preferred to, and why, one sentence.

    Args:
        among: how many there were of which any may seem faster by luck.
    """
    ratio, low, high = compared.ratio(leader, winner)
    simpler = "the baseline" if winner is compared.baseline else f"trial {winner.trial.number}"
    # Shown for one by itself, and not for the best of several.
    luck = f" for it alone, and one of {among} may seem so by luck" if low > 1 else ""
    return (
        f"Trial {leader.trial.number} ran at {ratio:.3f}× {simpler} (95 %: {low:.3f} to {high:.3f}{luck}): that is no "
        f"proof of being faster, and {simpler} is simpler."
    )


def without_the_useless(race: Race, winner: Entrant, ablation: Ablation) -> Entrant:
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
