"""The proof of a winner, or that there is none: the order of its checks, and the part of the budget for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune import stats
from autotune.records import Bottleneck, HoldVerdict, KnobPart, Standing, TrainVerdict, Trial
from autotune.verify.ablation import ablate
from autotune.verify.ceilings import bottlenecks
from autotune.verify.entrant import Entrant, entrant, finalists
from autotune.verify.hold import check_holding
from autotune.verify.race import Final, Race
from autotune.verify.train_check import check_training
from autotune.verify.winner import winner_among, without_useless_knob

#: Fractions of the budget.
CHECK_SHARE, RACE_SHARE, HOLD_SHARE, CEILING_SHARE, ABLATION_SHARE = 0.12, 0.25, 0.05, 0.07, 0.15


@dataclass
class Proof:
    """The figures of record, and the results of the checks.

    Attributes:
        finalists: all configurations that were launched again, the baseline first.
        tie: one sentence on the configuration that the winner was preferred to, if no difference in rate was shown.
        dropped: why finalists dropped out, by trial number.
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
    """Prove a winner; if nothing is shown to be faster, the baseline wins.

    If there is no time for a single round, the figures of the search are used, each from one launch.

    Args:
        complete: complete trials, most promising first.
        noise: noise of one launch, as far as the search has seen.

    Raises:
        InterruptedSearch: the user interrupted the proof.
    """
    launches = final.launches
    limit_s = launches.budget.limit_s
    first = entrant(baseline)
    others = [entrant(t) for t in finalists(final.space, complete, noise)]
    checks = check_training(final, first, others, CHECK_SHARE * limit_s)
    race = Race(final, [first, *others])
    # Time that the search did not need, because it tried everything, goes to the race.
    unused_s = launches.budget.left_s + race.earlier_s - (HOLD_SHARE + CEILING_SHARE + ABLATION_SHARE) * limit_s
    race.run(max(RACE_SHARE * limit_s, unused_s))
    winner, tie, hold = _winner_that_holds(race)
    compared = race.compared()
    same = [e for e in compared.contenders() if final.space.same_batch(e.config)]
    own_batch, _ = winner_among(final, compared, same or [first])
    explained = {e.name: e for e in (first, winner, own_batch)}
    limits = bottlenecks(final, compared, list(explained.values()), CEILING_SHARE * limit_s)
    ablation = ablate(final, compared, winner, ABLATION_SHARE * limit_s)
    simpler = without_useless_knob(race, winner, ablation)
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
    """Run only the race, with all that is left of the budget, and return it with its winner. For replays, which cannot
    run the other checks.

    Args:
        complete, noise: see `prove`.

    Raises:
        InterruptedSearch: the user interrupted the race.
    """
    race = Race(final, [entrant(baseline), *(entrant(t) for t in finalists(final.space, complete, noise))])
    budget = final.launches.budget
    race.run(max(RACE_SHARE * budget.limit_s, budget.left_s + race.earlier_s))
    return race, _winner(race)[0]


def _winner(race: Race) -> tuple[Entrant, str | None]:
    """Return the winner of the rounds so far, and the sentence about a tie, if any."""
    compared = race.compared()
    return winner_among(race.final, compared, compared.contenders())


def _winner_that_holds(race: Race) -> tuple[Entrant, str | None, HoldVerdict | None]:
    """Return the winner that holds, or the baseline; the sentence about a tie; and the last verdict on holding."""
    launches = race.final.launches
    hold: HoldVerdict | None = None
    while True:
        winner, tie = _winner(race)
        if winner is not race.baseline:
            hold = check_holding(race.final, winner, HOLD_SHARE * launches.budget.limit_s)
            if hold.passed is not False:
                return winner, tie, hold
            continue
        # The baseline won, so there is no check of holding and no ablation: more rounds are a better use of their time.
        rounds = race.rounds
        race.run(launches.budget.left_s - CEILING_SHARE * launches.budget.limit_s)
        if race.rounds == rounds:
            return winner, tie, hold
