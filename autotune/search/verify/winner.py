"""Chooses the winner: the baseline unless something is shown to be faster, then the simplest of the unbeaten ones, then
the same without the knobs of no use."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.base.records import KnobPart, Value
from autotune.space import key, simplicity
from autotune.search.verify.ablation import set_back
from autotune.search.verify.comparison import LEAST_LAUNCHES, Comparison, shared_rounds
from autotune.search.verify.entrant import Entrant, peak_bytes
from autotune.search.verify.final import Final
from autotune.search.verify.race import TARGETS, Race


def winner_among(final: Final, compared: Comparison, group: Sequence[Entrant]) -> tuple[Entrant, Entrant]:
    """Return the winner of a group of contenders that contains the baseline.

    The baseline wins unless something is shown to be better. Otherwise, if the objective is the rate, the winner is the
    simplest of those shown to be faster that nothing beats. Such an entrant must also have run about as fast as the
    leader, to within the race's target precision: a simpler configuration may well be slower, and few launches may fail
    to show the difference.

    What does not meet what is required is no contender. If that is the baseline, the best of the others wins.

    Returns:
        The winner, and the fastest, which the winner may have been preferred to (`tie_between`).
    """
    others = [e for e in group if e is not compared.baseline]
    group = [e for e in group if compared.unmet(e) is None]
    shown = [e for e in others if e in group and compared.beats_baseline(e, len(others))]
    if not group:
        return compared.baseline, compared.baseline
    if final.rate_within:
        leader = compared.leader(shown or group)
        near = [e for e in group if compared.ratio(leader, e)[0] <= 1 / (1 - final.rate_within)]
        return max(near, key=compared.score), leader
    if not final.by_rate:
        best = compared.leader(shown or [compared.baseline])
        return best, best
    unbeaten = _unbeaten(compared, shown)
    leader = compared.leader(unbeaten or group)
    winner = compared.baseline
    if unbeaten:
        ties = [e for e in unbeaten if compared.ratio(leader, e)[0] <= 1 + TARGETS[final.device]]
        winner = min(ties, key=lambda e: simplicity(e.config, final.space.baseline, peak_bytes(e.seen)))
    return winner, leader


def still_wins(final: Final, compared: Comparison, one: Entrant) -> bool:
    """Return whether an entrant, once chosen, is better than the baseline by the rounds so far."""
    if one.out is not None or compared.unmet(one) is not None:
        return False
    return final.rate_within > 0 or compared.beats_baseline(one, compared.rivals(one))


def _unbeaten(compared: Comparison, shown: list[Entrant]) -> list[Entrant]:
    """Return the entrants to which no other is shown to be superior.

    An entrant that dropped out has an imprecise ratio to the baseline, from few rounds; others have beaten it.
    """
    return [e for e in shown if all(compared.ratio(rival, e)[1] <= 1 for rival in shown)] or shown


def tie_between(compared: Comparison, leader: Entrant, winner: Entrant) -> str | None:
    """Return one sentence on what the winner was preferred to, and why; ``None`` if it was the fastest itself."""
    if leader is winner:
        return None
    ratio, low, high = compared.ratio(leader, winner)
    if ratio <= 1:
        return None
    among = compared.rivals(leader)
    simpler = "the baseline" if winner is compared.baseline else f"trial {winner.trial.number}"
    # Shown for one entrant alone, but not for the best of several.
    luck = f" for it alone, and one of {among} may seem so by luck" if low > 1 else ""
    return (
        f"Trial {leader.trial.number} ran at {ratio:.3f}× {simpler} (95 %: {low:.3f} to {high:.3f}{luck}): that is no "
        f"proof of being faster, and {simpler} is simpler."
    )


def set_back_useless(race: Race, winner: Entrant, parts: Sequence[KnobPart]) -> Entrant:
    """Return the winner with the knobs set back that were not shown to matter, if measuring that confirms it; else the
    winner itself.

    All of them are set back together. If there is no time for that, or some of them matter together, they are set back
    one after the other, beginning with that of least use.
    """
    target = TARGETS[race.final.device]
    gains = {p.knob: p.gain for p in parts if p.gain is not None and p.gain[1] <= 1 and p.gain[0] <= 1 + target}
    useless = sorted(gains, key=lambda name: gains[name][0])
    simplest = _simpler(race, winner, useless)
    if simplest is not None:
        return simplest
    for name in useless if len(useless) > 1 else []:
        winner = _simpler(race, winner, [name]) or winner
    return winner


def _simpler(race: Race, winner: Entrant, names: Sequence[str]) -> Entrant | None:
    """Return the winner with some knobs set back if it is as good; ``None`` if not, or if nothing can be set back."""
    space = race.final.space
    config = set_back(space, winner.config, [n for n in names if n in winner.config])
    # What the user pinned stays as it is, and the baseline is in the race as itself.
    if key(config) in (key(winner.config), key(space.baseline)) or space.refusal(config) is not None:
        return None
    simpler = _entrant(race, winner, config)
    return simpler if _as_good(race, winner, simpler) else None


def _entrant(race: Race, winner: Entrant, config: dict[str, Value]) -> Entrant:
    """Return the ablation's own entrant with this configuration, or a new one."""
    for one in race.entrants:
        if one.label and key(one.config) == key(config):
            return one
    made = sum(1 for one in race.entrants if one.label)
    return Entrant(config, winner.trial, expected_s=winner.expected_s, label=f"simplified {made}")


def _as_good(race: Race, winner: Entrant, simpler: Entrant) -> bool:
    """Race a simpler configuration against the winner and the baseline; return whether it is shown to be better than
    the baseline and not shown to be worse than the winner, as far as the race can tell."""
    racing = [race.baseline, winner, simpler]
    race.purpose = "simpler"
    missing = max(0, LEAST_LAUNCHES - shared_rounds(simpler, race.baseline))
    # Rounds of an earlier run of the study cost nothing, even if it has spent the budget.
    if race.round_s(racing, missing) > max(0.0, race.final.launches.budget.left_s):
        return False
    if simpler not in race.entrants:
        race.entrants.append(simpler)
    for _ in range(missing):
        race.round(racing)
    compared = race.compared()
    if simpler.out is not None or not compared.in_turns(simpler, winner):
        return False
    if compared.unmet(simpler) is not None or not still_wins(race.final, compared, simpler):
        return False
    if race.final.rate_within and compared.score(simpler) < compared.score(winner):
        return False
    ratio, low, _ = compared.ratio(winner, simpler)
    return low <= 1 and ratio <= 1 + TARGETS[race.final.device]
